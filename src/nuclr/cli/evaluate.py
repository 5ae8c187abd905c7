"""`nuclr evaluate`: a trained model on test sets."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from nuclr.cli.arguments import check_new_file, options_in_messages
from nuclr.cli.train import training_errors
from nuclr.errors import printable

EPILOG = """
Examples:

    nuclr evaluate RUN                                                  the run's own validation pairs
    nuclr evaluate RUN --retrieval dev.jsonl --correct bank=train       plain and popularity-corrected ranking
    nuclr evaluate RUN --retrieval flickr30k:DATA --classification cifar100:DATA --out metrics.json
    nuclr evaluate RUN --beir scifact                                   nDCG@10, MRR@10, recall@100, MAP
    nuclr evaluate RUN --classes cifar10_test --no-head                 nearest neighbors and a linear probe
"""
_CORRECTION = "Popularity-corrected ranking"


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
        Path | None,
        typer.Option(
            help="Prompts for --classification, instead of our own: .txt or .json with templates ({} or {c} stands for "
            "the class name), names of the classes, or prompts per class; .json may hold those of several sets by name."
        ),
    ] = None,
    duplicates: Annotated[
        Literal["merge", "miss"] | None,
        typer.Option(
            help="Items of side y that occur more than once: merge them, or keep each and count copies as misses. "
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
        check_new_file(out, (".json",))

    from nuclr import files
    from nuclr.runs import launch
    from nuclr.studies import evaluate as study

    with training_errors(), launch.processes(launch.pick_device(device)), options_in_messages():
        result = study.evaluate(
            run,
            retrieval=retrieval or (),
            classification=classification or (),
            beir=beir or (),
            classes=classes or (),
            prompts=prompts,
            correct=correct or (),
            duplicates=duplicates,
            root=root,
            split=split,
            allow_outside=allow_outside,
            head=head,
            best=best,
            batch_size=batch_size,
            device=device,
            say=lambda text: typer.echo(printable(text), err=True) if launch.is_first() else None,
        )
    if launch.is_first():
        typer.echo(printable(result.table()))
        if out is not None:
            files.write_json(out, result.to_json())
            typer.echo(f"\nMetrics and protocol are in {out}")
