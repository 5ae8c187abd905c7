"""Settings from YAML and key=value. Unknown keys and impossible values are refused; the message says what is allowed.

>>> settings = load(overrides=["data.train=pairs.csv", "objective.name=sogclr", "seed=1"])
>>> settings.objective.name, settings.seed, settings.data.batch_size
('sogclr', 1, 128)
"""

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import math
import re
import reprlib
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from nuclr import objectives
from nuclr.errors import UserError
from nuclr.files import read_text, refuse_large_config
from nuclr.runs.settings import Objective, Settings, flatten, to_dict

# The settings of `nuclr train` without a file and without data, so that it also works from a wheel. configs/demo.yaml
# is the same.
DEMO: dict[str, Any] = {
    "name": "demo",
    "data": {
        "train": "builtin:n=4000,shapes=2",
        "val": "builtin:n=2000,shapes=2,split=test",
        "batch_size": 16,
    },
    "augment": {"enabled": False},
    "model": {
        "x": {"encoder": "tiny_edges", "head": "mlp", "frozen": True},
        "y": {"encoder": "bag_of_words"},
        "width": 128,
    },
    "objective": {"name": "nuclr", "temperature": 0.15, "gamma": 0.8, "zeta_lr": 3.0e-3},
    "schedule": {"epochs": 8, "warmup_steps": 50, "zeta_frozen_epochs": 2},
    "evaluate": {"every": 4},
}


_REPLACED = {
    "data.views": "data.x.views and data.y.views are the numbers of views per side, and data.contrast=views contrasts "
    "views of each image (the default for a folder of images)",
}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxother = 2, 8, 8, 200, 200


def load(path: str | Path | None = None, overrides: Sequence[str] = (), strict: bool = True) -> Settings:
    """Return settings from a YAML file and overrides.

    Args:
        path: a YAML file. None: the defaults if an override names `data.train`, otherwise the demo's settings.
        overrides: texts "section.key=value"; they take precedence over the file.
        strict: refuse overrides of options that the chosen objective does not have. `nuclr compare` sets it to False,
            since an option may belong to any of the compared objectives.

    Raises:
        UserError: an unknown key, a value of the wrong type or out of bounds, a file that cannot be read.

    """
    changes = [split_override(text) for text in overrides]
    if path is not None:
        values, origin = read(Path(path)), f"{path}: "
    elif any(key == "data.train" for key, _ in changes):
        values, origin = {}, ""
    else:
        values, origin = DEMO, ""
    for names in [values.get("plugins"), *(value for key, value in changes if key == "plugins")]:
        load_plugins(_texts(names) or ())
    settings = fill(Settings(), values, origin)
    for key, value in changes:
        if key == "data.val":  # replaces all sets; data.val.NAME=... changes one
            settings = fill(settings, nest(key, None))
        settings = fill(settings, nest(key, value))
    if settings.out and not any("name" in given for given in (values, dict(changes))):
        settings = dataclasses.replace(settings, name=Path(settings.out).name or settings.name)
    settings = _infer_contrast(settings)
    check(settings, [key for key, value in changes if value is not None] if strict else [])
    return settings


def from_dict(values: Mapping[str, Any], source: str = "settings") -> Settings:
    """Return the settings that `to_dict` turned into `values`; plugins are imported first."""
    load_plugins(_texts(values.get("plugins")) or ())
    settings: Settings = fill(Settings(), values, f"{source}: ")
    return settings


# -- reading -----------------------------------------------------------------------------------------------------------


class UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a repeated key; YAML would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping, or raise an error with the line of a repeated key."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, dict | list | set):
                raise yaml.MarkedYAMLError(problem="a key must be a text", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


# What PyYAML raises for files that are not YAML: its own errors, and those of Python for impossible dates, numbers of
# thousands of digits, keys that are lists, and brackets nested thousands deep.
NOT_YAML = (yaml.YAMLError, ValueError, TypeError, LookupError, OverflowError, RecursionError, AttributeError)


def describe_yaml_error(error: BaseException) -> str:
    """Return a YAML error in one line."""
    if isinstance(error, RecursionError):
        return "brackets nested too deep"
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__


def read(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file with keys and values."""
    from nuclr.data.open import is_pairs

    # A line of JSON is YAML, too. Its keys must not be taken for settings.
    pairs = UserError(f"{path}: not a config file; to train on it, write data.train={path}")
    if is_pairs(str(path)):
        raise pairs
    if path.is_dir():
        config = path / "config.yaml"
        hint = f"name {config}" if config.is_file() else f"to train on pairs in it, write data.train={path}"
        raise UserError(f"{path}: a folder, not a config file; {hint}")
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise UserError(f"{path}: no such config file{hint}")
    refuse_large_config(path)
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    try:
        content = yaml.load(read_text(path), UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: not valid YAML ({error.problem})") if is_yaml else pairs from None
    except UserError as error:
        raise error if is_yaml else pairs from None
    except NOT_YAML as error:
        raise UserError(f"{path}: not valid YAML ({describe_yaml_error(error)})") if is_yaml else pairs from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        if not is_yaml:
            raise pairs
        raise UserError(f"{path}: holds a {type(content).__name__}; it needs keys and values, such as 'name: mine'")
    return content


def split_override(text: str) -> tuple[str, Any]:
    """Return ("a.b", 1) for "a.b=1"."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        hint = f"data.train={text}" if Path(text).exists() else "optimizer.lr=0.001"
        raise UserError(f"{text!r} is not an override; overrides are key=value without spaces, such as {hint}")
    try:
        return key.strip(), yaml.safe_load(value) if value.strip() else None
    except NOT_YAML:
        return key.strip(), value


def nest(key: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": 1}} for "a.b" and 1."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def load_plugins(names: Sequence[str]) -> None:
    """Import Python files (`.py`) or modules, each once; they may register objectives, modalities, encoders, ..."""
    for name in names:
        try:
            if not name.endswith(".py"):
                importlib.import_module(name)
                continue
            path = Path(name).resolve()
            module_name = f"nuclr_plugin_{path.stem}_{abs(hash(str(path))):x}"
            if module_name in sys.modules:
                continue
            spec = importlib.util.spec_from_file_location(module_name, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[module_name]
                raise
        except Exception as error:
            raise UserError(f"plugins: {name} cannot be imported ({type(error).__name__}: {error})") from None


# -- values ------------------------------------------------------------------------------------------------------------


def fill(settings: Any, values: Any, origin: str = "", prefix: str = "") -> Any:
    """Return `settings` with `values` filled in.

    Args:
        settings: a dataclass of settings.
        values: its new values, nested dicts for sections.
        origin: put in front of error messages, such as "my.yaml: ". Overrides do not need one.
        prefix: of the keys in error messages, such as "data.".

    """
    kinds = typing.get_type_hints(type(settings))
    changes = {}
    for key, value in values.items():
        full = f"{prefix}{key}"
        if key not in kinds:
            if isinstance(value, dict) and value:  # name the whole key, so that the nearest one can be found
                full = next(flatten(value, f"{full}."))[0]
            raise UserError(f"{origin}unknown key {_show(full)}; {_REPLACED.get(full) or _suggest(full)}")
        if dataclasses.is_dataclass(kinds[key]):
            if value is None:
                continue
            if not isinstance(value, dict):
                keys = ", ".join(_keys_of(kinds[key]))
                raise UserError(f"{origin}{full} is a section, not a value; its keys are {keys}")
            section = getattr(settings, key)
            into = _fill_objective if isinstance(section, Objective) else fill
            changes[key] = into(section, value, origin, f"{full}.")
        elif isinstance(value, dict) and (kind := _kind_of_named(kinds[key])) is not None:
            changes[key] = _fill_named(getattr(settings, key), value, kind, origin, full)
        else:
            bounds = next(f.metadata for f in dataclasses.fields(settings) if f.name == key)
            changes[key] = convert(value, kinds[key], bounds, full, origin)
    return dataclasses.replace(settings, **changes)


def _kind_of_named(kind: Any) -> Any:
    """Return the dataclass of the values if a setting may be a mapping from names to them, otherwise None."""
    mappings = [option for option in typing.get_args(kind) if typing.get_origin(option) is Mapping]
    return typing.get_args(mappings[0])[1] if mappings else None


def _fill_named(current: Any, values: dict[Any, Any], kind: Any, origin: str, full: str) -> dict[str, Any] | None:
    """Return the named entries of a setting with `values` filled in; a text is the path of an entry."""
    if isinstance(current, str):
        raise UserError(
            f"{origin}{full} is one path, {current}; for several sets name all of them: {full}={{NAME: PATH, ...}}"
        )
    entries = dict(current or {})
    for name, value in values.items():
        key = f"{full}.{name}"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserError(
                f"{origin}{full}: {_show(name)} is not a name; use letters, digits, - and _, such as coco or flickr30k"
            )
        if value is None:
            entries.pop(name, None)
            continue
        content = value if isinstance(value, dict) else {"path": value}
        keys = _keys_of(kind)
        if unknown := [inner for inner in content if inner not in keys]:
            raise UserError(f"{origin}unknown key {key}.{unknown[0]}; the keys of a set are {', '.join(keys)}")
        entries[name] = fill(entries.get(name, kind()), content, origin, f"{key}.")
        if entries[name].path is None:
            raise UserError(f"{origin}{key}.path is missing; name the pairs of this set, such as {key}=pairs.jsonl")
    return entries or None


def _fill_objective(section: Objective, values: dict[str, Any], origin: str, prefix: str) -> Objective:
    kinds = _objective_kinds()
    options = dict(section.options)
    for key, value in values.items():
        full = f"{prefix}{key}"
        if key == "name":
            name = convert(value, Literal[objectives.names()], {}, full, origin)
            section = dataclasses.replace(section, name=name)
        elif key not in kinds:
            raise UserError(f"{origin}unknown key {_show(full)}; {_suggest(full)}")
        elif value is None:
            options.pop(key, None)
        else:
            options[key] = convert(value, kinds[key], {}, full, origin)
    return dataclasses.replace(section, options=options)


def _objective_kinds() -> dict[str, Any]:
    """Return the types of all registered objectives' options, from the constructors' signatures."""
    kinds: dict[str, Any] = {}
    for name in objectives.names():
        signature = inspect.signature(objectives.entry(name).cls, eval_str=True)
        for key in objectives.options(name):
            kinds.setdefault(key, signature.parameters[key].annotation)
    return kinds


def convert(value: Any, kind: Any, bounds: Any, key: str, origin: str) -> Any:
    """Return a value as its type and within its bounds; numbers may be texts, since YAML reads 1e-3 as text."""
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    options = typing.get_args(kind) if is_union else (kind,)
    if value is None:
        if type(None) in options:
            return None
        raise UserError(f"{origin}{key} has no value; it needs {_describe(options, bounds)}")
    target = next(option for option in options if option is not type(None))
    failed = UserError(f"{origin}{key} is {_show(value)}; it needs {_describe(options, bounds)}")
    if typing.get_origin(target) is Literal:
        choices = typing.get_args(target)
        if value not in choices:
            near = difflib.get_close_matches(_show(value).strip("'"), choices, n=1)
            raise UserError(f"{failed}{f'; did you mean {near[0]}?' if near else ''}")
        return value
    if target is bool:
        if not isinstance(value, bool):
            raise failed
        return value
    if typing.get_origin(target) is tuple:
        texts = _texts(value)
        if texts is None:
            raise failed
        return texts
    if target is str or target not in (int, float):
        if isinstance(value, dict | list):
            raise failed
        return str(value)
    try:
        number = float(value) if not isinstance(value, bool | dict | list) else math.nan
    except (ValueError, TypeError, OverflowError):
        raise failed from None
    if math.isnan(number) or (target is int and not number.is_integer()):
        raise failed
    if bounds and not (bounds["low"] <= number <= bounds["high"] and number > bounds["above"]):
        raise failed
    return int(value if isinstance(value, int) else number) if target is int else number


def _show(value: Any) -> str:
    """Return `repr(value)`, shortened: references in YAML can make a short file a huge value."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # a number of thousands of digits
        return f"a huge {type(value).__name__}"


def _texts(value: Any) -> tuple[str, ...] | None:
    """Return a list of texts, or comma-separated ones, as a tuple; None if the value is neither."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return tuple(value)
    return None


def _describe(options: tuple[Any, ...], bounds: Any) -> str:
    target = next(option for option in options if option is not type(None))
    if typing.get_origin(target) is Literal:
        return "one of " + ", ".join(typing.get_args(target))
    if typing.get_origin(target) is tuple:
        return "a list of names"
    if any(typing.get_origin(option) is Mapping for option in options):
        return "a path, or names and paths of several sets, such as {coco: PATH, flickr30k: PATH}"
    text = {bool: "true or false", int: "a whole number", float: "a number"}.get(target, "a text")
    if bounds:
        limits = {name: f"{int(v) if float(v).is_integer() else v}" for name, v in bounds.items() if math.isfinite(v)}
        words = {"above": "above", "low": "at least", "high": "at most"}
        parts = [f"{word} {limits[name]}" for name, word in words.items() if name in limits]
        text += " " + " and ".join(parts) if parts else ""
    return text


# -- checks that involve several values --------------------------------------------------------------------------------


def check(settings: Settings, overridden: Sequence[str] = ()) -> None:
    """Refuse missing keys, options that the objective does not have, and combinations that cannot work."""
    if settings.data.train is None:
        raise UserError("data.train is missing; name the pairs to train on, such as data.train=train.jsonl or builtin")
    name, allowed = settings.objective.name, objectives.options(settings.objective.name)
    for key in overridden:
        section, _, option = key.partition(".")
        if section == "objective" and option != "name" and option not in allowed:
            raise UserError(f"{key}: {name} has no such option; its options are {', '.join(allowed)}")
    try:
        objectives.build(name, num_samples=2, **settings.objective.arguments())
    except (ValueError, RuntimeError) as error:
        raise UserError(f"objective.{str(error).splitlines()[0]}") from None
    if settings.schedule.zeta_frozen_epochs > settings.schedule.epochs:
        frozen, epochs = settings.schedule.zeta_frozen_epochs, settings.schedule.epochs
        raise UserError(
            f"schedule.zeta_frozen_epochs is {frozen}, more than schedule.epochs, which is {epochs}; "
            "add schedule.zeta_frozen_epochs=0"
        )
    _check_views(settings)
    if settings.model.pretrained and (settings.model.x.encoder or settings.model.y.encoder):
        raise UserError("model.pretrained is a whole dual encoder; leave out model.x.encoder and model.y.encoder")
    if settings.model.pretrained:
        for side in ("x", "y"):
            options = getattr(settings.model, side)
            for key, default in (
                ("head", "linear"),
                ("tokenizer", None),
                ("pooling", None),
                ("image_normalization", None),
            ):
                if getattr(options, key) != default:
                    raise UserError(
                        "model.pretrained has its own heads, tokenizer, pooling and normalization of pixels; leave out "
                        f"model.{side}.{key}"
                    )


def _infer_contrast(settings: Settings) -> Settings:
    """Return the settings with `data.contrast`, whose default depends on what `data.train` is."""
    from nuclr.data.open import is_image_folder

    data = settings.data
    if data.contrast is not None or data.train is None:
        return settings
    contrast: Literal["sides", "views"] = "views" if is_image_folder(data.train, data.root) else "sides"
    return dataclasses.replace(settings, data=dataclasses.replace(data, contrast=contrast))


def _check_views(settings: Settings) -> None:
    data = settings.data
    if not data.contrasts_views:
        return
    for key, value in (("data.y.key", data.y.key), ("data.y.modality", data.y.modality)):
        if value is not None:
            raise UserError(f"data.contrast=views contrasts the images of side x with themselves; leave out {key}")
    if data.val is not None:
        raise UserError("data.val is not used with data.contrast=views; leave it out, and set data.classes to evaluate")
    if not settings.augment.enabled:
        raise UserError(
            "data.contrast=views needs augmentation, or all views of an image are equal; set augment.enabled=true"
        )


def _keys_of(kind: Any) -> list[str]:
    if kind is Objective:
        return ["name", *_objective_kinds()]
    return [field.name for field in dataclasses.fields(kind)]


def all_keys(kind: Any = Settings, prefix: str = "") -> Iterator[str]:
    """Yield every key, such as "data.train"."""
    if kind is Objective:
        yield from (f"{prefix}{key}" for key in _keys_of(kind))
        return
    for key, inner in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(inner):
            yield from all_keys(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _suggest(key: str) -> str:
    """Return a hint for an unknown key: the nearest key, or the sections if none is near."""
    if key.endswith("_key"):
        return "data.x.key and data.y.key name the columns of both sides"
    near = nearest_key(key)
    return f"known sections: {', '.join(_keys_of(Settings))}" if near is None else f"did you mean {near}?"


def nearest_key(key: str) -> str | None:
    """Return the known key that is most like an unknown one, such as "optimizer.lr" for "lr"; None if none is."""
    known = list(all_keys())
    last = key.rpartition(".")[2]
    by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    near = near or [by_last[name] for name in difflib.get_close_matches(last, by_last, n=1, cutoff=0.6)]
    near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return near[0] if near else None


def to_yaml(settings: Settings) -> str:
    """Return the settings as YAML text, such as a run's config.yaml."""
    return yaml.safe_dump(to_dict(settings), sort_keys=False, allow_unicode=True)
