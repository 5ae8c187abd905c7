"""`nuclr popularity`: which samples of an embedding file or folder, or of a run's training pairs, are popular."""

import enum
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nuclr.cli.arguments import options_in_messages
from nuclr.cli.report import write_final_report
from nuclr.errors import UserError, printable


class Weights(enum.StrEnum):
    """What has equal weight: the pairs, or the x."""

    PAIRS = "pairs"
    X = "x"


class Align(enum.StrEnum):
    """How x is mapped into the space of y."""

    NONE = "none"
    RIDGE = "ridge"


class KeepSide(enum.StrEnum):
    """Whose popularity decides whether a pair is kept."""

    Y = "y"
    X = "x"
    BOTH = "both"


_NAMES, _KEEP, _SOLVER = "Names of the samples", "Keeping pairs in a band of popularity", "Solver"


def popularity(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE|FOLDER|RUN",
            help="Embeddings (.npz or .safetensors with x, y and optionally y_to_x; rows are scaled to unit norm), "
            "their URL, a folder of embeddings of clip-retrieval or DataComp, or a trained run.",
        ),
    ],
    temperature: Annotated[
        float | None,
        typer.Option(help="Temperature tau; a lower one distinguishes neighbors more sharply. Default: the run's."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the table, the summary and the histogram; files of an earlier nuclr popularity are "
            "replaced. Default: RUN/popularity."
        ),
    ] = None,
    align: Annotated[
        Align, typer.Option(help="ridge: map x to y by a ridge regression, if their widths differ.")
    ] = Align.NONE,
    weights: Annotated[
        Weights, typer.Option(help="If an x has several y: equal weight per pair, or per x.")
    ] = Weights.PAIRS,
    x_key: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a folder with several models: the array of x, as l14_img.")
    ] = None,
    y_key: Annotated[
        str | None, typer.Option(metavar="NAME", help="The array of y. Default: that of the same model as x.")
    ] = None,
    pairs: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_NAMES,
            help="The pairs that the embeddings were made from, in any format that training takes; pages show them.",
        ),
    ] = None,
    root: Annotated[
        str | None, typer.Option(rich_help_panel=_NAMES, help="Folder that names in --pairs are relative to.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(rich_help_panel=_NAMES, help="Which split, if --pairs has several.")
    ] = None,
    captions: Annotated[
        Path | None,
        typer.Option(rich_help_panel=_NAMES, help="Captions of the y, in order: .jsonl, .json, .csv or .txt."),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_NAMES,
            help="Folder of the images that --captions, or the metadata of a folder, names; or .txt with one name "
            "per x.",
        ),
    ] = None,
    allow_outside: Annotated[
        bool,
        typer.Option(
            "--allow-outside",
            rich_help_panel=_NAMES,
            help="Show images that lists name outside of their folder: --images, --root, or that of the list.",
        ),
    ] = False,
    keep: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_KEEP, help="File for the numbers of the pairs in the band; replaces an earlier list."
        ),
    ] = None,
    uids: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npy",
            rich_help_panel=_KEEP,
            help="New file for the uids of the pairs in the band, for DataComp's resharder.",
        ),
    ] = None,
    min_popularity: Annotated[
        float | None, typer.Option(rich_help_panel=_KEEP, help="Band: lowest popularity; the mean is 1.")
    ] = None,
    max_popularity: Annotated[
        float | None, typer.Option(rich_help_panel=_KEEP, help="Band: highest popularity.")
    ] = None,
    min_quantile: Annotated[
        float | None, typer.Option(rich_help_panel=_KEEP, help="Band: 0.05 drops the least popular 5 %.")
    ] = None,
    max_quantile: Annotated[
        float | None, typer.Option(rich_help_panel=_KEEP, help="Band: 0.95 drops the most popular 5 %.")
    ] = None,
    keep_side: Annotated[
        KeepSide, typer.Option(rich_help_panel=_KEEP, help="Whose popularity must lie in the band.")
    ] = KeepSide.Y,
    table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.parquet",
            help="New file for viewers of embeddings: path, text, popularity, zeta, nearest other y, projection.",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the most and least popular to show.")] = 10,
    tolerance: Annotated[
        float, typer.Option(rich_help_panel=_SOLVER, help="Residual at which the solver stops.")
    ] = 1e-4,
    max_iterations: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=_SOLVER, help="Stop after this many passes.")
    ] = None,
    device: Annotated[
        str, typer.Option(rich_help_panel=_SOLVER, help="Where to compute: cpu, cuda, cuda:1, ...")
    ] = "cpu",
) -> None:
    """Report which samples of an embedding file or folder, or of a run's training pairs, are popular or rare.

    The popularity of an item is how many queries would pick it, under these embeddings at this temperature. It is
    solved for both sides: of the y with the x as anchors, and of the x with the y as anchors. Rows of embedding files
    are scaled to unit norm first. Writes popularity.csv (and .parquet if pyarrow is installed), popularity.json and a
    histogram. Above a million pairs, popularity.csv and the page are left out.
    """
    from nuclr.data.formats.embedding_folders import is_embedding_folder

    is_folder = is_embedding_folder(Path(file))
    is_run = Path(file).is_dir() and not is_folder
    if temperature is None and not is_run:
        raise UserError(f"--temperature is missing; {file} is not a run folder that could provide it")
    if out is None and not is_run:
        raise UserError("--out is missing: the folder for the table, the summary and the histogram")
    if temperature is not None and not (temperature > 0 and math.isfinite(temperature)):
        raise UserError(f"--temperature is {temperature:g}; it needs a number above 0, such as 0.05")
    if not 0 < tolerance < 1:
        raise UserError(f"--tolerance is {tolerance:g}; it needs a number between 0 and 1")
    limits = {
        "min_popularity": min_popularity,
        "max_popularity": max_popularity,
        "min_quantile": min_quantile,
        "max_quantile": max_quantile,
    }
    band = {name: value for name, value in limits.items() if value is not None}
    lists = {"--keep": keep, "--uids": uids}
    if band and keep is None and uids is None:
        raise UserError(f"--{next(iter(band)).replace('_', '-')} needs --keep FILE, where the kept pairs are written")
    for option, target in lists.items():
        if target is not None and not band:
            limits_named = "--min-popularity, --max-popularity, --min-quantile or --max-quantile"
            raise UserError(f"{option} needs a band: {limits_named}")
    if not is_folder and (x_key is not None or y_key is not None):
        option = "--x-key" if x_key is not None else "--y-key"
        raise UserError(f"{option} belongs to a folder of embeddings, of clip-retrieval or DataComp; {file} is not one")

    from nuclr.files import refuse_other_folder
    from nuclr.studies.popularity.inputs import input_from_file, input_from_folder, input_from_pairs, input_from_run
    from nuclr.studies.popularity.keep import Band, Keep
    from nuclr.studies.popularity.popularity_files import COMMAND, FILES, SUMMARY, write_popularity

    kept = None if keep is None and uids is None else Keep(Band(**band), keep_side.value, keep, uids)
    if is_folder:
        for option, value in {"--pairs": pairs, "--root": root, "--split": split, "--captions": captions}.items():
            if value is not None:
                raise UserError(f"{option} belongs to an embedding file; the folder {file} has its own metadata")
        if images is not None and not images.is_dir():
            raise UserError(f"--images {images}: no such folder")
        if kept is not None:
            assert out is not None
            kept.check_targets(out)  # before all embeddings are read once, which takes long
        samples = input_from_folder(Path(file), x_key, y_key, images, allow_outside)
    elif is_run:
        named = {"--pairs": pairs, "--root": root, "--split": split, "--captions": captions, "--images": images}
        for option, value in named.items():
            if value is not None:
                raise UserError(f"{option} belongs to an embedding file; {file} is a run, which has its own pairs")
        from nuclr.runs import folder
        from nuclr.runs.run import Run

        if not folder.is_run(Path(file)):
            raise UserError(
                f"{file}: neither a run folder (no {folder.CONFIG}) nor a folder of embeddings (img_emb/ and text_emb/ "
                "of clip-retrieval, .npz next to .parquet of DataComp)"
            )
        run = Run.open_finished(Path(file))
        out = Path(file) / "popularity" if out is None else out
        refuse_other_folder(out, COMMAND, SUMMARY, FILES)  # before the samples are encoded, which takes long
        if kept is not None:
            kept.check_targets(out)
        samples = input_from_run(run)
        temperature = run.temperature if temperature is None else temperature
    else:
        if pairs is not None and (captions is not None or images is not None):
            raise UserError("--pairs and --captions or --images exclude each other; --pairs shows everything")
        if pairs is None and (root is not None or split is not None):
            raise UserError(f"--{'root' if root is not None else 'split'} needs --pairs")
        with options_in_messages():
            samples = (
                input_from_file(file, captions, images, allow_outside)
                if pairs is None
                else input_from_pairs(file, pairs, root, split, allow_outside)
            )
    assert temperature is not None and out is not None
    options: dict[str, Any] = {"tolerance": tolerance, "progress": sys.stderr.isatty()}
    if max_iterations is not None:
        options["max_iterations"] = max_iterations
    content = write_popularity(
        samples,
        out,
        temperature,
        weights=weights.value,
        align=align.value,
        kept=kept,
        table=table,
        top=top,
        device=device,
        **options,
    )
    _print_popularity(content)
    typer.echo(f"\nTable, summary and histogram are in {out}")
    if (out / "popularity.csv").exists():
        write_final_report(out)
    else:
        typer.echo("Above a million pairs, there is no popularity.csv and no page; popularity.parquet has all pairs")
    unfinished = [name for name, side in content["sides"].items() if not side["converged"]]
    for name in unfinished:
        residual = content["sides"][name]["residual"]
        typer.echo(
            f"nuclr: side {name} did not converge: residual {residual:.2g} is above {tolerance:g}; "
            "raise --max-iterations, --tolerance or --temperature",
            err=True,
        )
    if unfinished:
        raise typer.Exit(1)


