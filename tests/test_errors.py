"""Optional packages: a missing one is named together with the command that installs it."""

import subprocess
import sys

import pytest

from nuclr.errors import EXTRAS, UserError, install_command, printable, require


def test_require_names_a_missing_package_its_extra_and_what_needs_it(monkeypatch):
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(UserError) as caught:
        require("pyarrow.parquet", purpose="a.parquet")
    assert all(words in str(caught.value) for words in ("a.parquet", "pyarrow", install_command("hf")))


def test_a_package_that_is_installed_but_broken_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import a_dependency_of_its_own\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_dependency_of_its_own"):
        require("broken_package", extra="hf")


@pytest.mark.parametrize("package", ["typer", "yaml"])
def test_the_command_line_without_an_extra_says_so_in_one_line(package):
    code = f"import sys; sys.modules[{package!r}] = None; sys.argv = ['nuclr', 'train', 'device=cpu', 'out=/nowhere']\n"
    code += "from nuclr.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    assert package in done.stderr and install_command(EXTRAS[package]) in done.stderr


def test_printable_shows_control_characters_instead_of_sending_them():
    assert printable("a\x1b]0;owned\x07 b\r\x9bc\x00") == "a\\x1b]0;owned\\x07 b\\r\\x9bc\\x00"
    assert printable("\u202egpj.exe \ud800") == "\\u202egpj.exe \\ud800"
    assert printable("two lines\n\tgrün ✓ 猫 שלום 👩\u200d🚀") == "two lines\n\tgrün ✓ 猫 שלום 👩\u200d🚀"
