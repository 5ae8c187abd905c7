"""`nuclr evaluate`: a trained model on test sets."""

import enum
from pathlib import Path
from typing import Annotated

import typer

from nuclr.cli.arguments import options_in_messages
from nuclr.cli.train import training_errors
from nuclr.errors import UserError, printable

EPILOG = """
Examples:

    nuclr evaluate RUN                                                  the run's own validation pairs
    nuclr evaluate RUN --retrieval dev.jsonl --correct bank=train       plain and popularity-corrected ranking
    nuclr evaluate RUN --retrieval flickr30k:DATA --classification cifar100:DATA --out metrics.json
    nuclr evaluate RUN --beir scifact                                   nDCG@10, MRR@10, recall@100, MAP
    nuclr evaluate RUN --classes cifar10_test --no-head                 nearest neighbors and a linear probe
"""
_CORRECTION = "Popularity-corrected ranking"


class Duplicates(enum.StrEnum):
    """How items of side y that occur more than once are treated."""

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
            help="Pairs in any format that training takes, or mscoco:FOLDER, flickr30k:FOLDER; can be given several "
            "times. Without any test set: the run's own validation pairs.",
        ),
    ] = None,
    classification: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH|NAME:FOLDER",
            help="Zero-shot: a folder of classes, .npz with x, labels and prompts, or cifar10:, cifar100:, "
            "imagenet1k:, imagenet-r:, dtd:, food101:FOLDER; can be given several times.",
        ),
    ] = None,
    beir: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="A BEIR folder: corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv (test, or --split). Side x encodes "
            "the queries, side y the documents. Can be given several times.",
        ),
    ] = None,
    classes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="k-nearest neighbors and a linear probe: a folder with one folder of images per class, .npz with "
            "x and labels, or a NAME:FOLDER of --classification; can be given several times.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file for the metrics and the protocol; it must not exist yet.")
    ] = None,
    root: Annotated[
        str | None,
        typer.Option(help="Folder that --retrieval and its files are relative to. Default: the run's data.root."),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Which split, if the pairs have several.")] = None,
    allow_outside: Annotated[
        bool,
        typer.Option("--allow-outside", help="Read images that lists name outside of the root (data.allow_outside)."),
    ] = False,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]FILE",
            help="Prompts for --classification, instead of our own: .txt or .json with templates ({} or {c} stands for "
            "the class name), names of the classes, or prompts per class; NAME= for one of several sets.",
        ),
    ] = None,
    duplicates: Annotated[
        Duplicates | None,
        typer.Option(
            help="Items of side y that occur more than once: merge them, or keep each and count copies as miss or hit. "
            "Default: miss for mscoco and flickr30k, as in published results; merge otherwise, as in training."
        ),
    ] = None,
    correct: Annotated[
        list[str] | None,
        typer.Option(
            metavar="bank=train|queries",
            rich_help_panel=_CORRECTION,
            help="Also rank by score minus popularity. The bank consists of training pairs, or of the test "
            "pairs themselves (transductive). Can be given twice.",
        ),
    ] = None,
    bank_size: Annotated[
        int, typer.Option(min=2, rich_help_panel=_CORRECTION, help="Most items per side in the bank.")
    ] = 12_000,
    head: Annotated[
        bool | None,
        typer.Option("--head/--no-head", help="Whether features include the projection head (default: evaluate.head)."),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Use the best checkpoint's weights, not the last.")] = False,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples per batch. Default: the run's.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
) -> None:
    """Evaluate retrieval, search with graded relevance, and classification (zero-shot, neighbors, linear probe).

    Items are prepared as in the run's training. Nothing is downloaded: for a standard test set, the command says which
    files to put where. The JSON file also describes the protocol.
    """
    if out is not None:
        _check_out(out)

    from nuclr import files
    from nuclr.data.formats.beir import read_beir
    from nuclr.models import ImageFormat
    from nuclr.remote import is_url
    from nuclr.runs import launch
    from nuclr.studies.evaluate import protocol, tasks
    from nuclr.studies.evaluate.corrector import parse_bank
    from nuclr.studies.evaluate.subject import open_subject

    banks = list(dict.fromkeys(parse_bank(text) for text in correct or []))
    with training_errors(), launch.processes(launch.pick_device(device)):
        subject = open_subject(run, best, batch_size, device, head)
        data, model = subject.data, subject.model
        share, outside = data.max_bad_share, allow_outside or data.allow_outside
        sizes = [side.inputs.size for side in (model.x, model.y) if isinstance(side.inputs, ImageFormat)]
        size = sizes[0] if sizes else 32
        for folder in beir or []:
            subject.check_beir(folder)  # before a large corpus is read
        own = not (retrieval or classification or beir or classes)
        sets = [protocol.OWN_CLASSES] if own and data.classes else list(map(tasks.set_name, classification or []))
        files_of_sets = tasks.assign_prompts(prompts or [], sets)
        # As in training, unless the folder is no longer there: then paths are relative to the working directory.
        known_root = data.root if data.root is not None and (is_url(data.root) or Path(data.root).is_dir()) else None
        root = root if root is not None else known_root
        with options_in_messages():
            retrievals = [tasks.open_retrieval(text, root, split, share, outside, data) for text in retrieval or []]
        classifications = [
            tasks.open_classification(text, files_of_sets.get(tasks.set_name(text)), share, size, outside)
            for text in classification or []
        ]
        searches = [read_beir(folder, split, share) for folder in beir or []]
        probes = [tasks.open_probe(text, share, size, outside) for text in classes or []]
        if own:
            prompt_file = files_of_sets.get(protocol.OWN_CLASSES)
            retrievals, classifications, probes = protocol.own_sets(subject, prompt_file)
        if banks and not (retrievals or searches):
            raise UserError("--correct needs --retrieval or --beir; classification is not corrected")
        way = duplicates.value if duplicates is not None else None
        say = (lambda text: typer.echo(printable(text), err=True)) if launch.is_first() else (lambda _: None)
        content = protocol.evaluate_subject(
            subject, retrievals, classifications, banks, way, bank_size, say, searches, probes
        )
    if launch.is_first():
        typer.echo(printable(protocol.table(content).rstrip()))
        if out is not None:
            with files.user_errors(out):
                files.write_json(out, content)
            typer.echo(f"\nMetrics, names and protocol are in {out}")


def _check_out(out: Path) -> None:
    """Refuse, before any work, a file that exists or cannot be written."""
    if out.suffix != ".json":
        raise UserError(f"--out {out}: metrics are written as JSON; name a file that ends in .json")
    if out.exists():
        raise UserError(f"--out {out}: the file exists; remove it or name another one")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: the folder {out.parent} does not exist")
