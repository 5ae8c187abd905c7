"""All settings of a run, with types, bounds and defaults, checked by pydantic.

`nuclr.runs.config` fills them from YAML and key=value. The section `objective` is not fixed: its keys are the
arguments of the registered objectives' constructors (`nuclr.objectives.registry`). The documentation's page of settings
is generated from this module: "Attributes" in the docstring of a class describes its keys.
"""

import dataclasses
import hashlib
import json
import typing
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints
from pydantic.dataclasses import dataclass
from torch import Tensor

from nuclr import objectives
from nuclr.errors import UserError
from nuclr.runs.matryoshka import NARROWER

CONFIG = pydantic.ConfigDict(
    extra="forbid",
    allow_inf_nan=False,
    coerce_numbers_to_str=True,
)
# Names and settings of the machine, which a resumed run may change.
FREE_ON_RESUME = {
    "name",
    "out",
    "device",
    "threads",
    "checkpoint_every",
    "report",
    "plugins",
    "data.root",
    "data.allow_outside",
    "data.workers",
    "data.memory",
    "log.tensorboard",
    "log.wandb",
}


def _read_number(value: Any) -> Any:
    """Return a text such as 1e3, which YAML does not read as a number, as one."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def split_names(value: Any) -> Any:
    """Return comma-separated names as a list; other values as they are."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


def _sort_widths(value: list[int]) -> list[int]:
    if len(set(value)) < len(value):
        raise ValueError("each width may occur once")
    return sorted(value)


Int = Annotated[int, BeforeValidator(_read_number)]
UNNAMED = "val"  # name of the only set of held-out pairs, if `data.val` is a path
SetName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


@dataclass(frozen=True, config=CONFIG)
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
    views: Int = Field(
        default=1,
        ge=1,
        le=64,
    )
    text: Literal["plain", "albef"] = "plain"


@dataclass(frozen=True, config=CONFIG)
class ValSet:
    """One of several sets of held-out pairs.

    Attributes:
        path: As `data.val`.
        split: Which split of it to read. By default `data.val_split`.
        root: Folder that names in it are relative to. By default `data.root`.
        x_key: Column of side x. By default that of the training pairs, or one of the usual names.
        y_key: Column of side y, likewise.

    """

    path: str
    split: str | None = None
    root: str | None = None
    x_key: str | None = None
    y_key: str | None = None


def _read_sets(value: Any) -> Any:
    """Return the sets of held-out pairs by name, without those that an override removed, such as data.val.coco=."""
    sets = {UNNAMED: value} if value is None or isinstance(value, str) else value
    if not isinstance(sets, Mapping):
        return value
    return {name: {"path": own} if isinstance(own, str) else own for name, own in sets.items() if own is not None}


@dataclass(frozen=True, config=CONFIG)
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
        keep: File with the numbers of the pairs to train on, one per line. By default all.
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
    val: Annotated[Mapping[SetName, ValSet], BeforeValidator(_read_sets)] = dataclasses.field(default_factory=dict)
    contrast: Literal["sides", "views"] | None = None
    classes: str | None = None
    root: str | None = None
    allow_outside: bool = False
    x: DataSide = dataclasses.field(default_factory=DataSide)
    y: DataSide = dataclasses.field(default_factory=DataSide)
    split: str | None = None
    val_split: str | None = None
    keep: str | None = None
    one_pair_per_x: bool = False
    mask: bool = True
    batch_size: Int = Field(default=128, ge=2)
    micro_batch: Int = Field(default=0, ge=0)
    fit: Literal["crop", "squash"] = "crop"
    val_fit: Literal["crop", "squash"] | None = None
    max_bad_share: float = Field(
        default=0.05,
        ge=0,
        le=1,
    )
    workers: Int = Field(
        default=2,
        ge=1,
        le=256,
    )
    memory: Int = Field(default=512, ge=0)

    @property
    def contrasts_views(self) -> bool:
        """Return whether both sides are views of the same images."""
        return self.contrast == "views"

    def val_key(self, name: str) -> str:
        """Return the setting of one of the sets in `val`."""
        return "data.val" if name == UNNAMED else f"data.val.{name}"

    def val_prefix(self, name: str) -> str:
        """Return what the names of the metrics of one of the sets in `val` begin with: "coco/", or nothing."""
        return "" if name == UNNAMED else f"{name}/"

    def describe_val(self) -> str:
        """Return the paths of the held-out pairs, with the names of the sets if they have some."""
        sets = [own.path if name == UNNAMED else f"{name} ({own.path})" for name, own in self.val.items()]
        return ", ".join(sets) or "none"

    def outside_training(self) -> "Data":
        """Return the settings for pairs outside of training: `val_fit`, if it is set, takes the place of `fit`."""
        return self if self.val_fit is None else dataclasses.replace(self, fit=self.val_fit)


