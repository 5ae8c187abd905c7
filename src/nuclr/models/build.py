"""`build_model`: from a few flat arguments to a dual encoder."""

import os
from collections.abc import Iterable

from nuclr.errors import UserError
from nuclr.models.dual_encoder import DualEncoder
from nuclr.models.locate import locate, read_json
from nuclr.models.pretrained import open_joint
from nuclr.models.probe import probe_images, probe_texts
from nuclr.models.saving import load
from nuclr.models.sides import Source, image_side, text_side

WIDTH = 256


def build_model(
    image: Source = "tiny_resnet",
    text: Source = "tiny_text",
    *,
    pretrained: str | os.PathLike[str] | None = None,
    width: int | None = None,
    image_head: str = "linear",
    text_head: str = "linear",
    image_frozen: bool = False,
    text_frozen: bool = False,
    image_size: int | None = None,
    max_length: int | None = None,
    image_width: int | None = None,
    text_width: int | None = None,
    captions: Iterable[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> DualEncoder:
    """A dual encoder, in train mode, its random weights drawn from torch's generator.

    Args:
        image: a preset (`IMAGE_PRESETS`), a folder or hub name of a transformers model, "vectors", or any module.
        text: the same for the other side (`TEXT_PRESETS`).
        pretrained: instead of both, a CLIP or SigLIP or a saved dual encoder of nuclr, as folder (or hub name).
        width: of the shared space, 256 unless `pretrained` has its own.
        image_head: "linear", "mlp" or "none", from the tower's features to `width`.
        text_head: the same for the other side.
        image_frozen: keep the tower as it is and train only what follows it.
        text_frozen: the same for the other side.
        image_size: height and width in pixels; otherwise what the tower was made for.
        max_length: of a text, in tokens; otherwise 32 (tiny_text), the model's own (CLIP, SigLIP), or at most 64.
        image_width: coordinates of the vectors, or of what a module returns (a module without it gets no head).
        text_width: the same for the other side.
        captions: what the tokenizer of a text preset is trained on.
        tokenizer: a folder or hub name of another tokenizer than the text tower's own.

    """
    numbers = {"width": width, "image_size": image_size, "max_length": max_length}
    numbers |= {"image_width": image_width, "text_width": text_width}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise UserError(f"{name}: {value}; needs a positive number")
    if pretrained is not None:
        model = _open_pretrained(pretrained, (image_frozen, text_frozen), image_size, max_length)
        if width is not None and width != model.width:
            raise UserError(f"width: {width}, but {pretrained} projects to {model.width}; leave width out")
        return model.train()
    width = width or WIDTH
    x, images = image_side(image, width, image_head, image_frozen, image_size, image_width)
    y, texts = text_side(text, width, text_head, text_frozen, max_length, text_width, captions, tokenizer)
    return DualEncoder(x, y, images=images, tokenizer=texts).train()


def _open_pretrained(
    source: str | os.PathLike[str], frozen: tuple[bool, bool], image_size: int | None, max_length: int | None
) -> DualEncoder:
    folder = locate(source, "pretrained")
    if "nuclr" not in read_json(folder / "config.json"):
        sides, images, texts, joint = open_joint(folder, "pretrained", image_size, max_length)
        model = DualEncoder(*sides, images=images, tokenizer=texts, joint=joint)
    else:
        model = load(folder)
        if (image_size or max_length) is not None:
            raise UserError(f"pretrained: {folder} has its own image_size and max_length; leave them out")
    x_width = probe_images(model.x, model.images, folder) if model.images else model.width
    y_width = probe_texts(model.y, model.tokenizer, folder) if model.tokenizer else model.width
    if x_width != y_width:
        raise UserError(f"pretrained: {folder} gives {x_width} features for images but {y_width} for texts")
    for side, freeze in ((model.x, frozen[0]), (model.y, frozen[1])):
        if freeze:
            side.freeze()
    return model
