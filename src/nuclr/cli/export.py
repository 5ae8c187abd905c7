"""`nuclr export`: a trained model, or embeddings, in the format of another tool."""

import math
from pathlib import Path
from typing import Annotated

import typer

from nuclr.errors import UserError

EPILOG = """
Examples:

    nuclr export runs/demo --to sentence-transformers --out demo-st
    nuclr export runs/demo --to onnx --out demo-onnx
    nuclr export gallery.npy --to faiss --bank queries.npy --out search
    nuclr export old.faiss --to faiss --bank queries.npy --out search
    nuclr export dev.npz:y --to faiss --correction hubness/correction.safetensors --index hnsw --out search
"""
_FAISS = "Index of embeddings (--to faiss)"


def export(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="A finished run; for faiss, vectors as `nuclr hubness` takes them."),
    ],
    to: Annotated[str, typer.Option(metavar="TARGET", help="hf, sentence-transformers, open-clip, onnx or faiss.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to create.")],
    best: Annotated[bool, typer.Option("--best", help="Use the best checkpoint's weights, not the last.")] = False,
    bank: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_FAISS,
            help="Queries to fit the correction on, such as training queries; if the file also has the column of the "
            "items, they choose from it, else from the items.",
        ),
    ] = None,
    correction: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", rich_help_panel=_FAISS, help="A fitted correction of `nuclr hubness`, instead of --bank."
        ),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(metavar="KIND", rich_help_panel=_FAISS, help="flat (exact, the default), ivf or hnsw."),
    ] = None,
    normalize: Annotated[
        bool, typer.Option("--normalize", rich_help_panel=_FAISS, help="Scale items and queries to unit norm.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(rich_help_panel=_FAISS, help="Of the correction. Default: chosen on the bank.")
    ] = None,
    strength: Annotated[
        float | None, typer.Option(rich_help_panel=_FAISS, help="Of the correction. Default: chosen on the bank.")
    ] = None,
    lists: Annotated[
        int | None, typer.Option(rich_help_panel=_FAISS, help="Of ivf: lists. Default: square root of the items.")
    ] = None,
    probes: Annotated[
        int | None, typer.Option(rich_help_panel=_FAISS, help="Of ivf: lists that a query searches. Default: 16.")
    ] = None,
    neighbors: Annotated[
        int | None, typer.Option(rich_help_panel=_FAISS, help="Of hnsw: neighbors per item. Default: 32.")
    ] = None,
    ef_construction: Annotated[
        int | None, typer.Option(rich_help_panel=_FAISS, help="Of hnsw: candidates while building. Default: 200.")
    ] = None,
    ef_search: Annotated[
        int | None, typer.Option(rich_help_panel=_FAISS, help="Of hnsw: candidates while searching. Default: 128.")
    ] = None,
) -> None:
    """Write a trained model in the format of another tool, with a model card (README.md).

    With --to faiss, write an index of embeddings that ranks by scores corrected for popularity. Queries of the usual
    width work unchanged.
    """
    for option, value in (("temperature", temperature), ("strength", strength)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"--{option} is {value:g}; it needs a number above 0")
    from nuclr.export import export as write_export

    options = {
        "best": best,
        "bank": bank,
        "correction": correction,
        "index": index,
        "normalize": normalize,
        "temperature": temperature,
        "strength": strength,
        "lists": lists,
        "probes": probes,
        "neighbors": neighbors,
        "ef_construction": ef_construction,
        "ef_search": ef_search,
    }
    for line in write_export(source, to, out, **options):
        typer.echo(line)