@dataclass(frozen=True, config=CONFIG)
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
    crop: float = Field(
        default=0.5,
        gt=0,
        le=1,
    )
    flip: float = Field(
        default=0.5,
        ge=0,
        le=1,
    )
    operations: Int = Field(
        default=2,
        ge=0,
        le=10,
    )
    magnitude: float = Field(
        default=7.0,
        ge=0,
        le=10,
    )
    fill: float = Field(
        default=0.0,
        ge=0,
        le=1,
    )

    @property
    def smallest_crop(self) -> float | None:
        """Return `crop`, or None if images are not cropped at random."""
        return self.crop if self.enabled and self.crop < 1 else None


@dataclass(frozen=True, config=CONFIG)
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
    image_size: Int | None = Field(default=None, ge=8)
    image_normalization: Literal["clip", "imagenet"] | None = None
    max_length: Int | None = Field(default=None, ge=2)
    tokenizer: str | None = None
    pooling: Literal["first", "mean"] | None = None


@dataclass(frozen=True, config=CONFIG)
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
        matryoshka: Widths at which features are trained and evaluated, such as `[64, 128, 256]`: the first coordinates,
            with unit norm. All of them, `width`, are always included. By default only these.

    """

    x: ModelSide = dataclasses.field(default_factory=ModelSide)
    y: ModelSide = dataclasses.field(default_factory=ModelSide)
    shared: bool | None = None
    pretrained: str | None = None
    width: Int | None = Field(default=None, ge=1, le=2**20)
    standardize: bool = True
    matryoshka: Annotated[list[Annotated[Int, Field(ge=1)]], AfterValidator(_sort_widths)] = dataclasses.field(
        default_factory=list
    )


@dataclass(frozen=True, config=CONFIG)
class Objective:
    """The objective's name in the registry, and arguments of its constructor.

    Attributes:
        name: Name of the objective: a built-in one, or one that a plugin registers.
        options: Arguments of the constructor. Options of other objectives are allowed, so that one file serves
            `nuclr compare`; `arguments` leaves those out and fills in the defaults.

    """

    name: str = "nuclr"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read(cls, values: Any) -> Any:
        """Read the form of a YAML file, in which the options are next to the name, and check the options."""
        if not isinstance(values, dict):  # called in Python
            return values
        options = {key: value for key, value in values.items() if key != "name"}
        name = values.get("name", cls.name)
        try:
            objectives.entry(str(name))
        except ValueError as error:  # names the allowed ones
            raise UserError(f"objective.{error}") from None
        kinds = ChainMap(*(objectives.entry(known).kinds for known in objectives.names()))
        checked = _optional_keys(kinds)(**options)
        return {"name": name, "options": checked.model_dump(exclude_none=True)}

    def arguments(self) -> dict[str, Any]:
        """Return all arguments of this objective's constructor except `num_samples`."""
        return _with_defaults(objectives.options(self.name), self.options)

    def build(self, num_samples: int, views: Mapping[str, int] | None = None) -> objectives.Objective:
        """Return the objective with one row of state per pair or group of pairs, used or not.

        Args:
            num_samples: number of rows.
            views: {"y_views": m} if all m views of each y come at every visit, in the same order. If the objective
                stores popularity in a table, each view then has its own.

        Raises:
            UserError: if a value is out of bounds.

        """
        arguments = self.arguments()
        stores_views = getattr(objectives.entry(self.name).cls, "stores_views", False)
        if views and stores_views and arguments["popularity"] == "table":
            arguments["state"] = {**arguments["state"], **views}
        try:
            return objectives.build(
                self.name,
                num_samples=num_samples,
                **arguments,
            )
        except (ValueError, RuntimeError) as error:
            raise UserError(f"objective.{str(error).splitlines()[0]}") from None

    def restore(self, state: Mapping[str, Tensor]) -> objectives.Objective:
        """Return the objective, of the full width, with the state of a checkpoint, whatever its rows and views."""
        state = {name: table for name, table in state.items() if not name.startswith(NARROWER)}
        tables = {name: table for name, table in state.items() if "." not in name and table.ndim}
        views = {f"{name[-1]}_views": table.shape[1] for name, table in tables.items() if table.ndim == 2}
        rows = next((len(table) for table in tables.values()), 2)
        objective = self.build(rows, views)
        objective.load_state_dict(state)
        return objective


