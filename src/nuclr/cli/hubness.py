"""`nuclr hubness`: which items of a search are hubs, and what the correction changes."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from nuclr.cli.report import write_final_report
from nuclr.errors import UserError, printable

EPILOG = """
Examples:

    nuclr hubness queries.npy gallery.npy                               half of the queries fit the correction
    nuclr hubness dev.npz:x dev.npz:y --bank train.npz                  columns x and y of the bank
    nuclr hubness dev.npz:y dev.npz:y --bank train.npz --names dev.jsonl
    nuclr hubness log.parquet:embedding index.parquet:embedding --names index.parquet:title
    nuclr hubness dev.npz --bank train.npz --tune                       half of the pairs choose the settings
    nuclr hubness RUN                                                   held-out pairs of a run: x searches y
    nuclr hubness RUN:y RUN:x                                           captions search images
"""
SHOWN = 5  # hubs on the terminal


def hubness(
    queries: Annotated[
        str,
        typer.Argument(
            help="Vectors of queries: .npy, .npz, .safetensors, Parquet, .faiss, a dataset on disk or a run; "
            "FILE:COLUMN names an array, column or side (of pairs, x by default). Files may be URLs."
        ),
    ],
    gallery: Annotated[
        str | None,
        typer.Argument(help="Vectors of the items they search, in the same forms (of pairs, y). Default: QUERIES."),
    ] = None,
    bank: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Other queries to fit the correction on, such as training queries. A file of pairs, like those of "
            "QUERIES and GALLERY, gives the items that they search too; otherwise they search GALLERY. Default: a "
            "random half of QUERIES; for a run, its training pairs.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page, the table, the bias and the correction.")] = Path(
        "hubness"
    ),
    k: Annotated[int, typer.Option("--k", "-k", min=1, help="How many items a query looks at.")] = 10,
    normalize: Annotated[bool, typer.Option("--normalize", help="Scale all vectors to unit norm.")] = False,
    links: Annotated[
        Path | None,
        typer.Option(
            help="Which items are right: rows (query, item), numbered from 0, as .npy or text (a header may name the "
            "columns; also qrels), or .npy with the item of each query. Default: of a file with x, y and y_to_x, the "
            "pairs."
        ),
    ] = None,
    names: Annotated[
        str | None,
        typer.Option(help="Names of the items: .txt, .jsonl, .json or .csv, or FILE:COLUMN of Parquet or CSV."),
    ] = None,
    query_names: Annotated[str | None, typer.Option(help="Names of the queries, in the same forms.")] = None,
    images: Annotated[
        Path | None, typer.Option(help="Folder of pictures that --names are the file names of, for the page.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Of the correction. Default: that at which held-out queries of the bank find items most evenly."
        ),
    ] = None,
    strength: Annotated[
        float | None,
        typer.Option(help="Of the correction. Default: from the noise in the popularity, or 1 with --temperature."),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Choose temperature and strength by the right answers of half of the queries; the others are counted.",
        ),
    ] = False,
) -> None:
    """Report which items of a search are hubs (found by too many queries), and which are never found.

    It counts how many queries have each item among their first k, plain and with the scores corrected by popularity,
    and shows the largest hubs, the queries that they crowd out, and recall if right answers are known. The queries that
    are counted do not take part in fitting the correction. Writes report.html, bias.npy (subtract it from the scores),
    hubness.csv, hubness.json and correction.safetensors (for `PopularityCorrection.load`).
    """
    for name, value in (("temperature", temperature), ("strength", strength)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"--{name} is {value:g}; it needs a number above 0")
    if tune and temperature is not None and strength is not None:
        raise UserError("--tune has nothing to choose: leave out --temperature or --strength")
    if images is not None and (names is None or not images.is_dir()):
        raise UserError(f"--images {images}: needs a folder, and --names with the file names in it")

    from dataclasses import replace

    from nuclr.runs.vectors import open_vectors, split_argument
    from nuclr.studies.hubness.hubness_files import Search, write_hubness
    from nuclr.studies.hubness.links import read_links
    from nuclr.studies.hubness.names import read_names

    asked = open_vectors(queries, "x")
    searched = open_vectors(gallery or asked.source, "y")
    if names is not None:
        searched = replace(searched, texts=read_names(names, searched))
    if query_names is not None:
        asked = replace(asked, texts=read_names(query_names, asked))
    elif asked.texts is None and asked.is_same(searched):
        asked = replace(asked, texts=searched.texts)
    fitted = candidates = None
    if bank is None and asked.pairs is not None and searched.pairs is not None:
        bank = str(asked.path)
    if bank is not None:
        path, column = split_argument(bank)
        fitted = open_vectors(bank if column or asked.column is None else f"{path}:{asked.column}", "x", training=True)
        if column is None and not asked.is_same(searched) and searched.column is not None and fitted.column is not None:
            candidates = open_vectors(f"{path}:{searched.column}", "y", training=True)
    linked = None if links is None else read_links(links, len(asked), len(searched))
    search = Search(asked, searched, fitted, candidates, linked, None if links is None else str(links))
    content = write_hubness(search, out, k, temperature, strength, normalize, images, tune)
    paged = write_final_report(out, announce=False)  # first, because a closed pipe (`| head`) ends the output
    _print(content)
    if paged:
        typer.echo(f"Report page: {out / 'report.html'}")
    bias, correction, table = out / "bias.npy", out / "correction.safetensors", out / "hubness.csv"
    if content["recommended"]:
        typer.echo(
            f"To use it: subtract {bias} from the scores of the gallery, or load {correction} with "
            f"PopularityCorrection.load; all items are in {table}"
        )
    else:
        typer.echo(f"The bias is in {bias}, the correction in {correction}, all items in {table}")


def _print(content: dict[str, Any]) -> None:
    plain, corrected, k = content["plain"], content["corrected"], content["k"]
    queries, gallery, bank = content["queries"], content["gallery"], content["bank"]
    itself = ", except itself" if content["same"] else ""
    typer.echo(
        f"{queries['counted']:,} queries look at their first {k} of {gallery['rows']:,} items{itself} "
        f"({content['width']} numbers each)\n"
    )
    chance = content["chance"]
    rows = [
        ("items that nobody finds", "never_found", "{:.1%}", ""),
        ("results that are the 1 % largest hubs", "top_share", "{:.1%}", f"results: ranks 1 to {k}"),
        ("queries that find the largest hub", "largest", "{:,}", f"mean {plain['mean']:.1f}"),
        (f"skewness of N_{k}", "skewness", "{:.2f}", ""),
    ]
    typer.echo(f"{'':38}{'plain':>9}{'corrected':>12}{'by chance':>12}")
    for label, key, form, note in rows:
        before, after, random = (form.format(measures[key]) for measures in (plain, corrected, chance))
        typer.echo(f"{label:38}{before:>9}{after:>12}{random:>12}   {note}".rstrip())
    for depth, recall in plain.get("recall", {}).items():
        after, random = f"{corrected['recall'][depth]:.1%}", f"{chance['recall'][depth]:.1%}"
        note = f"{content['labeled']:,} queries with a known answer" if depth == "1" else ""
        typer.echo(f"{'recall@' + depth:38}{recall:>9.1%}{after:>12}{random:>12}   {note}".rstrip())
    source = "the other half of the queries" if bank["name"] is None else bank["name"]
    typer.echo(
        f"\nCorrection: popularity of {min(bank['candidates'], 12_000):,} candidates among "
        f"{min(bank['queries'], 12_000):,} queries of {printable(source)}, temperature {content['temperature']:.3g}, "
        f"strength {content['strength']:.3g}"
        + (f", chosen on {content['tuned_on']:,} labeled queries that are not counted" if content["tuned_on"] else "")
    )
    if content["correlation"] is not None:
        typer.echo(
            f"Its rank correlation with N_{k} of the queries counted here, which it has not seen: "
            f"{content['correlation']:.2f}"
        )
    for sentence in content["advice"]:
        typer.echo(printable(sentence))
    typer.echo(f"\nLargest hubs: N_{k} plain -> corrected")
    for hub in content["hubs"][:SHOWN]:
        typer.echo(f"{hub['plain']:>7,} -> {hub['corrected']:<5,} {_name(hub, 'item')}")
        for example in hub["crowds_out"][:1]:
            right = " (right)" if example["right"] else ""
            query, instead = (
                _name(example["query"], "query", quoted=True),
                _name(example["instead"], "item", quoted=True),
            )
            gap = " " if len(query) + len(instead) < 60 else f"\n{'':17}"
            typer.echo(f"{'':16} in {query}{gap}it is replaced by {instead}{right}")
    typer.echo("")


def _name(item: dict[str, Any], kind: str, quoted: bool = False) -> str:
    if "name" not in item:
        return f"{kind} {item['row']}"
    text = " ".join(printable(item["name"]).split())
    text = text if len(text) <= 80 else f"{text[:79]}…"
    return f'"{text}"' if quoted else f"{text}  [{item['row']}]"
