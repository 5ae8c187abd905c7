"""Count the source: files, statements, code lines, comments, docstrings, long signatures, tuple assignments.

Usage: python benchmarks/size.py [FOLDER] [--packages]

The counts follow one definition for every project, so that they can be compared: a statement is an `ast.stmt` node
(docstrings included, and also counted apart); a code line holds at least one token that is neither a comment nor part
of a docstring. The script informs; it never fails.
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

LONG_SIGNATURE = 16
_IGNORED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstring_of(node: ast.AST) -> ast.Expr | None:
    """Return the statement that is the docstring of a module, class or function."""
    if not isinstance(node, _DOCUMENTED) or not node.body:
        return None
    first = node.body[0]
    if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
        return None
    return first if isinstance(first.value.value, str) else None


def count_file(path: Path) -> Counter[str]:
    """Return the counts of one file."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    counts: Counter[str] = Counter(files=1)
    docstring_lines: set[int] = set()
    for node in ast.walk(tree):
        counts["statements"] += isinstance(node, ast.stmt)
        docstring = docstring_of(node)
        if docstring is not None:
            counts["docstrings"] += 1
            docstring_lines.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            _count_function(node, docstring is not None, counts)
        if isinstance(node, ast.Assign):
            _count_assignment(node, counts)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            counts["nested comprehensions"] += len(node.generators) > 1
    code_lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            counts["comment lines"] += 1
        if token.type not in _IGNORED:
            code_lines.update(range(token.start[0], token.end[0] + 1))
    counts["code lines"] += len(code_lines - docstring_lines)
    return counts


def _count_function(node: ast.FunctionDef | ast.AsyncFunctionDef, documented: bool, counts: Counter[str]) -> None:
    arguments = node.args
    names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    parameters = len(names) - bool(names and names[0].arg in ("self", "cls"))
    if parameters > LONG_SIGNATURE:
        counts["signatures over 16"] += 1
    if not node.name.startswith("_"):
        counts["public functions"] += 1
        counts["documented public functions"] += documented


def _count_assignment(node: ast.Assign, counts: Counter[str]) -> None:
    counts["assignments"] += 1
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return
    counts["unpackings of more than two names"] += len(target.elts) > 2
    if isinstance(node.value, ast.Tuple):
        counts["tuple-to-tuple assignments"] += 1
        counts["tuple-to-tuple of more than two names"] += len(target.elts) > 2


def count_folder(folder: Path) -> Counter[str]:
    """Return the sum of the counts of all Python files below a folder."""
    total: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.py")):
        total += count_file(path)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent.parent / "src" / "nuclr")
    parser.add_argument("--packages", action="store_true", help="also one line per package")
    options = parser.parse_args()
    if options.packages:
        for package in sorted(path for path in options.folder.iterdir() if path.is_dir()):
            counts = count_folder(package)
            if counts:
                print(f"{package.name:14} {counts['files']:4} files {counts['statements']:6} statements")
    total = count_folder(options.folder)
    for name, count in total.items():
        print(f"{name:40} {count:7,}")
    print(f"{'statements per code line':40} {total['statements'] / max(1, total['code lines']):7.3f}")
    share = total["tuple-to-tuple of more than two names"] / max(1, total["assignments"])
    print(f"{'  of which tuple-to-tuple, > 2 names':40} {share:7.2%}")
    tests = options.folder.parent.parent / "tests"
    if tests.is_dir():
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tests.rglob("*.py"))
        print(f"{'lines of tests':40} {lines:7,}")


if __name__ == "__main__":
    main()
