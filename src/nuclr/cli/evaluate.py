"""`nuclr evaluate`: a trained model on test sets."""

import enum
from pathlib import Path
from typing import Annotated

import typer

from nuclr.errors import UserError

EPILOG = """
Examples:

    nuclr evaluate RUN                                                  the run's own validation pairs
    nuclr evaluate RUN --retrieval dev.jsonl --correct bank=train       plain and popularity-corrected ranking
    nuclr evaluate RUN --retrieval flickr30k:DATA --classification cifar100:DATA --out figures.json
"""
_CORRECTION = "Popularity-corrected ranking"


class Duplicates(enum.StrEnum):
    """What is done with captions that occur more than once."""

    MERGE = "merge"
    MISS = "miss"
    HIT = "hit"


def evaluate(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A trained run, or a folder of encoders (nuclr, CLIP, SigLIP).")
    ],
    retrieval: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH|NAME:FOLDER",
            help="Pairs in any format that training takes, or mscoco:FOLDER, flickr30k:FOLDER; may be given several "
            "times. Without any test set: the run's own validation pairs.",
        ),
    ] = None,
    classification: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH|NAME:FOLDER",
            help="A folder of classes, .npz with x, labels and prompts, or cifar100:, imagenet1k:, imagenet-r:, dtd:, "
            "food101:FOLDER; may be given several times.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file for the figures and the protocol; must not exist yet.")
    ] = None,
    root: Annotated[str | None, typer.Option(help="Folder that --retrieval and its images are relative to.")] = None,
    split: Annotated[str | None, typer.Option(help="Which split, where the pairs have several.")] = None,
    classes: Annotated[
        Path | None, typer.Option(help="JSON with the classes' names, in the place of classes.json in the folder.")
    ] = None,
    templates: Annotated[
        Path | None, typer.Option(help="JSON with a list of prompts that have {} in the class's place.")
    ] = None,
    duplicates: Annotated[
        Duplicates | None,
        typer.Option(
            help="Captions that occur more than once: merge them, or keep each and count copies as miss or hit. "
            "Default: miss for mscoco and flickr30k, as others report them, else merge, as in training."
        ),
    ] = None,
    correct: Annotated[
        list[str] | None,
        typer.Option(
            metavar="bank=train|queries",
            rich_help_panel=_CORRECTION,
            help="Rank by score minus popularity as well; the bank are training pairs, or the test pairs "
            "themselves (transductive). May be given twice.",
        ),
    ] = None,
    bank_size: Annotated[
        int, typer.Option(min=2, rich_help_panel=_CORRECTION, help="Most images, and most captions, of the bank.")
    ] = 12_000,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint's weights, not the last.")] = False,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples at a time. Default: the run's.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
) -> None:
    """Retrieval and zero-shot classification of a trained model, with all names in use and the protocol beside them.

    Pictures are prepared as the run prepared them in training. Nothing is downloaded: for the usual sets the command
    tells which files to put where.
    """
    from nuclr.studies.evaluate import tasks as sets
    from nuclr.studies.evaluate.correct import parse_bank

    if out is not None:
        _check_out(out)
    banks = list(dict.fromkeys(parse_bank(text) for text in correct or []))
    if not run.exists():
        raise UserError(f"{run}: no such folder; name a run that nuclr train wrote, or a folder of encoders")

    from nuclr.runs import launch
    from nuclr.studies.evaluate import evaluate as task
    from nuclr.studies.evaluate.subject import open_subject
    from nuclr.studies.evaluate.table import table
    from nuclr.studies.output import write_json

    where = launch.pick_device(device)
    with launch.processes(where):
        subject = open_subject(run, best, batch_size, where)
        share = subject.data.max_bad_share if subject.data is not None else 0.05
        retrievals = [sets.open_retrieval(text, root, split, share) for text in retrieval or []]
        size = subject.model.images.size if subject.model.images is not None else 32
        classifications = [
            sets.open_classification(text, classes, templates, share, size) for text in classification or []
        ]
        if not retrievals and not classifications:
            retrievals, classifications = task.own_sets(subject)
        if banks and not retrievals:
            raise UserError("--correct goes with --retrieval; classification is not corrected")
        way = duplicates.value if duplicates is not None else None
        told = (lambda text: typer.echo(text, err=True)) if launch.is_first() else (lambda _: None)
        content = task.evaluate(subject, retrievals, classifications, banks, way, bank_size, told)
    if launch.is_first():
        typer.echo(table(content).rstrip())
        if out is not None:
            write_json(out, content)
            typer.echo(f"\nFigures, names and protocol are in {out}")


def _check_out(out: Path) -> None:
    """Before the work: nothing is overwritten, and the file can be written."""
    if out.suffix != ".json":
        raise UserError(f"--out {out}: figures are written as JSON; name a file that ends in .json")
    if out.exists():
        raise UserError(f"{out} exists; remove it or name another file with --out")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: the folder {out.parent} does not exist")
