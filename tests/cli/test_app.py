"""The command line itself: help without heavy imports, version, exit status."""

import subprocess
import sys

import pytest

from nuclr import __version__


def test_help_and_version_do_not_import_torch():
    program = (
        "import sys; from nuclr import cli; sys.argv = ['nuclr', '{}']\n"
        "try: cli.main()\n"
        "finally: assert not {{'torch', 'numpy'}} & set(sys.modules)"
    )
    for option, expected in (("--help", "popularity"), ("--version", f"nuclr {__version__}")):
        command = [sys.executable, "-c", program.format(option)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        assert expected in ended.stdout


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (PermissionError(13, "Denied", "a.txt"), 2), (OSError(28, "Full"), 1)],
)
def test_a_wrong_path_is_the_users_mistake_and_a_full_disk_is_not(nuclr, monkeypatch, tmp_path, error, status):
    from nuclr.studies.toy import study

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(study, "run_study", fail)
    ended = nuclr("toy", "--out", tmp_path)
    assert ended.status == status
    assert status != 2 or "a.txt" in ended.err


def test_errors_show_control_characters_instead_of_sending_them(nuclr, tmp_path):
    ended = nuclr("report", tmp_path / "\x1b[31mred")
    assert ended.status == 2
    assert "\x1b" not in ended.err and "\\x1b[31mred" in ended.err
