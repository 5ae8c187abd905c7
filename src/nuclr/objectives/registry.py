"""The registry: one record per objective, from which everything else that lists objectives is derived.

To add an objective, write its class in one file and add one `register` call: at the end of this module, or in a file
of your own that the setting `plugins` names. The command line's settings, error messages, the comparison's grids and
ablations, and the colors of figures and pages are taken from the record and from the constructor's signature.
"""

import dataclasses
import difflib
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nuclr.objectives.authors import AuthorsNUCLR
from nuclr.objectives.base import Objective
from nuclr.objectives.clip import CLIP, CyCLIP
from nuclr.objectives.dcl import DCL
from nuclr.objectives.nuclr import NUCLR
from nuclr.objectives.siglip import SigLIP
from nuclr.objectives.sogclr import ISogCLR, SogCLR

# options of all objectives that are plain attributes
COMMON: dict[str, Any] = {"false_negative_margin": None, "margin_strategy": "absolute"}
LR_FACTOR = "lr_factor"
SAMPLES = "num_samples"


@dataclass(frozen=True)
class Entry:
    """What the program knows about one objective.

    Args:
        cls: the class; its constructor's arguments are the objective's options.
        label: the name that tables, figures and pages show.
        color: its color in figures and pages, "#rrggbb".
        tune: the option that a comparison tunes next to the temperature, and the values it tries. "lr_factor" stands
            for a factor on the learning rate, `optimizer.lr`.
        relative: whether the values of `tune` are factors on the config's own value of the option. For an option whose
            scale depends on the data, such as the step size of zeta.
        temperatures: the temperatures that a comparison tries, in order of preference, if those of contrastive
            softmax losses mean something else for this objective. None: the common ones.
        compare_to: names of objectives that it is compared with in addition to the baseline.
        ablations: label of an ablation -> the settings it changes, such as {"objective.zeta_lr": 0.0}.

    """

    cls: type[Objective]
    label: str
    color: str
    tune: tuple[str, tuple[Any, ...]]
    compare_to: tuple[str, ...] = ()
    ablations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    relative: bool = False
    temperatures: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        changed = {key for changes in self.ablations.values() for key in changes if key.startswith("objective.")}
        for option in (self.tune[0], *(key.removeprefix("objective.") for key in changed)):
            if option != LR_FACTOR:
                _check_option(_path(self.cls), option, self.flat_options, self.flat_options)
        for option, default in self.options.items():
            if default is inspect.Parameter.empty:
                raise ValueError(f"{_path(self.cls)}: the argument {option!r} needs a default value")

    @property
    def _defaults(self) -> dict[str, Any]:
        parameters = inspect.signature(self.cls).parameters
        return {name: parameter.default for name, parameter in parameters.items() if name != SAMPLES} | COMMON

    @property
    def options(self) -> dict[str, Any]:
        """The constructor's arguments without `num_samples`, and those of `COMMON`, with their defaults.

        A record is a dict of its fields.
        """
        return {
            name: dict(vars(default)) if dataclasses.is_dataclass(default) else default
            for name, default in self._defaults.items()
        }

    @property
    def kinds(self) -> dict[str, Any]:
        """The types of the options; a record is a dict with the types of its fields."""
        hints = typing.get_type_hints(Objective) | typing.get_type_hints(self.cls.__init__)
        return {
            name: typing.get_type_hints(type(default)) if dataclasses.is_dataclass(default) else hints.get(name, Any)
            for name, default in self._defaults.items()
        }

    @property
    def flat_options(self) -> dict[str, Any]:
        """The options with their defaults, in which a field of a record has a key such as "temperatures.rho"."""
        flat: dict[str, Any] = {}
        for name, default in self.options.items():
            if isinstance(default, dict):
                flat |= {f"{name}.{key}": value for key, value in default.items()}
            else:
                flat[name] = default
        return flat

    @property
    def needs_num_samples(self) -> bool:
        """Whether the objective keeps state per pair and must know the number of pairs."""
        return SAMPLES in inspect.signature(self.cls).parameters


_ENTRIES: dict[str, Entry] = {}


