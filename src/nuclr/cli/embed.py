"""`nuclr embed`: features of pairs, of images alone or of texts alone."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from nuclr.cli.arguments import options_in_messages
from nuclr.cli.train import training_errors
from nuclr.errors import UserError


def embed(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A trained run, or a folder of encoders (nuclr, CLIP, SigLIP).")
    ],
    out: Annotated[Path, typer.Option(help="Embedding file to write: .npz or .safetensors.")],
    pairs: Annotated[
        str | None,
        typer.Option(
            help="Pairs to embed, in any format that training takes. Default: the run's own. Names of images, and "
            "texts, are written to .x.txt and .y.txt next to the output, one line per row."
        ),
    ] = None,
    images: Annotated[
        Path | None, typer.Option(help="A folder of images. Their names are written to a .txt next to the output.")
    ] = None,
    texts: Annotated[Path | None, typer.Option(help="A file with one text per line.")] = None,
    side: Annotated[
        str | None,
        typer.Option(help="x or y: whose encoder to use for --images or --texts, if both sides take them."),
    ] = None,
    root: Annotated[
        str | None,
        typer.Option(help="Folder that --pairs and its files are relative to. Default: the run's data.root."),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Which split, if the pairs have several.")] = None,
    allow_outside: Annotated[
        bool,
        typer.Option("--allow-outside", help="Read images that lists name outside of the root (data.allow_outside)."),
    ] = False,
    best: Annotated[bool, typer.Option("--best", help="Use the best checkpoint's weights, not the last.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per batch.")] = 256,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
) -> None:
    """Write the features of pairs, of images alone or of texts alone; under torchrun the work is shared."""
    if sum(option is not None for option in (pairs, images, texts)) > 1:
        raise UserError("--pairs, --images and --texts exclude each other; use one of them")
    if side is not None and (side not in ("x", "y") or (images is None and texts is None)):
        raise UserError(f"--side {side}: needs x or y, and --images or --texts; pairs are embedded on both sides")

    from nuclr.models import build_model
    from nuclr.runs import features, launch
    from nuclr.runs.components import make_loader
    from nuclr.runs.run import Run, opens_as_run
    from nuclr.runs.settings import Data

    features.check_target(out)
    own = pairs is None and images is None and texts is None
    with training_errors(), launch.processes(launch.pick_device(device)):
        trained = None
        if opens_as_run(run):
            trained = Run.open_finished(run, best, device)
            model, data = trained.model, trained.settings.data
            encoding = trained.encoding._replace(batch_size=batch_size)
        else:
            if best:
                raise UserError(f"--best needs a run folder; {run} is not one")
            if own:
                raise UserError(f"{run} is not a run folder, so --pairs, --images or --texts is needed")
            where = launch.pick_device(device)
            model, data = build_model(pretrained=str(run)).to(where).eval(), Data()
            encoding = features.Encoding(batch_size, where)
        # Every image is read once, so decoded images are not kept.
        data = dataclasses.replace(data, memory=0, allow_outside=data.allow_outside or allow_outside)
        bad, names = 0, dict[Path, list[str]]()
        if images is not None:
            arrays, lines = features.embed_images(model, images, encoding, data, side)
            names = {out.with_suffix(".txt"): lines}
        elif texts is not None:
            arrays = features.embed_texts(model, texts, encoding, side)
        else:
            if own and trained is not None and root is None and split is None and not allow_outside:
                source = trained.train
            else:
                chosen = pairs if pairs is not None else str(data.train)
                part = split if split is not None else data.split if own else None
                with options_in_messages():
                    source = features.open_source(model, chosen, root if root is not None else data.root, part, data)
            bad = len(source.bad)
            loader = make_loader(data.outside_training(), source.pairs, model)
            arrays = features.embed_pairs(model, loader, source.numbers, encoding)
            if launch.is_first():
                by_side = features.pair_names(source.pairs, arrays)
                names = {out.with_suffix(f".{letter}.txt"): lines for letter, lines in by_side.items()}
        features.write_embeddings(out, arrays, names)
    if launch.is_first():
        shapes = ", ".join(f"{name} {tuple(array.shape)}" for name, array in arrays.items())
        named = f"; what the rows are: {', '.join(map(str, names))}" if names else ""
        typer.echo(f"{out}: {shapes}" + (f"; {bad} bad samples left out" if bad else "") + named)
