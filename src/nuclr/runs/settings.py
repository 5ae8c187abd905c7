"""All settings of a run, with types, bounds and defaults.

`nuclr.runs.config` fills them from YAML and key=value. The section `objective` is not fixed: its keys are the
arguments of the registered objectives' constructors (`nuclr.objectives.registry`).
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nuclr import objectives


def number(
    default: float | int | None, low: float = -math.inf, high: float = math.inf, *, above: float = -math.inf
) -> Any:
    """Return a field whose value must lie in [low, high] and above `above`."""
    return field(default=default, metadata={"low": low, "high": high, "above": above})


@dataclass(frozen=True)
class DataSide:
    """One side of the pairs.

    key: the column or JSON key that holds it. Default: one of the usual names, such as image, caption, question.
    modality: image, text, vector, or one that a plugin registers. Default: recognized from the column's values.
    name: the side's name in tables, metrics and messages. Default: the column's name; image and text for these.
    views: how many views of the side a visit takes: augmentations of an image; otherwise several texts or vectors that
    belong together, such as captions of one image (see `nuclr.data.ViewGroups`).
    text: plain, or albef: texts of pairs in lower case, without punctuation and of at most 30 words
    (`nuclr.data.modalities.albef_caption`).
    """

    key: str | None = None
    modality: str | None = None
    name: str | None = None
    views: int = number(1, 1, 64)
    text: Literal["plain", "albef"] = "plain"


@dataclass(frozen=True)
class ValSet:
    """One of several sets of held-out pairs.

    path: as `data.val`. split: of this set, `data.val_split` by default. root: the folder that names are relative to,
    `data.root` by default. x_key, y_key: its columns; by default those of the training pairs, or the usual ones.
    """

    path: str | None = None
    split: str | None = None
    root: str | None = None
    x_key: str | None = None
    y_key: str | None = None


@dataclass(frozen=True)
class Data:
    """The pairs. Names are relative to `root` if they exist there.

    train, val: see `nuclr.data.open_pairs`; val is optional. contrast: sides contrasts x with y; views contrasts random
    views of each image of side x with each other. Default: views for a folder of images, otherwise sides; `config.load`
    fills it in. classes: a folder of labeled images, or "builtin", for zero-shot classification, or for
    k-nearest-neighbor classification if no side takes texts. allow_outside: read images that lists name outside of
    `root`. keep: a list of pair numbers to train on. one_pair_per_x: an epoch has every x once instead of every pair.
    mask: pairs that share an x, a y or a group are not used as negatives of each other. batch_size: summed over all
    processes. micro_batch: pairs that each process encodes at once, with the same result as for the whole batch; 0 for
    all. fit: how an image is made square where it is not cropped at random. val_fit: the same for pairs outside of
    training, such as held-out pairs and retrieval test sets; labeled images use fit. memory: megabytes of decoded
    images to keep.

    val may also be a standard set (mscoco:FOLDER, flickr30k:FOLDER), or several sets by name; the first one chooses the
    best checkpoint and is the one that methods are tuned on.
    """

    train: str | None = None
    val: str | Mapping[str, ValSet] | None = None
    contrast: Literal["sides", "views"] | None = None
    classes: str | None = None
    root: str | None = None
    allow_outside: bool = False
    x: DataSide = field(default_factory=DataSide)
    y: DataSide = field(default_factory=DataSide)
    split: str | None = None
    val_split: str | None = None
    keep: str | None = None
    one_pair_per_x: bool = False
    mask: bool = True
    batch_size: int = number(128, 2)
    micro_batch: int = number(0, 0)
    fit: Literal["crop", "squash"] = "crop"
    val_fit: Literal["crop", "squash"] | None = None
    max_bad_share: float = number(0.05, 0, 1)
    workers: int = number(2, 1, 256)
    memory: int = number(512, 0)

    @property
    def contrasts_views(self) -> bool:
        """Return whether both sides are views of the same images."""
        return self.contrast == "views"

    @property
    def val_sets(self) -> dict[str, ValSet]:
        """The sets of held-out pairs by name; one that has no name is called "val"."""
        if self.val is None or isinstance(self.val, Mapping):
            return dict(self.val or {})
        return {"val": ValSet(self.val)}

    def val_key(self, name: str) -> str:
        """Return the setting of one of the `val_sets`."""
        return f"data.val.{name}" if isinstance(self.val, Mapping) else "data.val"

    def val_prefix(self, name: str) -> str:
        """Return what the names of the metrics of one of the `val_sets` begin with: "coco/", or nothing."""
        return f"{name}/" if isinstance(self.val, Mapping) else ""

    def describe_val(self) -> str:
        """Return the paths of the held-out pairs, with the names of the sets if they have some."""
        if isinstance(self.val, Mapping):
            return ", ".join(f"{name} ({chosen.path})" for name, chosen in self.val.items())
        return self.val or "none"

    def outside_training(self) -> "Data":
        """Return the settings for pairs outside of training: `val_fit`, if it is set, takes the place of `fit`."""
        return self if self.val_fit is None else dataclasses.replace(self, fit=self.val_fit)


@dataclass(frozen=True)
class Augmentation:
    """Image augmentation, see `nuclr.data.modalities.augment`.

    crop: smallest share of an image's area that a random crop keeps; 1 takes the same square as evaluation does.
    fill: brightness, from 0 (black) to 1 (white), of the pixels that shears, shifts and rotations bring in.
    """

    enabled: bool = True
    crop: float = number(0.5, above=0, high=1)
    flip: float = number(0.5, 0, 1)
    operations: int = number(2, 0, 10)
    magnitude: float = number(7.0, 0, 10)
    fill: float = number(0.0, 0, 1)

    @property
    def smallest_crop(self) -> float | None:
        """Return `crop`, or None if images are not cropped at random."""
        return self.crop if self.enabled and self.crop < 1 else None


@dataclass(frozen=True)
class ModelSide:
    """The encoder of one side.

    encoder: a preset, a folder, a hub name, or the name of an encoder that a plugin registers. image_size and
    image_normalization (mean and deviation of the pixels; default: the encoder's) apply to images; max_length,
    tokenizer and pooling (over tokens) apply to texts.
    """

    encoder: str | None = None
    head: Literal["linear", "mlp", "none"] = "linear"
    frozen: bool = False
    image_size: int | None = number(None, 8)
    image_normalization: Literal["clip", "imagenet"] | None = None
    max_length: int | None = number(None, 2)
    tokenizer: str | None = None
    pooling: Literal["first", "mean"] | None = None


@dataclass(frozen=True)
class Model:
    """The dual encoder: one encoder per side, or `pretrained`, a whole CLIP, SigLIP or saved nuclr model.

    shared: one encoder for both sides, with the options of side x. Default: true if both sides are images or both are
    texts, and side y has no options of its own. width: of the common space. standardize: center and scale vectors by
    the training set's mean and deviation.
    """

    x: ModelSide = field(default_factory=ModelSide)
    y: ModelSide = field(default_factory=ModelSide)
    shared: bool | None = None
    pretrained: str | None = None
    width: int | None = number(None, 1)
    standardize: bool = True


@dataclass(frozen=True)
class Objective:
    """The objective's name in the registry, and arguments of its constructor.

    `options` may hold options of other objectives too, so that one file serves `nuclr compare`; `arguments` leaves
    those out and fills in the defaults.
    """

    name: str = "nuclr"
    options: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Return all arguments of this objective's constructor except `num_samples`."""
        return {key: self.options.get(key, default) for key, default in objectives.options(self.name).items()}


@dataclass(frozen=True)
class Optimizer:
    """AdamW. `clip` is the largest norm of the whole gradient; 0 means no limit."""

    lr: float = number(1e-3, above=0)
    weight_decay: float = number(0.02, 0)
    beta1: float = number(0.9, 0, 0.999999)
    beta2: float = number(0.999, 0, 0.999999)
    eps: float = number(1e-8, above=0)
    clip: float = number(0.0, 0)


@dataclass(frozen=True)
class Schedule:
    """Everything that changes over time, see `nuclr.training.schedules`.

    The learning rate rises from lr_start over warmup_steps and falls to lr_end along a cosine. zeta is frozen for
    zeta_frozen_epochs; after that its step size is constant or falls to 0 along a cosine. zeta_steps also divides it
    by 10 after half and by 100 after three quarters of the epochs. zeta_refresh: solve for zeta exactly on the
    current features every so many epochs (0: never). gamma: constant, or a cosine from 1 down to objective.gamma.
    per_epoch: all of these change from epoch to epoch only, as in the published code, and not with every step; warmup
    takes the first steps of the first epoch.
    """

    epochs: int = number(10, 1)
    warmup_steps: int = number(0, 0)
    lr_start: float = number(1e-5, 0)
    lr_end: float = number(0.0, 0)
    zeta_frozen_epochs: int = number(0, 0)
    zeta: Literal["constant", "cosine"] = "cosine"
    zeta_steps: bool = False
    zeta_refresh: int = number(0, 0)
    gamma: Literal["constant", "cosine"] = "constant"
    per_epoch: bool = False


@dataclass(frozen=True)
class Evaluate:
    """Evaluation on the held-out pairs every `every` epochs and at the end; 0 means only at the end.

    head: false evaluates and embeds with the towers' features, without the projection heads.
    """

    every: int = number(1, 0)
    batch_size: int = number(256, 1)
    head: bool = True


@dataclass(frozen=True)
class Log:
    """`every`: steps between lines of metrics.jsonl. The others need the packages of the same name."""

    every: int = number(50, 1)
    tensorboard: bool = False
    wandb: bool = False


@dataclass(frozen=True)
class Settings:
    """Settings of one run.

    out: the run's folder, runs/NAME by default. checkpoint_every: steps between checkpoints, in addition to one at
    the end of every epoch. report: write report.html at the end. plugins: Python files or modules to import first,
    which may register objectives or report sections.
    """

    name: str = "run"
    out: str | None = None
    seed: int = number(0, 0, 2**31)
    device: str = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    threads: int = number(0, 0, 1024)
    checkpoint_every: int = number(1000, 1)
    report: bool = True
    plugins: tuple[str, ...] = ()
    data: Data = field(default_factory=Data)
    augment: Augmentation = field(default_factory=Augmentation)
    model: Model = field(default_factory=Model)
    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    evaluate: Evaluate = field(default_factory=Evaluate)
    log: Log = field(default_factory=Log)


def to_dict(settings: Settings) -> dict[str, Any]:
    """Return the settings as nested dicts, as config.yaml holds them.

    The objective has all its arguments and no options of other objectives. Keys without a value are left out.
    """
    values = dataclasses.asdict(settings)
    values["objective"] = {"name": settings.objective.name, **settings.objective.arguments()}
    values["plugins"] = list(settings.plugins)
    return _without_none(values)


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    kept = {k: _without_none(v) if isinstance(v, dict) else v for k, v in values.items()}
    return {key: value for key, value in kept.items() if value is not None and value != {}}


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("section.key", value) for every value of nested dicts."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def change(settings: Any, key: str, value: Any) -> Any:
    """Return settings with the value of one key, such as "data.x.key" or "objective.gamma", replaced."""
    name, _, rest = key.partition(".")
    if isinstance(settings, Objective) and name != "name":
        return dataclasses.replace(settings, options={**settings.options, name: value})
    return dataclasses.replace(settings, **{name: change(getattr(settings, name), rest, value) if rest else value})