def register(name: str, cls: type[Objective], **record: Any) -> Entry:
    """Add an objective to the registry.

    Args:
        name: the name in settings and in `build`: lower-case letters, digits, "_" and "-".
        cls: a subclass of `Objective`. Every argument of its constructor but `num_samples` needs a default.
        **record: the other fields of `Entry`, of which `label`, `color` and `tune` are required.

    Returns:
        The new record. Registering the same class again replaces its record.

    Raises:
        ValueError: if the name belongs to another class, or an argument is not as described.

    Example:
        >>> from nuclr.objectives import CLIP, build, register
        >>> class SharpCLIP(CLIP):
        ...     def __init__(self, temperature: float = 0.01) -> None:
        ...         super().__init__(temperature)
        >>> entry = register("sharp", SharpCLIP, label="Sharp CLIP", color="#009E73", tune=("lr_factor", (1.0, 3.0)))
        >>> build("sharp").temperature
        0.01
        >>> unregister("sharp")

    """
    known = _ENTRIES.get(name)
    if known is not None and _path(known.cls) != _path(cls):  # a file may be imported twice
        raise ValueError(f"name {name!r} is already registered for {_path(known.cls)}, so {_path(cls)} needs another")
    _ENTRIES[name] = Entry(cls, **record)
    return _ENTRIES[name]


def unregister(name: str) -> None:
    """Remove an objective from the registry, as tests of plugins do.

    Args:
        name: a registered name.

    Raises:
        ValueError: if the name is not registered.

    """
    entry(name)
    del _ENTRIES[name]


def entry(name: str) -> Entry:
    """Return the record of an objective.

    Args:
        name: a registered name.

    Returns:
        Its record.

    Raises:
        ValueError: if the name is not registered; the message suggests the nearest name.

    Example:
        >>> entry("isogclr").label
        'iSogCLR'

    """
    if name not in _ENTRIES:
        raise ValueError(f"name must be one of {', '.join(_ENTRIES)}, but is {name!r}{_suggestion(name, _ENTRIES)}")
    return _ENTRIES[name]


def names() -> tuple[str, ...]:
    """Return the names of all objectives, in the order of tables.

    Returns:
        The names: those of this package, then those of plugins.

    Example:
        >>> names()[:3]
        ('clip', 'siglip', 'dcl')

    """
    return tuple(_ENTRIES)


def options(name: str) -> dict[str, Any]:
    """Return the options of an objective: its constructor's arguments without `num_samples`, and common options.

    Args:
        name: a registered name.

    Returns:
        Option -> default; that of a record is a dict with the defaults of its fields.

    Raises:
        ValueError: if the name is not registered.

    Example:
        >>> options("clip")["temperature"]
        0.05

    """
    return entry(name).options


def build(name: str, *, num_samples: int | None = None, **options: Any) -> Objective:
    """Build an objective by its name.

    Args:
        name: a registered name: "clip", "siglip", "dcl", "cyclip", "sogclr", "isogclr", "nuclr", "nuclr-authors" or a
            plugin's.
        num_samples: the number of pairs of the data set. Objectives with state need it, the others ignore it.
        **options: arguments of the constructor, such as `temperature`, and `false_negative_margin` and
            `margin_strategy`.

    Returns:
        The objective, in training mode.

    Raises:
        ValueError: if the name or an option is unknown, or a value is out of range.

    Example:
        >>> import torch
        >>> from torch.nn.functional import normalize
        >>> objective = build("nuclr", num_samples=100, temperature=0.05)
        >>> x, y = (normalize(torch.eye(4, 3) + 1, dim=1).requires_grad_() for _ in range(2))
        >>> out = objective(x, y, index=[7, 0, 99, 3])
        >>> out.loss.backward()

    """
    record = entry(name)
    for option in options:
        _check_option(name, option, record.options, record.flat_options)
    common = {option: options.pop(option) for option in COMMON if option in options}
    make: Callable[..., Objective] = record.cls
    if not record.needs_num_samples:
        objective = make(**options)
    elif num_samples is None:
        raise ValueError(f"{name} keeps state per pair and needs the number of pairs: build({name!r}, num_samples=...)")
    else:
        objective = make(num_samples=num_samples, **options)
    for option, value in common.items():
        setattr(objective, option, value)
    objective.check_settings()
    return objective


