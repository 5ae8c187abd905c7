"""The model card of an export, README.md: what the model is, how to load it, data, objective, metrics, limits.

Every value comes from the run. What a run does not know, such as the license of its data, is left to the user and
marked as missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import nuclr
from nuclr import objectives
from nuclr.errors import printable
from nuclr.export.trained import Trained, describe_encoder
from nuclr.files import parse_json, read_text, write_text
from nuclr.models import Encoder, ImageFormat, Tokenizer
from nuclr.models.encoder import Head
from nuclr.runs import folder as run_folder

MISSING = "not stated; fill in before you publish the model"


@dataclass(frozen=True)
class Usage:
    """What a target adds to the card.

    Args:
        library: `library_name` of the Hugging Face hub.
        task: its `pipeline_tag`.
        code: lines of Python that load the model and encode a few items, run from the folder that holds the export.
        notes: sentences about this form of the model.

    """

    library: str
    task: str
    code: str
    notes: Sequence[str] = ()


def write(trained: Trained, folder: Path, usage: Usage) -> None:
    """Write README.md to the folder of an export.

    Args:
        trained: the run.
        folder: the folder of the export.
        usage: what the target adds.

    """
    parts = [
        _front_matter(usage),
        f"# {_plain(trained.run.settings.name)}",
        _summary(trained),
        "## How to load",
        f"```python\n{usage.code.strip()}\n```",
        "Run this in the folder that holds this one, or replace the path. Features have unit norm, so their inner "
        "product is the cosine similarity.",
        *usage.notes,
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
        *_limits(trained),
        "## License and citation",
        f"License of the model: {MISSING}. License of the data: {MISSING}.",
        "## How it was made",
        _origin(trained),
    ]
    write_text(folder / "README.md", "\n\n".join(part for part in parts if part) + "\n")


def _front_matter(usage: Usage) -> str:
    content = {"library_name": usage.library, "pipeline_tag": usage.task, "tags": ["nuclr", "contrastive-learning"]}
    fields = yaml.safe_dump(content, sort_keys=False).strip()
    return f"---\n{fields}\nlicense:  # {MISSING}\n---"


def _summary(trained: Trained) -> str:
    x, y = trained.run.sides
    width = trained.model.width
    shared = ", with one encoder for both" if trained.model.shared else ""
    items = f"{_plain(x)} and {_plain(y)}" if x != y else f"two views of each {_plain(x)}"
    features = f"unit-norm features of {width} dimensions" if width else "unit-norm features"
    return f"A dual encoder that maps {items} to {features} in one space{shared}, trained with nuclr."


def _encoders(trained: Trained) -> str:
    rows = []
    names = dict(zip(("x", "y"), trained.run.sides, strict=True))
    for side, encoder in trained.sides:
        count = sum(parameter.numel() for parameter in encoder.parameters())
        chosen = getattr(trained.run.settings.model, side).encoder or trained.run.settings.model.pretrained
        frozen = "yes" if encoder.frozen else "no"
        name = " = ".join(dict.fromkeys(map(_plain, names.values()))) if trained.model.shared else _plain(names[side])
        row = [name, encoder.modality or "tensors", _plain(str(chosen)), describe_encoder(encoder), _head(encoder)]
        rows.append([*row, f"{count:,}", frozen])
    return _table(["side", "modality", "encoder", "architecture", "head", "parameters", "tower frozen"], rows)


def _head(encoder: Encoder) -> str:
    if isinstance(encoder.head, Head):
        return f"{encoder.head.kind}, {encoder.head.in_width} to {encoder.head.width}"
    return "projection of the pretrained model"


def _preprocessing(trained: Trained) -> list[str]:
    lines = []
    for side, encoder in trained.sides:
        inputs, name = encoder.inputs, f"`{trained.folders[side]}`"
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
    data, results, settings = trained.run.settings.data, trained.run.results or {}, trained.run.settings
    rows = [
        ["training pairs", f"`{_plain(str(data.train))}`" + (f", split {_plain(data.split)}" if data.split else "")]
    ]
    rows.append(["number of pairs", f"{results['pairs']:,}" if "pairs" in results else MISSING])
    if results.get("bad_samples"):
        rows.append(["unreadable pairs left out", f"{results['bad_samples']:,}"])
    if data.keep:
        rows.append(["subset", f"`{_plain(data.keep)}`"])
    for name, chosen in data.val_sets.items() or [("", None)]:
        held_out = "none" if chosen is None else f"`{_plain(str(chosen.path))}`"
        split = (chosen.split or data.val_split) if chosen is not None else None
        label = f"held-out pairs, {_plain(name)}" if data.val_prefix(name) else "held-out pairs"
        rows.append([label, held_out + (f", split {_plain(split)}" if split else "")])
    if any(encoder.modality == "image" for _, encoder in trained.sides):
        augment = settings.augment
        words = f"crops of at least {augment.crop:g} of the area, flips with probability {augment.flip:g}, "
        words += f"{augment.operations} operations of magnitude {augment.magnitude:g}"
        rows.append(["augmentation of images", words if augment.enabled else "none"])
    if settings.model.pretrained:
        rows.append(["started from", f"`{_plain(settings.model.pretrained)}`"])
    rows.append(["source and license of the data", MISSING])
    return _table(["what", "value"], rows)


def _objective(trained: Trained) -> str:
    settings, results = trained.run.settings, trained.run.results or {}
    name = settings.objective.name
    label = objectives.entry(name).label if name in objectives.names() else name
    rows = [["objective", f"{_plain(label)} (`{_plain(name)}`)"], ["temperature", f"{trained.temperature:.6g}"]]
    if trained.bias is not None:
        rows.append(["bias", f"{trained.bias:.6g}"])
    rows += [["epochs, steps", f"{results.get('epochs')}, {results.get('steps'):,}"]]
    rows += [["batch size (all processes)", str(results.get("batch_size"))]]
    optimizer = settings.optimizer
    rows += [["optimizer", f"AdamW, learning rate {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}"]]
    rows += [["precision", settings.precision], ["seed", str(settings.seed)]]
    options = {key: value for key, value in settings.objective.arguments().items() if key != "temperature"}
    rows += [["options", ", ".join(f"{key}={value}" for key, value in options.items())]]
    return _table(["what", "value"], rows)


def _metrics(trained: Trained) -> list[str]:
    if not trained.metrics:
        return ["The run has no held-out pairs, so it was not evaluated."]
    lines = [_table(["metric on the held-out pairs", "value"], _metric_rows(trained.metrics))]
    protocol = (trained.run.results or {}).get("protocol")
    which = "the best checkpoint" if trained.run.best else "the last weights"
    lines.append(f"Of {which}. Protocol: {protocol}." if protocol else f"Of {which}.")
    if not trained.run.settings.evaluate.head:
        lines.append(
            "The run evaluates its towers without the heads (`evaluate.head=false`); the export has the heads."
        )
    return lines


def _metric_rows(metrics: Mapping[str, Any]) -> list[list[str]]:
    return [[f"`{_plain(key)}`", f"{value:.4g}"] for key, value in metrics.items() if isinstance(value, int | float)]


def _limits(trained: Trained) -> list[str]:
    lines = [
        "- The metrics above are those of the run itself. It did not test other data, languages or tasks, nor social "
        "bias; the model reflects the pairs it was trained on.",
        "- Scores of different queries are not on one scale: divide them by the temperature and apply a softmax over "
        "the candidates to compare candidates of one query.",
        "- Items that are near to everything (hubs) are found by too many queries. `nuclr hubness` measures this, and "
        "`nuclr evaluate --correct` or `PopularityCorrection` corrects it.",
    ]
    for side, encoder in trained.sides:
        if isinstance(encoder.inputs, Tokenizer):
            lines.append(f"- Texts ({trained.folders[side]}) are cut after {encoder.inputs.max_length} tokens.")
        elif isinstance(encoder.inputs, ImageFormat) and not trained.squash:
            lines.append(f"- Only the central square of an image ({trained.folders[side]}) is seen.")
    if trained.run.settings.precision != "float32":
        lines.append(f"- Training ran in {trained.run.settings.precision}; the exported weights are float32.")
    return ["\n".join(lines)]


def _origin(trained: Trained) -> str:
    path = trained.run.folder / run_folder.ENVIRONMENT
    try:
        environment = parse_json(read_text(path))
        command, versions = str(environment["command"]), dict(environment["versions"])
    except (ValueError, KeyError, TypeError):
        command, versions = "", {}
    rows = [["run", f"`{_plain(trained.run.folder.name)}`"], ["exported by", f"nuclr {nuclr.__version__}"]]
    if command:
        rows.append(["command", f"`{_plain(command)}`"])
    if versions:
        rows.append(["versions in training", ", ".join(f"{_plain(k)} {_plain(str(v))}" for k, v in versions.items())])
    return _table(["what", "value"], rows)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _plain(text: str) -> str:
    """Return a name that a user chose, in one line and without markup."""
    return printable(text).replace("\n", " ").replace("`", "'").replace("<", "&lt;")


def _numbers(values: Sequence[float]) -> str:
    return "(" + ", ".join(f"{value:.6g}" for value in values) + ")"
