"""From YAML and key=value to `Settings`: every key known, every value possible, or a line that names the right one.

settings = load("configs/flickr8k_embeddings.yaml", ["data.root=/data/flickr8k", "seed=1"])
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from nuclr.errors import UserError
from nuclr.runs.settings import Settings, objective_keys, to_dict

# What `nuclr train` does without a file, so that it also works from a wheel; configs/demo.yaml is the same.
DEMO: dict[str, Any] = {
    "name": "demo",
    "data": {
        "train": "builtin:n=12000,split=train,size=48",
        "val": "builtin:n=1000,split=val,size=48",
        "classes": "builtin",
        "batch_size": 64,
    },
    "augment": {"enabled": False},
    "model": {"image": "tiny_resnet", "text": "tiny_text", "image_size": 48},
    "objective": {"name": "nuclr", "temperature": 0.03, "gamma": 0.8, "zeta_lr": 3.0e-3},
    "optimizer": {"lr": 2.0e-3, "clip": 1.0},
    "schedule": {"epochs": 4, "warmup_steps": 100, "zeta_frozen_epochs": 1},
    "evaluate": {"every": 2},
}


class Line(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping; a repeated key is an error with its line."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Settings:
    """Settings from a file (None: the demo), changed by overrides "section.key=value"."""
    values, source = (DEMO, "the demo") if path is None else (read(Path(path)), str(path))
    settings = fill(Settings(), values, source)
    given = [split_override(text) for text in overrides]
    for key, value in given:
        settings = fill(settings, nest(key, value), f"{key}={value}")
    check(settings, [key for key, _ in given])
    return settings


def read(path: Path) -> dict[str, Any]:
    """What a YAML file holds."""
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise UserError(f"{path}: no such config file{hint}")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Line)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: not YAML ({error.problem})") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds {type(content).__name__}; needs keys and values, such as 'name: mine'")
    return content


def split_override(text: str) -> tuple[str, Any]:
    """From "a.b=1" to ("a.b", 1)."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"{text!r} is not understood; overrides are key=value, such as optimizer.lr=0.001")
    try:
        return key.strip(), yaml.safe_load(value) if value.strip() else None
    except yaml.YAMLError:
        return key.strip(), value


def nest(key: str, value: Any) -> dict[str, Any]:
    """From "a.b", 1 to {"a": {"b": 1}}."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def fill(settings: Any, values: Any, source: str, prefix: str = "") -> Any:
    """`settings` with `values` in their places."""
    kinds = typing.get_type_hints(type(settings))
    changes = {}
    for key, value in values.items():
        full = f"{prefix}{key}"
        if key not in kinds:
            raise UserError(f"{source}: unknown key {full!r}; {_nearest(full)}")
        if dataclasses.is_dataclass(kinds[key]):
            if value is None:
                continue
            if not isinstance(value, dict):
                keys = ", ".join(kinds_of(kinds[key]))
                raise UserError(f"{source}: {full} is a section, not a value; it has the keys {keys}")
            changes[key] = fill(getattr(settings, key), value, source, f"{full}.")
        else:
            bounds = next(f.metadata for f in dataclasses.fields(settings) if f.name == key)
            changes[key] = convert(value, kinds[key], bounds, full, source)
    return dataclasses.replace(settings, **changes)


def convert(value: Any, kind: Any, bounds: Any, key: str, source: str) -> Any:
    """A value in its type and within its bounds; numbers may come as text (YAML reads 1e-3 as such)."""
    options = (
        typing.get_args(kind)
        if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
        else (kind,)
    )
    if value is None:
        if type(None) in options:
            return None
        raise UserError(f"{source}: {key} has no value; needs {_describe(options, bounds)}")
    (wanted,) = (option for option in options if option is not type(None))
    failed = UserError(f"{source}: {key} is {value!r}; needs {_describe(options, bounds)}")
    if typing.get_origin(wanted) is Literal:
        choices = typing.get_args(wanted)
        if value not in choices:
            near = difflib.get_close_matches(str(value), choices, n=1)
            raise UserError(f"{failed}{f'; did you mean {near[0]}?' if near else ''}")
        return value
    if wanted is bool:
        if not isinstance(value, bool):
            raise failed
        return value
    if wanted is str:
        if isinstance(value, dict | list):
            raise failed
        return str(value)
    try:
        found = float(value) if not isinstance(value, bool | dict | list) else math.nan
    except ValueError:
        raise failed from None
    if math.isnan(found) or (wanted is int and not found.is_integer()):
        raise failed
    if bounds and not (bounds["low"] <= found <= bounds["high"] and found > bounds["above"]):
        raise failed
    return int(value if isinstance(value, int) else found) if wanted is int else found


def _describe(options: tuple[Any, ...], bounds: Any) -> str:
    wanted = next(option for option in options if option is not type(None))
    if typing.get_origin(wanted) is Literal:
        return "one of " + ", ".join(typing.get_args(wanted))
    text = {bool: "true or false", str: "a text", int: "a whole number", float: "a number"}[wanted]
    if bounds:
        parts = [f"above {bounds['above']:g}"] if bounds["above"] > -math.inf else []
        parts += [f"at least {bounds['low']:g}"] if bounds["low"] > -math.inf else []
        parts += [f"at most {bounds['high']:g}"] if bounds["high"] < math.inf else []
        text += " " + " and ".join(parts) if parts else ""
    return text


def check(settings: Settings, overridden: Sequence[str] = ()) -> None:
    """What no single value shows: a key that is missing, or that the chosen objective does not take."""
    if settings.data.train is None:
        raise UserError("data.train is missing; name the pairs to train on, such as data.train=train.jsonl or builtin")
    unused = set(kinds_of(type(settings.objective))) - set(objective_keys(settings.objective.name)) - {"name"}
    for key in overridden:
        section, _, name = key.partition(".")
        if section == "objective" and name in unused:
            allowed = ", ".join(objective_keys(settings.objective.name))
            raise UserError(f"{key}: {settings.objective.name} has no such option; it has {allowed}")
    if settings.schedule.zeta_frozen_epochs > settings.schedule.epochs:
        frozen, epochs = settings.schedule.zeta_frozen_epochs, settings.schedule.epochs
        raise UserError(
            f"schedule.zeta_frozen_epochs is {frozen}, more than schedule.epochs, which is {epochs}; "
            "add schedule.zeta_frozen_epochs=0"
        )
    if settings.model.pretrained and (settings.model.image or settings.model.text):
        raise UserError("model.pretrained is a whole dual encoder; leave model.image and model.text out")


def kinds_of(kind: Any) -> list[str]:
    """Keys of a section."""
    return [field.name for field in dataclasses.fields(kind)]


def all_keys(kind: Any = Settings, prefix: str = "") -> Iterator[str]:
    """Every key, as in "data.train"."""
    for key, inner in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(inner):
            yield from all_keys(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _nearest(key: str) -> str:
    known = list(all_keys())
    last = key.rpartition(".")[2]
    by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    near = near or [by_last[name] for name in difflib.get_close_matches(last, by_last, n=1, cutoff=0.6)]
    near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return f"did you mean {near[0]}?" if near else f"known sections: {', '.join(kinds_of(Settings))}"


def to_yaml(settings: Settings) -> str:
    """The resolved settings as text, such as a run's config.yaml."""
    return yaml.safe_dump(to_dict(settings), sort_keys=False, allow_unicode=True)
