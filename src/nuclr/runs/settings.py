"""All settings of a run, with types, bounds and defaults.

`nuclr.runs.config` fills them from YAML and key=value. The section `objective` is not fixed: its keys are the
arguments of the registered objectives' constructors (`nuclr.objectives.registry`). The documentation's page of settings
is generated from this module: "Attributes" in the docstring of a class describes its keys.
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

    Attributes:
        key: Column of a table, or key of a list, that holds this side. By default one of the usual names is found, such
            as image, caption, question, or the columns of a table with exactly two.
        modality: `image`, `text`, `vector`, or one that a plugin registers. By default it is recognized from the
            column's values.
        name: Name of the side in tables, pages, metrics and messages. By default that of the column; `image` and `text`
            for a pair of both.
        views: Views of this side per visit of a sample: augmentations of an image; otherwise several texts or vectors
            that belong together, such as captions of one image (see `nuclr.data.ViewGroups`).
        text: `plain`, or `albef`: texts of pairs in lower case, without punctuation and of at most 30 words
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

    Attributes:
        path: As `data.val`.
        split: Which split of it to read. By default `data.val_split`.
        root: Folder that names in it are relative to. By default `data.root`.
        x_key: Column of side x. By default that of the training pairs, or one of the usual names.
        y_key: Column of side y, likewise.

    """

    path: str | None = None
    split: str | None = None
    root: str | None = None
    x_key: str | None = None
    y_key: str | None = None


@dataclass(frozen=True)
class Data:
    """The pairs. Names are relative to `root` if they exist there.

    Attributes:
        train: Pairs to train on, in any of the formats, their URL, or `builtin` (see `nuclr.data.open_pairs`).
        val: Held-out pairs to evaluate on, in the same forms, or a standard set (`mscoco:FOLDER`, `flickr30k:FOLDER`).
            Several sets are given by name; the first one chooses the best checkpoint, and methods are tuned on it.
        contrast: `sides` contrasts x with y; `views` contrasts random views of each image of side x with each other,
            and does not read side y. By default `views` for a folder of images, otherwise `sides`.
        classes: Folder of labeled images, or `builtin`: for zero-shot accuracy if a side takes texts, otherwise for
            k-nearest-neighbor accuracy.
        root: Folder that file names in the data are relative to; or the URL of a folder, for `train` and `val`.
        allow_outside: Read images that a list names outside of `root` (without it: of the list's folder), by `..`, an
            absolute path or a symbolic link. Otherwise they are bad samples, because reports show images.
        x: Side x.
        y: Side y.
        split: Which split of `train` to read, if the file holds several, such as Karpathy's.
        val_split: Which split of `val` to read.
        keep: File with the numbers of the pairs to train on, as written by `nuclr popularity --keep`. By default all.
        one_pair_per_x: An epoch contains every x once, with one of its y, instead of every pair. Not used if views
            group the pairs: then an epoch contains every group once.
        mask: Pairs that share an x, a y or a group are not used as negatives of each other.
        batch_size: Pairs per step, over all processes.
        micro_batch: Pairs that each process encodes at a time, with the same result as for the whole batch; 0 for all.
        fit: How an image is made square if it is not cropped at random: its center is cut out, or its sides are scaled.
        val_fit: The same for pairs outside of training, such as held-out pairs and retrieval test sets. By default
            `fit`, which labeled images always use.
        max_bad_share: If a larger share of the samples is bad, the run does not start.
        workers: Decoding threads.
        memory: Megabytes of decoded images to cache.

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

    Attributes:
        enabled: Whether training images are augmented at all.
        crop: Smallest share of an image's area that a random crop keeps; 1 takes the same square as evaluation does.
        flip: Probability of a horizontal flip.
        operations: Number of random operations, such as rotations and changes of contrast.
        magnitude: Strength of the operations.
        fill: Brightness, from 0 (black) to 1 (white), of the pixels that shears, shifts and rotations bring in.

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

    Attributes:
        encoder: A preset, a folder, a hub name, or the name of an encoder that a plugin registers. Vectors need none.
        head: The layers from the encoder's features to the common space.
        frozen: Train only the head.
        image_size: Height and width of images in pixels. By default the encoder's.
        image_normalization: Mean and deviation of the pixels. By default the encoder's.
        max_length: Longest text in tokens. By default the encoder's.
        tokenizer: Folder or hub name of another tokenizer than the encoder's.
        pooling: The feature of a text is that of its first token, or the mean over its tokens. By default the
            encoder's.

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
    """The dual encoder: one encoder per side, or `pretrained`.

    Attributes:
        x: The encoder of side x.
        y: The encoder of side y.
        shared: One encoder for both sides, with the options of side x. By default if both sides hold images or both
            hold texts, and side y has no options of its own.
        pretrained: A complete dual encoder instead: CLIP, SigLIP, or the `model/` folder of a run.
        width: Dimensions of the common space. By default the encoder's.
        standardize: Center and scale input vectors by the mean and deviation of the training set.

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

    Attributes:
        name: Name of the objective: a built-in one, or one that a plugin registers.
        options: Arguments of the constructor. Options of other objectives are allowed, so that one file serves
            `nuclr compare`; `arguments` leaves those out and fills in the defaults.

    """

    name: str = "nuclr"
    options: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Return all arguments of this objective's constructor except `num_samples`."""
        return {key: self.options.get(key, default) for key, default in objectives.options(self.name).items()}


