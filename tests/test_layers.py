"""Imports go only downwards: each part of the package imports only parts of lower layers."""

import ast
from collections.abc import Iterator
from pathlib import Path

import nuclr

ROOT = Path(nuclr.__file__).parent

# Top to bottom. Parts of one layer do not import one another.
LAYERS = (
    {"__main__"},
    {"cli"},
    {"report"},
    {"studies"},
    {"export", "training"},
    {"runs"},
    {"evaluation", "integrations"},
    {"data", "models", "objectives", "popularity"},
    {"remote"},
    {"arrays"},
    {"distributed", "image_files", "stacked"},
    {"files"},
    {"__init__"},
    {"errors"},
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def part_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imported_parts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, part) for every import of this package, including imports inside functions."""
    package = ("nuclr", *path.relative_to(ROOT).parts[:-1])
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path == ROOT / "__init__.py":  # it names the sub-packages for type checkers, and imports them lazily
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(name for name in (base, node.module) if name)
            # In `from nuclr import x`, x is a module, or an attribute of nuclr/__init__.py.
            modules = [f"{module}.{alias.name}" for alias in node.names] if module == "nuclr" else [module]
        else:
            continue
        for module in modules:
            top, _, rest = module.partition(".")
            if top == "nuclr":
                name = rest.partition(".")[0]
                exists = (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file()
                yield node.lineno, name if name and exists else "__init__"


def test_imports_go_downwards_and_nothing_imports_the_integrations():
    parts = {part_of(path) for path in ROOT.rglob("*.py")}
    assert parts <= set(LEVEL), f"add {parts - set(LEVEL)} to LAYERS"
    upwards = [
        f"{path.relative_to(ROOT)}:{line} imports {other}"
        for path in ROOT.rglob("*.py")
        for line, other in imported_parts(path)
        if other != part_of(path) and (LEVEL[other] <= LEVEL[part_of(path)] or other == "integrations")
    ]
    assert not upwards, "\n".join(upwards)
