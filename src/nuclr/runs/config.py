"""Settings from YAML and key=value. Unknown keys and impossible values are refused; the message says what is allowed.

>>> settings = load(overrides=["data.train=pairs.csv", "objective.name=sogclr", "seed=1"])
>>> settings.objective.name, settings.seed, settings.data.batch_size
('sogclr', 1, 128)
"""

import dataclasses
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from nuclr import objectives
from nuclr.errors import UserError
from nuclr.files import read_text
from nuclr.runs.settings import Objective, Settings, change, flatten, put, split_names, to_dict

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument", "invalid_key")
# Where pydantic's words would not help somebody who writes YAML.
_ALLOWED = {
    "bool_parsing": "it should be true or false",
    "bool_type": "it should be true or false",
    "dataclass_type": "it should be a section with keys",
    "model_type": "it should be a section with keys",
    "string_type": "it should be a text",
    "string_pattern_mismatch": "a name has letters, digits, - and _, such as coco or flickr30k",
}

_LARGEST = 100_000  # bytes of a config file; PyYAML needs seconds for 300 kB


def load(
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    strict: bool = True,
) -> Settings:
    """Return settings from a YAML file and overrides.

    Args:
        source: a YAML file, or its content as nested dicts. By default all settings have their defaults.
        overrides: texts "section.key=value"; they take precedence over the file.
        strict: refuse overrides of options that the chosen objective does not have. `nuclr compare` sets it to False,
            since an option may belong to any of the compared objectives.

    Raises:
        UserError: an unknown key, a value of the wrong type or out of bounds, a file that cannot be read.

    """
    from nuclr.data.opening import is_image_folder

    values = read(Path(source)) if isinstance(source, str | Path) else dict(source or {})
    changes = dict(split_override(text) for text in overrides)
    load_plugins(values.get("plugins"))
    load_plugins(changes.get("plugins"))
    if isinstance(source, str | Path):
        parse(values, f"{source}: ")  # first alone, so that a message about the file names it
    values = _without_own_hyperparameter(values, changes.get("objective.name"))
    for key, value in changes.items():
        values = put(values, key, value)
    settings = parse(values)
    if settings.out and "name" not in values:
        settings = dataclasses.replace(settings, name=Path(settings.out).name or settings.name)
    if settings.data.contrast is None and settings.data.train is not None:
        contrast = "views" if is_image_folder(settings.data.train, settings.data.root) else "sides"
        settings = change(settings, "data.contrast", contrast)
    check(settings, [key for key, value in changes.items() if value is not None] if strict else [])
    return settings


def _without_own_hyperparameter(values: dict[str, Any], name: str | None) -> dict[str, Any]:
    """Return the values of a file for another objective: what a file tunes for its own has another unit there.

    The step of zeta is an example: that of `nuclr-authors` depends on the data, and that of `nuclr` is in units of tau.
    """
    section = values.get("objective")
    if not isinstance(section, dict):
        return values
    own = section.get("name", Objective.name)
    if name in (None, own) or own not in objectives.names():
        return values
    option, _ = objectives.entry(own).tune
    return values | {"objective": {key: value for key, value in section.items() if key != option}}


def parse(values: Mapping[str, Any], origin: str = "") -> Settings:
    """Return settings from nested dicts; `origin` starts the message of an error, such as "my.yaml: "."""
    try:
        return pydantic.TypeAdapter(Settings).validate_python(values)
    except pydantic.ValidationError as error:
        raise user_error(error, origin, list(all_keys())) from None


def to_yaml(settings: Settings) -> str:
    """Return the settings as YAML text, such as a run's config.yaml."""
    return yaml.safe_dump(
        to_dict(settings),
        sort_keys=False,
        allow_unicode=True,
    )


# -- messages ----------------------------------------------------------------------------------------------------------


def user_error(
    error: pydantic.ValidationError,
    origin: str,
    known: Sequence[str],
    prefix: Sequence[str] = (),
) -> UserError:
    """Return the first of pydantic's errors as one line with the full key, the value and what is allowed.

    Args:
        error: what pydantic raised.
        origin: starts the message, such as "my.yaml: ".
        known: all keys, to suggest one in place of an unknown one.
        prefix: the parts of the key before those in the error.

    """
    # An unknown key is often the reason why another one is missing.
    first = min(error.errors(), key=lambda one: one["type"] not in _UNKNOWN)
    inner = first.get("ctx", {}).get("error")
    parts = [*prefix, *(str(part) for part in first["loc"] if part != "[key]")]  # that of the key of a mapping
    if isinstance(inner, pydantic.ValidationError):
        return user_error(inner, origin, known, parts)
    if isinstance(inner, UserError):  # names the key itself
        return UserError(f"{origin}{inner}")
    key = ".".join(parts)
    value = first["input"]
    if first["type"] == "missing":
        return UserError(f"{origin}{key} is missing")
    if first["type"] in _UNKNOWN:
        if isinstance(value, dict) and value:  # name the whole key, so that the nearest one can be found
            key = next(flatten(value, f"{key}."))[0]
        near = nearest_key(key, known)
        sections = dict.fromkeys(name.partition(".")[0] for name in known)
        fix = f"did you mean {near}?" if near else f"known keys and sections: {', '.join(sections)}"
        return UserError(f"{origin}unknown key {show(key)}; {fix}")
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return UserError(f"{origin}{key} is {show(value)}; {_ALLOWED.get(first['type'], message)}")


def show(value: Any) -> str:
    """Return `repr(value)`, shortened."""
    try:
        return repr(value)[:200]
    except ValueError:  # a number of thousands of digits
        return f"a huge {type(value).__name__}"