def _print_popularity(content: dict[str, Any]) -> None:
    if content["align"]["method"] == "ridge":
        explained = content["align"]["explained_variance"]
        typer.echo(f"x was mapped to y by a leave-one-out ridge regression (it explains {explained:.0%} of y)")
    if content["x_without_y"]:
        typer.echo(f"{content['x_without_y']} x have no y and are left out")
    names = {side: printable(words["name"]) for side, words in content["names"].items()}
    for key, side in content["sides"].items():
        name, own = names[key], content["names"][key]
        among = "" if content["views"] else f" {names['x' if key == 'y' else 'y']}"
        typer.echo(
            f"\n{name}: {side['candidates']:,} candidates, {side['anchors']:,} anchors{among}, residual "
            f"{side['residual']:.1g} after {side['iterations']} passes, {side['seconds']:.1f} s; "
            f"effectively {side['effective_number']:,.0f}"
        )
        if side["agreement"] is not None:
            typer.echo(
                f"  rank correlation {side['agreement']:.2f} with N_10 of held-out anchors: solved with half of the "
                "anchors, compared with what the other half finds"
            )
        for extreme, title in (("most_popular", "most popular"), ("least_popular", "least popular")):
            typer.echo(f"  {title}")
            for sample in side[extreme]:
                copies = f"  ({sample['copies']} copies)" if sample["copies"] > 1 else ""
                columns = [own["column"], *(() if own["kind"] == "text" else (content["names"]["y"]["column"],))]
                label = printable("  ".join(sample[c] for c in dict.fromkeys(columns) if c in sample))
                typer.echo(f"  {sample['popularity']:>10.3g}  {name}[{sample['number']}]  {label}{copies}".rstrip())
    if "keep" in content:
        kept = content["keep"]
        targets = ", ".join(kept[key] for key in ("file", "uids") if key in kept)
        typer.echo(f"\n{kept['pairs']:,} of {kept['of']:,} pairs kept: {targets}")
    if "table" in content:
        typer.echo(f"Table for viewers: {content['table']}")
