"""Build a dual encoder from a few flat arguments: `build_model`.

Each side is named by a preset, a folder, a name on the Hugging Face hub, "vectors", a registered encoder, or a module.
Any modality can be on either side, and one encoder can serve both.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from nuclr.errors import UserError
from nuclr.models.backbones import locate, read_json
from nuclr.models.dual_encoder import DualEncoder
from nuclr.models.image_format import NORMALIZATIONS, ImageFormat
from nuclr.models.pretrained import open_joint
from nuclr.models.saving import load
from nuclr.models.sides import EncoderSource, Name, Side, build_side, probe, resolve, train_tokenizers
from nuclr.models.tokenizer import Tokenizer

WIDTH = 256
IMAGE_ENCODER, TEXT_ENCODER, HEAD = "tiny_resnet", "tiny_text", "linear"


def build_model(
    x: EncoderSource = IMAGE_ENCODER,
    y: EncoderSource | None = None,
    *,
    shared: bool = False,
    pretrained: Name | None = None,
    width: int | None = None,
    x_head: str = HEAD,
    y_head: str = HEAD,
    x_frozen: bool = False,
    y_frozen: bool = False,
    x_image_size: int | None = None,
    y_image_size: int | None = None,
    x_max_length: int | None = None,
    y_max_length: int | None = None,
    x_width: int | None = None,
    y_width: int | None = None,
    x_texts: Iterable[str] | None = None,
    y_texts: Iterable[str] | None = None,
    x_tokenizer: Name | None = None,
    y_tokenizer: Name | None = None,
    x_pooling: str | None = None,
    y_pooling: str | None = None,
    x_modality: str | None = None,
    y_modality: str | None = None,
    x_image_normalization: str | None = None,
    y_image_normalization: str | None = None,
) -> DualEncoder:
    """Build a dual encoder in train mode. Random weights are drawn from torch's global generator.

    Arguments that start with `x_` are for side x; each has a counterpart for side y.

    Args:
        x: the encoder of side x: a preset (`IMAGE_PRESETS`, `TEXT_PRESETS`), a folder or hub name of a transformers
            model, "vectors" (inputs are embeddings already), the name of a registered encoder, or any module from a
            batch of inputs to (b, d).
        y: the encoder of side y. Default: "tiny_text", or that of side x if it is `shared`.
        shared: use one encoder, with one head, for both sides. The options of side x apply.
        pretrained: a CLIP, a SigLIP or a dual encoder saved by nuclr, as a folder or hub name. It has its own
            encoders, heads, tokenizers and pooling, which cannot be set with it.
        width: number of features in the shared space. Default: 256, or the width of `pretrained`.
        x_head: what maps the tower's features to `width`: "linear", "mlp" or "none".
        y_head: the same for side y.
        x_frozen: keep the tower of side x fixed and train only its head.
        y_frozen: the same for side y.
        x_image_size: height and width of images in pixels. Default: the size the tower was made for.
        y_image_size: the same for side y.
        x_max_length: largest number of tokens per text. Default: 32 for tiny_text, the full length for CLIP and
            SigLIP, otherwise at most 64.
        y_max_length: the same for side y.
        x_width: number of coordinates of the vectors, or of the output of a module. A module without it gets no head.
        y_width: the same for side y.
        x_texts: texts to train the tokenizer of a text preset on. If both sides are text presets, one tokenizer is
            trained on the texts of both.
        y_texts: the same for side y.
        x_tokenizer: a folder or hub name of a tokenizer to use instead of the text tower's own.
        y_tokenizer: the same for side y.
        x_pooling: how a text encoder pools its tokens: "first" or "mean". Default: what the folder says if
            sentence-transformers wrote it (1_Pooling/config.json), otherwise "first".
        y_pooling: the same for side y.
        x_modality: "image" or "text", for a folder or hub name. Default: what its configuration says; of a CLIP, side x
            takes the image tower and side y the text tower. With `pretrained`, the modality that the side must take.
        y_modality: the same for side y.
        x_image_normalization: mean and standard deviation of the pixels: "clip" or "imagenet". Default: those of the
            encoder, which are ImageNet's for presets.
        y_image_normalization: the same for side y.

    Returns:
        The model: `model(x, y)` gives unit-norm features of both sides.

    Raises:
        UserError: if an argument is not usable. The message names it by its settings key, such as `model.x.encoder`.

    Example:
        >>> from nuclr.models import build_model
        >>> model = build_model("tiny_resnet", "tiny_text", y_texts=["a red circle", "two green squares"], width=64)
        >>> model.encode_texts("a red square").shape
        torch.Size([1, 64])
        >>> build_model("tiny_text", shared=True, x_texts=["a question"], y_texts=["an answer"], width=64).shared
        True

    """
    if y is None:
        y = x if shared else TEXT_ENCODER
    sides = (
        Side(
            "x",
            x,
            x_head,
            x_frozen,
            x_image_size,
            x_max_length,
            x_width,
            x_texts,
            x_tokenizer,
            x_pooling,
            x_modality,
            x_image_normalization,
        ),
        Side(
            "y",
            y,
            y_head,
            y_frozen,
            y_image_size,
            y_max_length,
            y_width,
            y_texts,
            y_tokenizer,
            y_pooling,
            y_modality,
            y_image_normalization,
        ),
    )
    _check_sizes(width, sides)
    _check_normalizations(sides)
    if pretrained is not None:
        return _open_pretrained(pretrained, shared, width, *sides).train()
    width = width or WIDTH
    if shared:
        side = resolve(_merge(*sides))
        encoder = build_side(side, width, train_tokenizers([side]).get("x"))
        return DualEncoder(encoder, encoder).train()
    resolved = [resolve(side) for side in sides]
    tokenizers = train_tokenizers(resolved)
    return DualEncoder(*(build_side(side, width, tokenizers.get(side.name)) for side in resolved)).train()


def _check_sizes(width: int | None, sides: tuple[Side, Side]) -> None:
    sizes = {"model.width": width}
    for side in sides:
        sizes |= {f"{side.key}.image_size": side.image_size, f"{side.key}.max_length": side.max_length}
        sizes |= {f"{side.name}_width": side.in_width}
    for key, value in sizes.items():
        if value is not None and value < 1:
            raise UserError(f"{key}: {value} is not allowed; needs a positive number")


def _check_normalizations(sides: tuple[Side, Side]) -> None:
    for side in sides:
        chosen = side.image_normalization
        if chosen is not None and chosen not in NORMALIZATIONS:
            raise UserError(f"{side.key}.image_normalization: {chosen!r}; use one of {', '.join(NORMALIZATIONS)}")


def _merge(x: Side, y: Side) -> Side:
    """Return the one side of a shared encoder, with the texts of both; refuse options of y that differ from x's."""
    if x.modality != y.modality and None not in (x.modality, y.modality):
        raise UserError(
            f"model.shared: one encoder cannot take both {x.modality}s (side x) and {y.modality}s (side y); "
            "leave it out or set it to false"
        )
    defaults = {"source": x.source, "head": HEAD, "frozen": False}
    options = (
        "source",
        "head",
        "frozen",
        "image_size",
        "max_length",
        "in_width",
        "tokenizer",
        "pooling",
        "image_normalization",
    )
    for option in options:
        value = getattr(y, option)
        if value != defaults.get(option) and value != getattr(x, option):
            key = {"source": "model.y.encoder", "in_width": "y_width"}.get(option, f"model.y.{option}")
            raise UserError(f"{key}: {value} differs from side x, but model.shared makes one encoder; leave it out")
    given = [texts for texts in (x.texts, y.texts) if texts is not None]
    return replace(x, texts=chain.from_iterable(given) if given else None, modality=x.modality or y.modality)