@dataclass(frozen=True)
class Optimizer:
    """AdamW. The networks of an objective have a learning rate of at most 1e-3.

    Attributes:
        lr: Largest learning rate, reached after the warmup.
        weight_decay: Decoupled weight decay.
        beta1: Weight of the old mean of the gradients.
        beta2: Weight of the old mean of their squares.
        eps: Added to the root of the mean of squares.
        clip: Largest norm of the whole gradient; 0 for no limit.

    """

    lr: float = number(1e-3, above=0)
    weight_decay: float = number(0.02, 0)
    beta1: float = number(0.9, 0, 0.999999)
    beta2: float = number(0.999, 0, 0.999999)
    eps: float = number(1e-8, above=0)
    clip: float = number(0.0, 0)


@dataclass(frozen=True)
class Schedule:
    """Everything that changes over time, see `nuclr.training.schedules`.

    Attributes:
        epochs: Passes over the training pairs.
        warmup_steps: Steps in which the learning rate rises linearly from `lr_start` to `optimizer.lr`.
        lr_start: Learning rate of the first step of a warmup.
        lr_end: Learning rate at the end; after the warmup it falls along a cosine.
        zeta_frozen_epochs: Epochs at the start during which zeta is frozen.
        zeta: Step size of zeta after that: constant, or falling to 0 along a cosine.
        zeta_steps: Also divide the step size of zeta by 10 after half and by 100 after three quarters of the epochs.
        zeta_refresh: Solve for zeta exactly on the current features every so many epochs; 0 for never.
        gamma: Constant, or a cosine from 1 down to `objective.gamma`.
        per_epoch: All of these change from epoch to epoch only, as in the published code, and not with every step. The
            warmup takes the first steps of the first epoch.

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
    """Evaluation on the held-out pairs.

    Attributes:
        every: Epochs between evaluations; 0 for only at the end.
        batch_size: Samples that are encoded at a time.
        head: Whether evaluation and `nuclr embed` include the projection heads; `false` takes the towers' features.

    """

    every: int = number(1, 0)
    batch_size: int = number(256, 1)
    head: bool = True


@dataclass(frozen=True)
class Log:
    """Logging. TensorBoard and W&B need `pip install 'nuclr[logging]'`.

    Attributes:
        every: Steps between lines of `metrics.jsonl`; there is at least one line per epoch.
        tensorboard: Also write events for TensorBoard.
        wandb: Also log to Weights & Biases. A resumed run continues the same W&B run.

    """

    every: int = number(50, 1)
    tensorboard: bool = False
    wandb: bool = False


@dataclass(frozen=True)
class Settings:
    """Settings of one run.

    Attributes:
        name: Name of the run. By default the last part of `out`, or `run` without it.
        out: Folder of the run. By default `runs/NAME`, or `runs/NAME-2`, ... if that exists.
        seed: Seed of all random numbers.
        device: `cpu`, `cuda`, ...; `auto` takes an accelerator if there is one.
        precision: `bfloat16` is autocast for the encoders; the objective stays in float32.
        threads: CPU threads; 0 for all cores.
        checkpoint_every: Steps between checkpoints, in addition to one at the end of every epoch.
        report: Write `report.html` at the end.
        plugins: Python files or modules to import first; they may register objectives, modalities, encoders or report
            sections.
        data: The pairs.
        augment: Image augmentation.
        model: The dual encoder.
        objective: The objective.
        optimizer: The optimizer.
        schedule: Everything that changes over time.
        evaluate: Evaluation on the held-out pairs.
        log: Logging.

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
