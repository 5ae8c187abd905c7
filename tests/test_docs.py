"""The documentation agrees with the code: examples run, names exist, the version is stated once."""

import ast
import doctest
import importlib
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import nuclr
from nuclr.errors import EXTRAS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "nuclr"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


WITH_EXAMPLES = [
    module_name(path) for path in sorted(SOURCE.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example may write files
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        pytest.skip(f"{error.name} is not installed")
    outcome = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert outcome.failed == 0  # doctest prints what it expected and what it got


def python_blocks() -> list[tuple[str, str]]:
    return [
        (f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}", match[1])
        for path in PAGES
        for text in [path.read_text(encoding="utf-8")]
        for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)
    ]


@pytest.mark.parametrize(("where", "code"), python_blocks(), ids=[where for where, _ in python_blocks()])
def test_what_the_pages_import_exists(where, code):
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nuclr"):
            module = importlib.import_module(node.module)
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            assert not missing, f"{where}: {node.module} has no {missing}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_linked_files_exist(path):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    missing = [link for link in links if not (path.parent / link).exists()]
    assert not missing


def test_every_page_is_in_the_navigation():
    # BaseLoader: plain strings are enough, and mkdocs' own tags are not needed.
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)["nav"]
    listed = {page for entry in nav for page in entry.values()}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= listed


def test_the_version_is_stated_once():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == nuclr.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]
    assert "version" not in project


def test_the_core_needs_three_packages_and_every_extra_is_known():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {re.split("[><=]", need)[0] for need in project["dependencies"]} == {"torch", "numpy", "safetensors"}
    imported_as = {"pillow": "PIL", "pyyaml": "yaml", "POT": "ot"}
    for extra in ("train", "hf", "logging", "bench"):
        for need in project["optional-dependencies"][extra]:
            package = re.split("[><=]", need)[0]
            assert EXTRAS[imported_as.get(package, package)] == extra