def _open_pretrained(source: Name, shared: bool, width: int | None, x: Side, y: Side) -> DualEncoder:
    key = "model.pretrained"
    for side, default in ((x, IMAGE_ENCODER), (y, TEXT_ENCODER)):
        replaced = {"encoder": side.source != default and not (shared and side.source == x.source == IMAGE_ENCODER)}
        replaced |= {"head": side.head != HEAD, "tokenizer": side.tokenizer is not None}
        replaced |= {"pooling": side.pooling is not None}
        replaced |= {"image_normalization": side.image_normalization is not None}
        for option, is_set in replaced.items():
            if is_set:
                raise UserError(f"{side.key}.{option}: cannot be set together with {key} ({source}), which has its own")
    folder = locate(source, key)
    if "nuclr" not in read_json(folder / "config.json"):
        swapped = (x.modality, y.modality) == ("text", "image")
        image_side, text_side = (y, x) if swapped else (x, y)
        for option, side in (("image_size", text_side), ("max_length", image_side)):
            if getattr(side, option) is not None:
                raise UserError(f"{side.key}.{option}: does not apply to side {side.name} of {source}; leave it out")
        images, texts, joint = open_joint(folder, key, image_side.image_size, text_side.max_length, text_side.key)
        model = DualEncoder(*((texts, images) if swapped else (images, texts)), joint=joint)
    else:
        if any(size is not None for side in (x, y) for size in (side.image_size, side.max_length)):
            raise UserError(
                f"{key}: {folder} has its own image size and text length; leave image_size and max_length out of "
                "model.x and model.y"
            )
        model = load(folder)
    _check_pretrained(model, shared, width, x, y, folder)
    if x.frozen:
        model.x.freeze()
    if y.frozen:
        model.y.freeze()
    return model


def _check_pretrained(model: DualEncoder, shared: bool, width: int | None, x: Side, y: Side, folder: object) -> None:
    """Check a pretrained model against what is asked of it, and probe its towers."""
    key = "model.pretrained"
    if shared and not model.shared:
        raise UserError(f"model.shared: {folder} has an encoder per side; leave model.shared out")
    widths = []
    for side, encoder in ((x, model.x), (y, model.y)):
        if side.modality is not None and encoder.modality != side.modality:
            takes = f"{encoder.modality or 'tensor'}s"
            raise UserError(f"{key}: {folder} takes {takes} on side {side.name}, but the data hold {side.modality}s")
        probed = isinstance(encoder.inputs, ImageFormat | Tokenizer)
        widths.append(probe(encoder, encoder.inputs, key, folder) if probed else model.width)  # type: ignore[arg-type]
    if widths[0] != widths[1]:
        raise UserError(f"{key}: {folder} gives {widths[0]} features on side x but {widths[1]} on side y")
    if width is not None and width != model.width:
        raise UserError(f"model.width: {width}, but {folder} has {model.width} features; leave model.width out")
