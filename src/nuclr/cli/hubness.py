"""`nuclr hubness`: which items of a search are hubs, and what the correction changes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nuclr.cli.report import write_final_report
from nuclr.errors import UserError, printable

if TYPE_CHECKING:
    from nuclr.studies.items.hubness_report import HubnessReport
    from nuclr.studies.items.rows import Item

EPILOG = """
Examples:

    nuclr hubness queries.npy gallery.npy                               half of the queries fit the correction
    nuclr hubness dev.npz:x dev.npz:y --bank train.npz                  columns x and y of the bank
    nuclr hubness dev.npz:y dev.npz:y --bank train.npz --names dev.jsonl
    nuclr hubness log.parquet:embedding index.parquet:embedding --names index.parquet:title
    nuclr hubness queries/ gallery/                                     folders of .npy or Parquet files
    nuclr hubness dev.npz --bank train.npz --tune                       half of the pairs choose the settings
    nuclr hubness RUN                                                   held-out pairs of a run: x searches y
    nuclr hubness RUN:y RUN:x                                           captions search images
"""
SHOWN = 5  # hubs on the terminal


def hubness(
    queries: Annotated[
        str,
        typer.Argument(
            help="Vectors of queries: .npy, .npz, .safetensors, Parquet, folders of .npy or Parquet files, .faiss, a "
            "dataset on disk or a run; FILE:COLUMN names an array, column or side (of pairs, x by default). Files may "
            "be URLs."
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
    out: Annotated[
        Path,
        typer.Option(help="Folder for the page, the table, the bias and the correction."),
    ] = Path("hubness"),
    k: Annotated[
        int,
        typer.Option(
            "--k",
            "-k",
            min=1,
            help="How many items a query looks at.",
        ),
    ] = 10,
    normalize: Annotated[bool, typer.Option("--normalize", help="Scale all vectors to unit norm.")] = False,
    links: Annotated[
        Path | None,
        typer.Option(
            help="Which items are right: rows (query, item), numbered from 0 or by the ids of --query-names and "
            "--names, as .npy or text (a header may name the columns; also qrels), or .npy with the item of each query."
            " Default: of a file with x, y and y_to_x, the pairs."
        ),
    ] = None,
    names: Annotated[
        str | None,
        typer.Option(
            help="Names of the items: .txt with one per line, FILE:COLUMN of Parquet or CSV, or the list of pairs "
            "that the vectors were made from."
        ),
    ] = None,
    query_names: Annotated[str | None, typer.Option(help="Names of the queries, in the same forms.")] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="Folder of pictures that --names are the file names of, for the page."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Of the correction. Default: two scales, 0.6 and 1.5 standard deviations of the scores."),
    ] = None,
    strength: Annotated[
        float | None,
        typer.Option(help="Of the correction. Default: 0.75, less if popularity is noise, or 1 with --temperature."),
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
        if value is not None and not 1e-6 <= value <= 1e6:
            raise UserError(f"--{name} is {value:g}; allowed: 1e-6 to 1e6")
    if tune and temperature is not None and strength is not None:
        raise UserError("--tune has nothing to choose: leave out --temperature or --strength")
    if images is not None and (names is None or not images.is_dir()):
        raise UserError(f"--images {images}: needs a folder, and --names with the file names in it")
    from nuclr.studies.items.hubness_report import hubness_report

    report = hubness_report(
        queries,
        gallery,
        bank=bank,
        links=links,
        names=names,
        query_names=query_names,
        images=images,
        k=k,
        temperature=temperature,
        strength=strength,
        normalize=normalize,
        tune=tune,
        out=out,
    )
    has_page = write_final_report(out, announce=False)  # first, because a closed pipe (`| head`) ends the output
    _print_measures(report)
    _print_correction(report)
    _print_hubs(report)
    if has_page:
        typer.echo(f"Report page: {out / 'report.html'}")
    use = "To use it"
    if not report.recommended:
        use = (
            "Not recommended. To use it anyway" if report.recall_change else "To try it, on queries with known answers"
        )
    typer.echo(
        f"{use}: subtract {out / 'bias.npy'} from the scores of the gallery, or load "
        f"{out / 'correction.safetensors'} with PopularityCorrection.load; all items are in {out / 'hubness.csv'}"
    )


def _print_measures(report: "HubnessReport") -> None:
    itself = ", except itself" if report.same else ""
    typer.echo(
        f"{report.counted:,} queries look at their first {report.k} of {report.gallery.rows:,} items{itself} "
        f"({report.width} numbers each)\n"
    )
    typer.echo(f"{'':38}{'plain':>9}{'corrected':>12}{'by chance':>12}")
    notes = {
        1: f"results: ranks 1 to {report.k}",
        2: f"mean {report.plain.mean:.1f}",
        4: f"{report.labeled:,} queries with a known answer",
    }
    for row, (label, plain, corrected, chance) in enumerate(report.table()):
        typer.echo(f"{label:38}{plain:>9}{corrected:>12}{chance:>12}   {notes.get(row, '')}".rstrip())


def _print_correction(report: "HubnessReport") -> None:
    bank = report.bank
    source = "the other half of the queries" if bank.name is None else bank.name
    tuned = f", chosen on {report.tuned_on:,} labeled queries that are not counted" if report.tuned_on else ""
    typer.echo(
        f"\nCorrection: popularity of {bank.candidates:,} candidates among {bank.used:,} different queries of "
        f"{printable(source)}, temperature {report.temperature:.3g}, strength {report.strength:.3g}{tuned}"
    )
    if bank.name is None:
        most = f" (at most {report.correction.bank_size:,} different ones)"
        clicks = "" if report.links is None else " Right answers take part in both fits, as clicks."
        typer.echo(
            f"What is written is fitted on all {report.queries.rows:,} queries{most}, with the same settings.{clicks}"
        )
    if report.correlation is not None:
        typer.echo(
            f"Its rank correlation with N_{report.k} of the queries counted here, which it has not seen: "
            f"{report.correlation:.2f}"
        )
    if report.recall_change:
        typer.echo(f"Right first results: {report.won_count:,} won, {report.lost_count:,} lost")
    for sentence in report.advice:
        typer.echo(printable(sentence))


def _print_hubs(report: "HubnessReport") -> None:
    typer.echo(f"\nLargest hubs: N_{report.k} plain -> corrected")
    for hub in report.hubs[:SHOWN]:
        typer.echo(f"{hub.plain:>7,} -> {hub.corrected:<5,} {_name(hub, 'item')}")
        example = report.searches and report.searches.replacement(hub.row)
        if example:
            query, instead = example
            typer.echo(f"{'':16} in {_name(query, 'query')} it is replaced by {_name(instead, 'item')}")
    typer.echo("")


def shorten(name: str) -> str:
    """Return a name as part of a line on the terminal."""
    text = " ".join(printable(name).split())
    return text if len(text) <= 80 else f"{text[:79]}…"


def _name(item: "Item", kind: str) -> str:
    return f"{kind} {item.row}" if item.name is None else f"{shorten(item.name)} [{item.row}]"
