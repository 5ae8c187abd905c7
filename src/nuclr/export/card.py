"""The model card of an export, README.md: what the model is, how to load it, data, objective, metrics, limits.

Every value comes from the run. What a run does not know, such as the license of its data, is left to the user and
marked as missing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import nuclr
from nuclr import objectives
from nuclr.errors import printable
from nuclr.export.trained import Trained, Written
from nuclr.files import write_text
from nuclr.models import ImageFormat, Tokenizer
from nuclr.models.encoder import describe_tower
from nuclr.runs.settings import flatten

MISSING = "not stated; fill in before you publish the model"
LIMITS = (
    "- The metrics above are those of the run itself. It did not test other data, languages or tasks, nor social bias; "
    "the model reflects the pairs it was trained on.\n"
    "- Texts and images are cut as the section on preprocessing says.\n"
    "- Scores of different queries are not on one scale: divide them by the temperature and apply a softmax over the "
    "candidates to compare candidates of one query.\n"
    "- Items that are near to everything (hubs) are found by too many queries. `nuclr hubness` measures this, and "
    "`nuclr evaluate --correct` or `PopularityCorrection` corrects it."
)


def write_card(
    trained: Trained,
    written: Written,
    folder: Path,
) -> None:
    """Write README.md to the folder of an export.

    Args:
        trained: the run.
        written: what the target wrote.
        folder: the folder of the export.

    """
    parts = [
        _front_matter(written),
        f"# {_plain(trained.run.settings.name)}",
        _summary(trained),
        "## How to load",
        f"```python\n{written.code.strip()}\n```",
        "Run this in the folder that holds this one, or replace the path. Features have unit norm, so their inner "
        "product is the cosine similarity.",
        *written.notes,
        _widths(trained),
        "## Encoders",
        _encoders(trained),
        "## Preprocessing",
        *_preprocessing(trained),
        "## Training data",
        _training_data(trained),
        "## Objective",
        _objective(trained),
        "## Metrics",
        *_metrics(trained),
        "## Limits",
        LIMITS,
        "## License and citation",
        f"License of the model: {MISSING}. License of the data: {MISSING}.",
        "## How it was made",
        _facts({"run": f"`{_plain(trained.run.folder.name)}`", "exported by": f"nuclr {nuclr.__version__}"}),
    ]
    write_text(folder / "README.md", "\n\n".join(part for part in parts if part) + "\n")


def _front_matter(written: Written) -> str:
    fields = f"library_name: {written.library}\npipeline_tag: {written.task}\ntags: [nuclr, contrastive-learning]"
    return f"---\n{fields}\nlicense:  # {MISSING}\n---"


def _summary(trained: Trained) -> str:
    x, y = trained.run.sides
    items = f"{_plain(x)} and {_plain(y)}" if x != y else f"two views of each {_plain(x)}"
    width = f" of {trained.model.width} dimensions" if trained.model.width else ""
    shared = ", with one encoder for both" if trained.model.shared else ""
    return f"A dual encoder that maps {items} to unit-norm features{width} in one space{shared}, trained with nuclr."


def _widths(trained: Trained) -> str:
    """Return how features are shortened; empty if the run did not train for it."""
    widths = trained.run.settings.model.matryoshka
    if len(widths) < 2:
        return ""
    return (
        f"Matryoshka: features can be shortened to their first {', '.join(map(str, widths[:-1]))} coordinates (all: "
        f"{widths[-1]}), scaled to unit norm again. In sentence-transformers, this is `truncate_dim={widths[0]}` of "
        "`SentenceTransformer`, with `normalize_embeddings=True` in `encode`, which does not scale by itself."
    )


def _encoders(trained: Trained) -> str:
    rows = []
    names = dict(zip(("x", "y"), trained.run.sides, strict=True))
    both = " = ".join(dict.fromkeys(names.values()))
    settings = trained.run.settings.model
    for side, encoder in trained.model.sides:
        count = sum(parameter.numel() for parameter in encoder.parameters())
        rows.append(
            [
                _plain(both if trained.model.shared else names[side]),
                encoder.modality or "tensors",
                _plain(str(getattr(settings, side).encoder or settings.pretrained)),
                f"`{describe_tower(encoder.tower)}`",
                f"`{describe_tower(encoder.head)}`",
                f"{count:,}",
                "yes" if encoder.frozen else "no",
            ]
        )
    return _table(["side", "modality", "encoder", "architecture", "head", "parameters", "tower frozen"], rows)


def _preprocessing(trained: Trained) -> list[str]:
    lines = []
    for side, encoder in trained.model.sides:
        inputs = encoder.inputs
        name = f"`{trained.folders[side]}`"
        if isinstance(inputs, ImageFormat):
            size = inputs.size
            how = "the whole image is resized" if trained.squash else "the central square is resized"
            lines.append(
                f"{name}: RGB, turned upright by the EXIF tag; {how} to {size} x {size} pixels with Pillow's bicubic "
                f"filter; values divided by 255, minus mean {_numbers(inputs.mean)}, divided by standard deviation "
                f"{_numbers(inputs.std)}."
            )
            if not trained.squash:
                lines.append(
                    "Image processors resize the shorter edge first and then crop, which rounds the size of images "
                    "that are not square. For exactly the features of the run, give them the square:\n"
                    f'`ImageOps.fit(ImageOps.exif_transpose(image).convert("RGB"), ({size}, {size}), Image.BICUBIC)` '
                    "(`from PIL import Image, ImageOps`)."
                )
        elif isinstance(inputs, Tokenizer):
            padding = "the longest of the batch" if inputs.padding == "longest" else f"{inputs.max_length} tokens"
            lines.append(
                f"{name}: the tokenizer in this export ({len(inputs):,} tokens), texts are truncated to "
                f"{inputs.max_length} tokens and padded to {padding}."
            )
        elif encoder.modality == "vector":
            lines.append(f"{name}: vectors of another encoder as they are; the model standardizes them.")
    return lines


def _training_data(trained: Trained) -> str:
    settings = trained.run.settings
    data = settings.data
    results = trained.results
    augment = settings.augment
    augmentation = (
        f"crops of at least {augment.crop:g} of the area, flips with probability {augment.flip:g}, "
        f"{augment.operations} operations of magnitude {augment.magnitude:g}"
    )
    held_out = [_source(chosen.path, chosen.split or data.val_split) for chosen in data.val.values()]
    images = (augmentation if augment.enabled else "none") if "image" in trained.modalities else ""
    return _facts(
        {
            "training pairs": _source(str(data.train), data.split),
            "number of pairs": f"{results.pairs:,}",
            "unreadable pairs left out": f"{results.bad_samples:,}" if results.bad_samples else "",
            "subset": f"`{_plain(data.keep)}`" if data.keep else "",
            "held-out pairs": ", ".join(held_out) or "none",
            "augmentation of images": images,
            "started from": f"`{_plain(settings.model.pretrained)}`" if settings.model.pretrained else "",
            "source and license of the data": MISSING,
        }
    )


def _source(path: str, split: str | None) -> str:
    return f"`{_plain(path)}`" + (f", split {_plain(split)}" if split else "")


def _objective(trained: Trained) -> str:
    settings = trained.run.settings
    results = trained.results
    name = settings.objective.name
    optimizer = settings.optimizer
    options = {key: value for key, value in flatten(settings.objective.arguments()) if key != "temperature"}
    return _facts(
        {
            "objective": f"{_plain(objectives.entry(name).label)} (`{_plain(name)}`)",
            "temperature": f"{trained.temperature:.6g}",
            "bias": "" if trained.bias is None else f"{trained.bias:.6g}",
            "epochs, steps": f"{results.epochs}, {results.steps:,}",
            "batch size (all processes)": str(results.batch_size),
            "optimizer": f"AdamW, learning rate {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}",
            "precision": f"{settings.precision}; the exported weights are float32",
            "seed": str(settings.seed),
            "options": ", ".join(f"{key}={value}" for key, value in options.items() if value is not None),
        }
    )


def _metrics(trained: Trained) -> list[str]:
    numbers = {key: value for key, value in trained.metrics.items() if isinstance(value, int | float)}
    if not numbers:
        return ["The run has no held-out pairs, so it was not evaluated."]
    protocol = trained.results.protocol
    lines = [
        _table(
            ["metric on the held-out pairs", "value"],
            [[f"`{_plain(key)}`", f"{value:.4g}"] for key, value in numbers.items()],
        ),
        f"Measured with {'the best checkpoint' if trained.run.best else 'the last weights'}."
        + (f" Protocol: {protocol}." if protocol else ""),
    ]
    if not trained.run.settings.evaluate.head:
        lines.append("The run evaluates its towers without heads (`evaluate.head=false`); the export has the heads.")
    return lines


def _facts(values: Mapping[str, str]) -> str:
    """Return a table of two columns without the rows that have no value."""
    return _table(["what", "value"], [[what, value] for what, value in values.items() if value])


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = []
    for cells in (header, ["---"] * len(header), *rows):
        escaped = [cell.replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Return a name that a user chose, in one line and without markup."""
    return printable(text).replace("\n", " ").replace("`", "'").replace("<", "&lt;")


def _numbers(values: Sequence[float]) -> str:
    return "(" + ", ".join(f"{value:.6g}" for value in values) + ")"
