"""`nuclr export`: a trained model in the format of another tool."""

from pathlib import Path
from typing import Annotated

import typer

EPILOG = """
Examples:

    nuclr export runs/demo --to sentence-transformers --out demo-st
    nuclr export runs/demo --to onnx --out demo-onnx
"""


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run.")],
    to: Annotated[str, typer.Option(metavar="TARGET", help="hf, sentence-transformers, open-clip or onnx.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to create.")],
    best: Annotated[bool, typer.Option("--best", help="Use the best checkpoint's weights, not the last.")] = False,
) -> None:
    """Write a trained model in the format of another tool, with a model card (README.md)."""
    from nuclr.export import export as write_export

    for line in write_export(source, to, out, best):
        typer.echo(line)