# What options and objectives are called in papers and by other libraries.
SYNONYMS = {
    "eta": "zeta_lr",
    "infonce": "clip",
    "mnrl": "clip",
    "scale": "temperature",
    "tau": "temperature",
    "zeta0": "zeta_init",
    "zeta_0": "zeta_init",
}


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _check_option(
    owner: str,
    option: str,
    allowed: Iterable[str],
    keys: Iterable[str],
) -> None:
    if option not in allowed:
        raise ValueError(
            f"{owner} has no option {option!r}; its options are {', '.join(allowed)}{_suggestion(option, keys)}"
        )


def _suggestion(word: str, keys: Iterable[str]) -> str:
    """Return a question with the key that is most like a word, such as "temperatures.rho" for "rho"."""
    by_last = {key.rpartition(".")[2]: key for key in keys}
    nearest = difflib.get_close_matches(SYNONYMS.get(word.lower(), word), by_last, n=1)
    return f"; did you mean {by_last[nearest[0]]!r}?" if nearest else ""


# Colors are Okabe and Ito's, which color-blind readers can distinguish, and two greys.
register(
    "clip",
    CLIP,
    label="CLIP",
    color="#222222",
    tune=("learn_temperature", (False, True)),
)
register(
    "siglip",
    SigLIP,
    label="SigLIP",
    color="#8A8A8A",
    tune=("bias", (-10.0, -5.0)),
    temperatures=(0.1, 0.05, 0.2, 0.02),  # 1 / the initial scale, which is then learnt
)
register(
    "dcl",
    DCL,
    label="DCL",
    color="#E69F00",
    tune=("tau_plus", (0.01, 0.1)),
)
register(
    "cyclip",
    CyCLIP,
    label="CyCLIP",
    color="#CC79A7",
    tune=("within", (0.25, 0.05)),
)
register(
    "sogclr",
    SogCLR,
    label="SogCLR",
    color="#D55E00",
    tune=(LR_FACTOR, (1.0, 3.0)),
)
register(
    "isogclr",
    ISogCLR,
    label="iSogCLR",
    color="#009E73",
    tune=("temperatures.rho", (8.0, 6.0)),
)
register(
    "nuclr",
    NUCLR,
    label="NUCLR",
    color="#0072B2",
    tune=("zeta_lr", (0.3, 0.1)),
    compare_to=("sogclr",),
    # The paper's ablations, which each remove one part of NUCLR, then ours.
    ablations={
        "zeta fixed": {"objective.zeta_lr": 0.0},
        "no xi (zeta in its place)": {"objective.use_xi": False},
        "no freezing": {"schedule.zeta_frozen_epochs": 0},
        "zeta_init 0": {"objective.zeta_init": 0.0},
        "zeta_init -0.05": {"objective.zeta_init": -0.05},
        "estimator paper": {"objective.zeta_estimator": "paper"},
        "gamma 0.3": {"objective.gamma": 0.3},
        "gamma 0.8": {"objective.gamma": 0.8},
    },
)
register(
    "nuclr-authors",
    AuthorsNUCLR,
    label="NUCLR (authors)",
    color="#56B4E9",
    tune=("zeta_lr", (1.0, 10.0)),
    relative=True,  # from 5e-6 on CC3M to 3e-2 on Flickr8k, see docs/reproduce.md
    compare_to=("sogclr",),
    ablations={
        "zeta fixed": {"objective.zeta_lr": 0.0},
        "no xi (zeta in its place)": {"objective.use_xi": False},
        "no freezing": {"schedule.zeta_frozen_epochs": 0},
        "zeta_init 0": {"objective.zeta_init": 0.0},
        "zeta_init -0.05": {"objective.zeta_init": -0.05},
        "xi_rule norm": {"objective.xi_rule": "norm"},
        "xi_rule max": {"objective.xi_rule": "max"},
        "estimator unbiased": {"objective.zeta_estimator": "unbiased"},
        "estimator paper": {"objective.zeta_estimator": "paper"},
        "gamma 0.3": {"objective.gamma": 0.3},
        "gamma 0.8": {"objective.gamma": 0.8},
    },
)