def all_keys() -> Iterator[str]:
    """Yield every key, such as "data.train" and "objective.gamma"."""
    yield from (key for key, _ in flatten(dataclasses.asdict(Settings())))
    options = (objectives.options(name) for name in objectives.names())
    yield from dict.fromkeys(f"objective.{key}" for own in options for key, _ in flatten(own))


def nearest_key(key: str, known: Sequence[str] | None = None) -> str | None:
    """Return the known key that is most like an unknown one, such as "optimizer.lr" for "lr"; None if none is."""
    known = list(all_keys()) if known is None else known
    by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
    last = difflib.get_close_matches(key.rpartition(".")[2], by_last, n=1)
    near = difflib.get_close_matches(
        key,
        known,
        n=1,
        cutoff=0.75,
    )
    return next(iter([*near, *(by_last[name] for name in last)]), None)


# -- reading -----------------------------------------------------------------------------------------------------------


class UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a repeated key, of which YAML would keep the last one, and references.

    References are refused because a few of them, nested, expand to billions of values.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node; a reference raises an error with its line."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="references (*) are not allowed; write the value out", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping, or raise an error with the line of a repeated key."""
        seen = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


# What PyYAML raises for files that are not YAML: its own errors, and those of Python for impossible dates, numbers of
# thousands of digits, keys that are lists, and brackets nested thousands deep.
NOT_YAML = (yaml.YAMLError, ValueError, TypeError, LookupError, OverflowError, RecursionError, AttributeError)


def read(path: Path) -> dict[str, Any]:
    """Return the keys and values in a YAML file, which is untrusted.

    Raises:
        UserError: if it is missing, too large, not YAML, or does not hold keys and values.

    """
    from nuclr.data.opening import is_pairs

    hint = f"to train on it, write data.train={path}"
    # A line of JSON is YAML, too. Its keys must not be taken for settings.
    if path.is_dir() or is_pairs(str(path)) or (path.is_file() and path.stat().st_size > _LARGEST):
        kinds = f"a config file (YAML, at most {_LARGEST:,} bytes) nor a run (a folder with a config.yaml)"
        raise UserError(f"{path}: neither {kinds}; {hint}")
    text = read_text(path)
    try:
        content = yaml.load(text, UniqueKeyLoader)
    except NOT_YAML as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).partition("\n")[0][:200] or type(error).__name__
        raise UserError(f"{path}{line}: not valid YAML ({reason}); {hint}") from None
    if not isinstance(content, dict | None):
        raise UserError(f"{path}: holds a {type(content).__name__}; it needs keys and values, such as 'name: mine'")
    return {key: value for key, value in (content or {}).items() if value is not None}


def split_override(text: str) -> tuple[str, Any]:
    """Return ("a.b", 1) for "a.b=1"."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"{text!r}: settings are written key=value without spaces, such as optimizer.lr=0.001")
    try:
        return key.strip(), yaml.safe_load(value) if value.strip() else None
    except NOT_YAML:
        return key.strip(), value


def load_plugins(names: Any) -> None:
    """Import Python files (`.py`) or modules, each once; they may register objectives, modalities, encoders, ...

    Args:
        names: the setting `plugins`, which is not yet checked; anything but names is refused later.

    """
    names = split_names(names)
    for name in names if isinstance(names, list | tuple) else ():
        try:
            _import_plugin(str(name))
        except Exception as error:
            raise UserError(f"plugins: {name} cannot be imported ({type(error).__name__}: {error})") from None


def _import_plugin(name: str) -> None:
    if not name.endswith(".py"):
        importlib.import_module(name)
        return
    path = Path(name).resolve()
    module_name = f"nuclr_plugin_{path.stem}_{abs(hash(str(path))):x}"
    if module_name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise


# -- checks that involve several values --------------------------------------------------------------------------------


def check(settings: Settings, overridden: Sequence[str] = ()) -> None:
    """Refuse missing keys, options that the objective does not have, and combinations that cannot work."""
    if settings.data.train is None:
        raise UserError(
            "data.train is missing; name the pairs to train on, such as data.train=pairs.csv data.val=held_out.csv "
            "(nuclr demo trains on built-in pairs)"
        )
    name = settings.objective.name
    allowed = objectives.options(name)
    for key in overridden:
        section, _, option = key.partition(".")
        if section == "objective" and option != "name" and option.partition(".")[0] not in allowed:
            raise UserError(f"{key}: {name} has no such option; its options are {', '.join(allowed)}")
    placement = settings.objective.options.get("state", {})
    for key in ("x_views", "y_views"):
        if placement.get(key, 1) != 1:
            raise UserError(f"objective.state.{key} follows from data.{key[0]}.views in a run; leave it out")
    for key in ("num_x", "num_y"):
        if placement.get(key) is not None:
            raise UserError(f"objective.state.{key}: a run has tables per pair; leave it out")
    settings.objective.build(num_samples=2)
    schedule = settings.schedule
    if schedule.frozen_epochs > schedule.epochs:
        raise UserError(
            f"schedule.zeta_frozen_epochs is {schedule.frozen_epochs}, more than schedule.epochs, which is "
            f"{schedule.epochs}; add schedule.zeta_frozen_epochs=0"
        )
    if settings.model.matryoshka and not settings.evaluate.head:
        raise UserError(
            "model.matryoshka shortens the features of the heads, but evaluate.head is false; leave one out"
        )
    if settings.data.contrasts_views and settings.data.val:
        raise UserError("data.val is not used with data.contrast=views; leave it out, and set data.classes to evaluate")
    if settings.data.contrasts_views and not settings.augment.enabled:
        raise UserError(
            "data.contrast=views needs augmentation, or all views of an image are equal; set augment.enabled=true"
        )
