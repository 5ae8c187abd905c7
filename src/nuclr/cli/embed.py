"""`nuclr embed`: features of pairs, of images alone or of texts alone."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nuclr.cli.arguments import check_new_file, options_in_messages
from nuclr.cli.train import training_errors
from nuclr.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from nuclr.runs.settings import Data
    from nuclr.studies.tasks import Subject


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
    split: Annotated[str | None, typer.Option(help="Which split of --pairs, if it has several.")] = None,
    allow_outside: Annotated[
        bool,
        typer.Option("--allow-outside", help="Read images that lists name outside of the root."),
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
    check_new_file(out, (".npz", ".safetensors"))

    from nuclr.data.pairs import SIDES
    from nuclr.runs import components, features, launch
    from nuclr.studies.tasks import open_subject

    with training_errors(), launch.processes(launch.pick_device(device)):
        subject = open_subject(run, best, batch_size, device)
        # Every image is read once, so decoded images are not kept.
        data = dataclasses.replace(
            subject.data.outside_training(),
            memory=0,
            allow_outside=subject.data.allow_outside or allow_outside,
        )
        bad = 0
        if images is not None or texts is not None:
            arrays, row_names = _embed_items(
                subject,
                data,
                images,
                texts,
                side,
            )
        else:
            if pairs is not None:
                with options_in_messages():
                    data = dataclasses.replace(
                        data,
                        train=pairs,
                        root=root or data.root,
                        split=split,
                        keep=None,
                    )
                    source = components.open_train(data)
                for name in SIDES:
                    subject.side(f"--pairs {pairs}", (name, source.pairs.sides[name].modality.name, None))
            elif subject.run is not None:
                source = subject.run.train
            else:
                raise UserError(f"{run} is not a run folder, so --pairs, --images or --texts is needed")
            bad = len(source.bad)
            loader = components.make_loader(data, source.pairs, subject.model)
            arrays, row_names = features.embed_pairs(
                subject.model,
                loader,
                source.numbers,
                subject.encoding,
            )
        launch.on_first(lambda: features.write_embeddings(out, arrays, row_names))
    if launch.is_first():
        shapes = ", ".join(f"{name} {tuple(array.shape)}" for name, array in arrays.items())
        names = ", ".join(str(out.with_suffix(end)) for end in row_names)
        named = f"; what the rows are: {names}" if names else ""
        typer.echo(f"{out}: {shapes}" + (f"; {bad} bad samples left out" if bad else "") + named)


def _embed_items(
    subject: "Subject",
    data: "Data",
    images: Path | None,
    texts: Path | None,
    side: Any,
) -> "tuple[dict[str, Tensor], dict[str, list[str]]]":
    import numpy as np

    from nuclr.data.labeled import open_image_folder
    from nuclr.files import read_lines
    from nuclr.runs import components, features

    model = subject.model
    modality = "text" if images is None else "image"
    if side is None and not model.shared and model.x.modality == model.y.modality == modality:
        raise UserError(f"--side is needed: both sides of this model take {modality}s")
    chosen = subject.side(f"--{modality}s", (side, modality, None))
    encoder = getattr(model, chosen)
    if texts is not None:
        lines = read_lines(texts)
        if not lines:
            raise UserError(f"--texts {texts}: the file is empty; it needs one text per line")
        return {chosen: features.encode_items(encoder, lines, subject.encoding)}, {}
    if images is None or not images.is_dir():
        raise UserError(f"--images {images}: no such folder")
    pictures = open_image_folder(images, allow_outside=True)
    loader = components.make_loader(
        data,
        pictures,
        model,
        encoders=(encoder, encoder),
    )
    array = features.encode_side(
        encoder,
        loader,
        "x",
        np.arange(len(pictures)),
        subject.encoding,
    )
    return {chosen: array}, {".txt": [pictures.name(number) for number in range(len(pictures))]}