def _optional_keys(kinds: Mapping[str, Any]) -> type[pydantic.BaseModel]:
    """Return a schema in which every key may be missing; a mapping among the types is a section with such keys."""
    fields: dict[str, Any] = {}
    for key, kind in kinds.items():
        if isinstance(kind, Mapping):
            kind = _optional_keys(kind)
        elif str in typing.get_args(kind):
            kind = str
        fields[key] = ((Int if kind is int else kind) | None, None)
    return pydantic.create_model(
        "Options",
        __config__={**CONFIG, "allow_inf_nan": True},
        **fields,
    )


def _with_defaults(defaults: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults with the options of the same keys in their place, also in nested sections."""
    values = {}
    for key, default in defaults.items():
        value = options.get(key, default)
        is_section = isinstance(default, Mapping) and isinstance(value, Mapping)
        values[key] = _with_defaults(default, value) if is_section else value
    return values


@dataclass(frozen=True, config=CONFIG)
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

    lr: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.02, ge=0)
    beta1: float = Field(
        default=0.9,
        ge=0,
        le=0.999999,
    )
    beta2: float = Field(
        default=0.999,
        ge=0,
        le=0.999999,
    )
    eps: float = Field(default=1e-8, gt=0)
    clip: float = Field(default=0.0, ge=0)


@dataclass(frozen=True, config=CONFIG)
class Schedule:
    """Everything that changes over time, see `nuclr.training.schedules`.

    Attributes:
        epochs: Passes over the training pairs.
        warmup_steps: Steps in which the learning rate rises linearly from `lr_start` to `optimizer.lr`.
        lr_start: Learning rate of the first step of a warmup.
        lr_end: Learning rate at the end; after the warmup it falls along a cosine.
        zeta_frozen_epochs: Epochs at the start during which zeta is frozen. Default: a sixth of the epochs, rounded
            down, which is 5 of 30 as in the paper.
        zeta: Step size of zeta after that: constant, or falling to 0 along a cosine.
        zeta_steps: Also divide the step size of zeta by 10 after half and by 100 after three quarters of the epochs.
        zeta_refresh: Solve for zeta exactly on the current features every so many epochs; 0 for never.
        gamma: Constant, or a cosine from 1 down to `objective.gamma`.
        per_epoch: All of these change from epoch to epoch only, as in the published code, and not with every step. The
            warmup takes the first steps of the first epoch.

    """

    epochs: Int = Field(default=10, ge=1)
    warmup_steps: Int = Field(default=0, ge=0)
    lr_start: float = Field(default=1e-5, ge=0)
    lr_end: float = Field(default=0.0, ge=0)
    zeta_frozen_epochs: Int | None = Field(default=None, ge=0)
    zeta: Literal["constant", "cosine"] = "cosine"
    zeta_steps: bool = False
    zeta_refresh: Int = Field(default=0, ge=0)
    gamma: Literal["constant", "cosine"] = "constant"
    per_epoch: bool = False

    @property
    def frozen_epochs(self) -> int:
        """Epochs at the start during which zeta is frozen."""
        return self.epochs // 6 if self.zeta_frozen_epochs is None else self.zeta_frozen_epochs


@dataclass(frozen=True, config=CONFIG)
class Evaluate:
    """Evaluation on the held-out pairs.

    Attributes:
        every: Epochs between evaluations; 0 for only at the end.
        batch_size: Samples that are encoded at a time.
        head: Whether evaluation and `nuclr embed` include the projection heads; `false` takes the towers' features.

    """

    every: Int = Field(default=1, ge=0)
    batch_size: Int = Field(default=256, ge=1)
    head: bool = True


@dataclass(frozen=True, config=CONFIG)
class Log:
    """Logging. TensorBoard and W&B need `pip install 'nuclr[logging]'`.

    Attributes:
        every: Steps between lines of `metrics.jsonl`; there is at least one line per epoch.
        tensorboard: Also write events for TensorBoard.
        wandb: Also log to Weights & Biases. A resumed run continues the same W&B run.

    """

    every: Int = Field(default=50, ge=1)
    tensorboard: bool = False
    wandb: bool = False


@dataclass(frozen=True, config=CONFIG)
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
    seed: Int = Field(
        default=0,
        ge=0,
        le=2**31,
    )
    device: str = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    threads: Int = Field(
        default=0,
        ge=0,
        le=1024,
    )
    checkpoint_every: Int = Field(default=1000, ge=1)
    report: bool = True
    plugins: Annotated[tuple[str, ...], BeforeValidator(split_names)] = ()
    data: Data = dataclasses.field(default_factory=Data)
    augment: Augmentation = dataclasses.field(default_factory=Augmentation)
    model: Model = dataclasses.field(default_factory=Model)
    objective: Objective = dataclasses.field(default_factory=Objective)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    evaluate: Evaluate = dataclasses.field(default_factory=Evaluate)
    log: Log = dataclasses.field(default_factory=Log)


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


def content(settings: Settings) -> dict[str, Any]:
    """Return the settings that determine a run's result, as a flat dict without names, paths and machine settings.

    Values equal to the default are left out, so a setting added by a later version does not change any name.
    """
    defaults = dict(flatten(to_dict(Settings(objective=Objective(settings.objective.name)))))
    defaults["objective.name"] = Objective().name
    free = FREE_ON_RESUME | {"seed"}
    values = flatten(to_dict(settings))
    return {key: value for key, value in values if key not in free and defaults.get(key) != value}


def content_hash(settings: Settings) -> str:
    """Return the first eight digits of a hash of `content`."""
    return hashlib.sha256(json.dumps(content(settings), sort_keys=True).encode()).hexdigest()[:8]


def change(
    settings: Any,
    key: str,
    value: Any,
) -> Any:
    """Return settings with the value of one key, such as "data.x.key" or "objective.gamma", replaced."""
    name, _, rest = key.partition(".")
    if isinstance(settings, Objective) and name != "name":
        return dataclasses.replace(settings, options=put(settings.options, key, value))
    return dataclasses.replace(settings, **{name: change(getattr(settings, name), rest, value) if rest else value})


def put(
    values: Mapping[str, Any],
    key: str,
    value: Any,
) -> dict[str, Any]:
    """Return nested dicts with the value of one key, such as "data.train", added or replaced.

    Example:
        >>> put({"data": {"train": "a.csv"}}, "data.val", "b.csv")
        {'data': {'train': 'a.csv', 'val': 'b.csv'}}

    """
    name, _, rest = key.partition(".")
    if rest:
        section = values.get(name)
        value = put(section if isinstance(section, Mapping) else {}, rest, value)
    return {**values, name: value}
