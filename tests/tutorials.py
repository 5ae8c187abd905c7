"""Run a page of docs/tutorials as a reader would: all of its blocks, in their order, in one folder.

- A block with a title, such as ```csv title="pairs.csv", is written to the file of that name.
- ```python blocks are one program.
- ```sh blocks consist of commands of nuclr and of `python FILE`, which run in the same process, to save their imports.
- A ```text block shows output of the block before it. Numbers may differ, and a line of dots stands for other lines.

Blocks that are only indented are not run.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?[^\n]*\n(.*?)^```$', re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


class Block(NamedTuple):
    language: str
    title: str
    code: str
    line: int  # of the page, of the first line of the code


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(m[1], m[2] or "", m[3], text[: m.start(3)].count("\n")) for m in FENCE.finditer(text)]


def run_page(page: str, folder: str) -> None:
    """Run the page in this process, whose folder and program it changes: fork it."""
    os.chdir(folder)
    variables: dict[str, Any] = {"__name__": "__main__"}
    output = ""
    for block in blocks(Path(page)):
        where = f"{page}:{block.line + 1}"
        if block.title:
            Path(block.title).write_text(block.code, encoding="utf-8")
        elif block.language == "text":
            missing = [line for line in masked(block.code) if line not in {"...", *masked(output)}]
            assert not missing, f"{where}: the page shows {missing}, but the output was\n{output}"
        else:
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                if block.language == "python":
                    exec(compile("\n" * block.line + block.code, page, "exec"), variables)
                elif block.language == "sh":
                    for command in commands(block.code):
                        run_command(command, where)
            output = stdout.getvalue()


def masked(text: str) -> list[str]:
    """Return the lines without the values of numbers and the widths of gaps."""
    return [" ".join(NUMBER.sub("#", line).split()) for line in text.splitlines() if line.strip()]


def commands(code: str) -> list[list[str]]:
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run_command(words: list[str], where: str) -> None:
    from nuclr.cli import app

    program, *arguments = words
    assert program in ("nuclr", "python"), f"{where}: {program} is not run by tests/tutorials.py"
    sys.argv = words if program == "nuclr" else arguments
    try:
        if program == "nuclr":
            app.main()
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, f"{where}: {shlex.join(words)} ended with status {ended.code}"
