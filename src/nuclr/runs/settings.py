"""All that can be set for a run, with types, bounds and defaults. `nuclr.runs.config` fills it from YAML and key=value."""

import inspect
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


def number(
    default: float | int | None, low: float = -math.inf, high: float = math.inf, *, above: float = -math.inf
) -> Any:
    """A field whose value must lie in [low, high] and above `above`."""
    return field(default=default, metadata={"low": low, "high": high, "above": above})


@dataclass(frozen=True)
class Data:
    """Which pairs. Names are relative to `root` where they are found there.

    train, val: see `nuclr.data.open_pairs`; val may be left out. classes: a folder of labeled images for zero-shot
    classification, or "builtin". keep: a list of pairs' numbers to train on. one_caption_per_image: an epoch has every
    image once, not every pair. mask: pairs that share an image or a caption are no negatives of each other.
    batch_size: of all processes together. memory: megabytes that decoded images may take to be decoded only once.
    """

    train: str | None = None
    val: str | None = None
    classes: str | None = None
    root: str | None = None
    image_key: str | None = None
    caption_key: str | None = None
    split: str | None = None
    val_split: str | None = None
    keep: str | None = None
    one_caption_per_image: bool = False
    mask: bool = True
    batch_size: int = number(128, 2)
    fit: Literal["crop", "squash"] = "crop"
    max_bad_share: float = number(0.05, 0, 1)
    workers: int = number(2, 1, 256)
    memory: int = number(512, 0)


@dataclass(frozen=True)
class Augmentation:
    """See `nuclr.data.modalities.augment.Augment`; `crop` is the least share of an image's area that a crop keeps."""

    enabled: bool = True
    crop: float = number(0.5, above=0, high=1)
    flip: float = number(0.5, 0, 1)
    operations: int = number(2, 0, 10)
    magnitude: float = number(7.0, 0, 10)


@dataclass(frozen=True)
class Model:
    """Arguments of `nuclr.models.build_model`; `standardize` centers and scales vectors by the training set's."""

    image: str | None = None
    text: str | None = None
    pretrained: str | None = None
    width: int | None = number(None, 1)
    image_head: Literal["linear", "mlp", "none"] = "linear"
    text_head: Literal["linear", "mlp", "none"] = "linear"
    image_frozen: bool = False
    text_frozen: bool = False
    image_size: int | None = number(None, 8)
    max_length: int | None = number(None, 2)
    tokenizer: str | None = None
    standardize: bool = True


@dataclass(frozen=True)
class Objective:
    """`name` and the arguments of its class in `nuclr.objectives`; those left out have the class's defaults."""

    name: Literal["clip", "siglip", "dcl", "cyclip", "sogclr", "isogclr", "nuclr"] = "nuclr"
    temperature: float | None = number(None, above=0)
    learn_temperature: bool | None = None
    bias: float | None = number(None)
    tau_plus: float | None = number(None, 0, 1)
    cross: float | None = number(None, 0)
    within: float | None = number(None, 0)
    gamma: float | None = number(None, above=0, high=1)
    rho: float | None = number(None)
    tau_lr: float | None = number(None, 0)
    tau_beta: float | None = number(None, 0, 1)
    tau_min: float | None = number(None, above=0)
    tau_max: float | None = number(None, above=0)
    zeta_init: float | None = number(None)
    xi_init: float | None = number(None)
    xi_rule: Literal["norm", "max"] | None = None
    use_xi: bool | None = None
    zeta_lr: float | None = number(None, 0)
    zeta_lr_ratio_x: float | None = number(None, 0)
    zeta_momentum: float | None = number(None, 0, 1)
    zeta_estimator: Literal["reference", "unbiased", "paper"] | None = None
    state_device: str | None = None
    normalize: bool | None = None


@dataclass(frozen=True)
class Optimizer:
    """AdamW; `clip` is the largest norm of the whole gradient, 0 for no limit."""

    lr: float = number(1e-3, above=0)
    weight_decay: float = number(0.02, 0)
    beta1: float = number(0.9, 0, 0.999999)
    beta2: float = number(0.999, 0, 0.999999)
    eps: float = number(1e-8, above=0)
    clip: float = number(0.0, 0)


@dataclass(frozen=True)
class Schedule:
    """What changes with time, see `nuclr.training.schedules`.

    The learning rate rises from lr_start over warmup_steps and falls to lr_end by a cosine. zeta rests for
    zeta_frozen_epochs; its step then is constant or falls by a cosine to 0, and zeta_steps divides it besides by 10
    from half and by 100 from three quarters of the epochs on. zeta_refresh: every so many epochs zeta is solved for
    exactly on the current features (0: never). gamma: constant, or by a cosine from 1 down to objective.gamma.
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


@dataclass(frozen=True)
class Evaluate:
    """On the held-out pairs every so many epochs and at the end; 0: only at the end."""

    every: int = number(1, 0)
    batch_size: int = number(256, 1)


@dataclass(frozen=True)
class Log:
    """`every`: steps between lines of metrics.jsonl; the others need the packages of that name."""

    every: int = number(50, 1)
    tensorboard: bool = False
    wandb: bool = False


@dataclass(frozen=True)
class Settings:
    """A run. `out`: its folder, by default runs/NAME; `checkpoint_every`: steps, besides the end of every epoch.

    report: write report.html at the end.
    """

    name: str = "run"
    out: str | None = None
    seed: int = number(0, 0, 2**31)
    device: str = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    threads: int = number(0, 0, 1024)
    checkpoint_every: int = number(1000, 1)
    report: bool = True
    data: Data = field(default_factory=Data)
    augment: Augmentation = field(default_factory=Augmentation)
    model: Model = field(default_factory=Model)
    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    evaluate: Evaluate = field(default_factory=Evaluate)
    log: Log = field(default_factory=Log)


def objective_keys(name: str) -> list[str]:
    """Options of an objective besides its name."""
    from nuclr.objectives import OBJECTIVES

    return [key for key in inspect.signature(OBJECTIVES[name]).parameters if key != "num_samples"]


def objective_options(objective: Objective) -> dict[str, Any]:
    """Arguments for the chosen objective: those that were given and that it takes."""
    values = asdict(objective)
    return {key: values[key] for key in objective_keys(objective.name) if values[key] is not None}


def to_dict(settings: Settings) -> dict[str, Any]:
    """The resolved settings, without options that the objective does not take."""
    objective = settings.objective
    return {**asdict(settings), "objective": {"name": objective.name, **objective_options(objective)}}
