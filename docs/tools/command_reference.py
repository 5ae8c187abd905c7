"""The page of commands, generated from the command line's own help."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer

from nuclr.cli.app import app

INTRODUCTION = """# Command line

Every command with its options, generated from the program; `nuclr COMMAND --help` prints the same. A user's mistake
gives one or two lines on stderr and exit status 2; [Training](training.md#exit-status) lists the others.

| command | |
| --- | --- |
"""


def page() -> str:
    """Return the page as Markdown."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    rows = [f"| [`nuclr {name}`](#nuclr-{name}) | {_first_line(command)} |\n" for name, command in commands.items()]
    return "".join([INTRODUCTION, *rows, *(part for item in commands.items() for part in _describe(*item))])


def _first_line(command: Any) -> str:
    return " ".join(inspect.cleandoc(command.help).split("\n\n")[0].split())


def _describe(name: str, command: Any) -> Iterator[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"\n## nuclr {name}\n\n    nuclr {name} {usage}\n\n{inspect.cleandoc(command.help)}\n"
    panels: dict[str | None, list[Any]] = {}
    for parameter in command.params:
        panels.setdefault(getattr(parameter, "rich_help_panel", None), []).append(parameter)
    for title, parameters in panels.items():
        yield f"\n**{title}**\n" if title else ""
        yield "\n| option | |\n| --- | --- |\n"
        yield from (_row(parameter, context) for parameter in parameters)
    if command.epilog:
        yield "\nExamples:\n\n" + command.epilog.partition("Examples:\n\n")[2].rstrip() + "\n"


def _row(parameter: Any, context: Any) -> str:
    names, text = parameter.get_help_record(context)
    if parameter.param_type_name == "argument":
        names = re.sub(r" <.*>$", "", names)  # its type
    return f"| `{names}` | {_cell(text)} |\n"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("[", "\\[")
