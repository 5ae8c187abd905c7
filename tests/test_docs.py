"""The documentation agrees with the code: examples run, names exist, references are complete."""

import ast
import dataclasses
import doctest
import importlib
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

import nuclr
from nuclr.cli.app import app
from nuclr.errors import EXTRAS, UserError
from nuclr.runs.settings import Settings
from tests import tutorials

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "nuclr"
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "llms.txt", *DOCS.rglob("*.md")])
GENERATED = {DOCS / "configuration.md", DOCS / "commands.md"}  # by docs/tools/build.py


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
    except UserError as error:  # its classes derive from those of an optional package
        pytest.skip(str(error))
    outcome = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert outcome.failed == 0  # doctest prints what it expected and what it got


def python_blocks() -> list[tuple[str, str]]:
    return [
        (f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}", match[1])
        for path in PAGES
        for text in [path.read_text(encoding="utf-8")]
        for match in re.finditer(r"```python[^\n]*\n(.*?)```", text, re.DOTALL)
    ]


@pytest.mark.parametrize(("where", "code"), python_blocks(), ids=[where for where, _ in python_blocks()])
def test_what_the_pages_import_exists(where, code):
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nuclr"):
            try:
                module = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            except UserError as error:  # classes that derive from those of an optional package
                pytest.skip(str(error))
            assert not missing, f"{where}: {node.module} has no {missing}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_linked_files_exist(path):
    prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose)
    targets = {link: (path.parent / link).resolve() for link in links}
    missing = [link for link, target in targets.items() if not target.exists() and target not in GENERATED]
    assert not missing


def pages_in(nav) -> set[str]:
    if isinstance(nav, str):
        return {nav}
    return set().union(*(pages_in(item) for item in (nav.values() if isinstance(nav, dict) else nav)))


def test_the_navigation_has_every_page_and_no_other():
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    generated = {"index.md", "contributing.md", "changelog.md", *(path.name for path in GENERATED)}
    assert pages_in(nav) == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | generated


def test_one_version_three_packages_of_the_core_and_extras_that_are_known():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == nuclr.__version__
    assert "version" in project["dynamic"]
    assert {re.split("[><=]", need)[0] for need in project["dependencies"]} == {"torch", "numpy", "safetensors"}
    imported_as = {"pillow": "PIL", "pyyaml": "yaml", "POT": "ot"}
    for extra in ("search", "train", "hf", "logging", "bench"):
        for need in set(project["optional-dependencies"][extra]) - {"nuclr[search]"}:
            package = re.split("[><=]", need)[0]
            assert EXTRAS[imported_as.get(package, package)] == extra


def settings_keys(kind: type, prefix: str = "") -> set[str]:
    keys = set()
    for field in dataclasses.fields(kind):
        nested = field.default_factory if dataclasses.is_dataclass(field.default_factory) else None
        keys |= settings_keys(nested, f"{prefix}{field.name}.") if nested else {f"{prefix}{field.name}"}
    return keys


@pytest.fixture
def tools(monkeypatch):
    """A function that imports a module of docs/tools."""
    monkeypatch.syspath_prepend(DOCS / "tools")
    before = set(sys.modules)
    yield importlib.import_module
    for path in (DOCS / "tools").glob("*.py"):
        if path.stem not in before:
            sys.modules.pop(path.stem, None)


def test_the_page_of_settings_has_every_setting_and_option_with_a_description(tools):
    page = tools("settings_reference").page()
    rows = [re.split(r"(?<!\\) \| ", row.strip("| \n")) for row in re.findall(r"^\| `.*\n", page, re.MULTILINE)]
    assert all(len(row) == 4 and row[3].endswith((".", '"')) for row in rows), rows
    keys = {key for row in rows for key in re.findall(r"`([^`]+)`", row[0]) if ".NAME." not in key}
    records = [nuclr.objectives.entry(name) for name in nuclr.objectives.names()]
    options = {f"objective.{key}" for record in records for key in record.flat_options}
    assert keys == {key for key in settings_keys(Settings) if key != "objective.options"} | options
    assert not [row for row in rows if row[3].startswith("as in ")], "a description refers to another class"


def test_the_page_of_commands_has_every_command_and_option(tools):
    page = tools("command_reference").page()
    for name, command in typer.main.get_command(app).commands.items():
        section = page.partition(f"\n## nuclr {name}\n")[2].partition("\n## ")[0]
        shown = set(re.findall(r"(?<![\w-])--[a-z-]+", section))
        assert {option for p in command.params for option in p.opts if option.startswith("--")} <= shown, name


@pytest.mark.parametrize(
    "request_of_page",
    [
        '<script defer src="https://cdn.org/a.js"></script>',
        "<img alt=a src=//cdn.org/a.png>",
        '<link href="https://cdn.org/a.css" rel="stylesheet">',
        "<style>@font-face { src: url('https://cdn.org/a.woff2') }</style>",
    ],
)
def test_requests_to_other_servers_are_found(tools, tmp_path, request_of_page):
    requests_of = tools("build").requests_of
    page = tmp_path / "page.html"
    page.write_text('<a href="https://a.org">a</a><link rel="canonical" href="https://a.org"><script src="a.js">')
    assert not requests_of(tmp_path)
    page.write_text(request_of_page)
    [request] = requests_of(tmp_path)
    assert re.fullmatch(r"page\.html: (https:)?//cdn\.org/a\..*", request)


@pytest.mark.parametrize("path", sorted((DOCS / "tutorials").glob("*.md")), ids=lambda path: path.stem)
def test_the_notebook_of_a_tutorial_has_its_code_as_cells(tools, path):
    cells = json.loads(tools("build").notebook(path.read_text(encoding="utf-8")))["cells"]
    code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    blocks = [block for block in tutorials.blocks(path) if block.language != "text"]
    assert len(code) == len(blocks)
    for source, block in zip(code, blocks, strict=True):
        assert source.endswith(block.code)
        first = f"%%writefile {block.title}" if block.title else {"sh": "%%bash"}.get(block.language)
        assert first is None or source.startswith(first)


PUBLIC = ("objectives", "popularity", "evaluation", "data", "models", "integrations", "export", "report")


@pytest.mark.parametrize("package", PUBLIC)
def test_the_reference_has_every_public_name(package):
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(rf"^::: nuclr\.{package}\b(?:[\w.]*\.)?(\w+)?$", text, re.MULTILINE))
    if f"::: nuclr.{package}\n    options: {{show_root_heading" in text:  # with all of its members
        return
    missing = set(importlib.import_module(f"nuclr.{package}").__all__) - shown
    assert not missing


def test_commands_on_the_pages_exist_with_their_options():
    commands = typer.main.get_command(app).commands
    pattern = re.compile(r"(?:^ {4}|`)(?:torchrun [^`\n]*-m )?(nuclr [a-z](?:[^`\n#\\]|\\\n)*)", re.MULTILINE)
    seen = [(path.name, found) for path in PAGES for found in pattern.findall(path.read_text(encoding="utf-8"))]
    assert len(seen) > 20
    for page, line in seen:
        name, options = line.split()[1], re.findall(r"(?<!\S)--[a-z][a-z-]*", line)
        assert name in commands, f"{page}: {line}"
        parameters = commands[name].params
        known = {option for p in parameters for option in (*p.opts, *p.secondary_opts)} | {"--help"}
        assert set(options) <= known, f"{page}: {line}"
