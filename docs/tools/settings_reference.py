"""The page of settings, generated from the dataclasses of `nuclr.runs.settings` and the registry of objectives."""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from nuclr import objectives
from nuclr.runs import settings

INTRODUCTION = """# Configuration

Every setting of `nuclr train` and `nuclr compare`, generated from the program (`nuclr.runs.settings`). A configuration
is a YAML file with these keys, and `key=value` on the command line overrides the file:

    nuclr train CONFIG.yaml data.batch_size=64 objective.name=sogclr

Every run writes all settings, with the values used, to its `config.yaml`. An unknown key is refused, and the message
suggests the closest one. [Training](training.md) explains what the settings do together.
"""

OBJECTIVES = """
The other keys of this section are the arguments of the objective's class. A file may hold options of several
objectives; each takes its own. [Objectives](objectives.md) says when to use which.

| key | default | objectives | |
| --- | --- | --- | --- |
"""


def page() -> str:
    """Return the page as Markdown."""
    parts = [INTRODUCTION, "\n## The run\n\n", _table(settings.Settings, [""])]
    for field in dataclasses.fields(settings.Settings):
        if dataclasses.is_dataclass(field.default_factory):
            parts += [f"\n## {field.name}\n\n", _summary(field.default_factory), "\n\n"]
            parts += [_table(field.default_factory, [f"{field.name}."])]
            if field.default_factory is settings.Objective:
                parts += [OBJECTIVES, *_objective_rows()]
    return "".join(parts)


def describe(documented: type, section: str) -> dict[str, str]:
    """Return name -> text of a section, such as "Attributes", of a Google-style docstring."""
    text = re.sub(r"^ {4}", "", documented.__doc__ or "", flags=re.MULTILINE)
    found = re.search(rf"^{section}:\n((?: {{4}}.*\n|\n)+)", text, re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", found[1] if found else "", re.MULTILINE)
    return {name: re.sub(r"\s+", " ", entry) for name, entry in entries}


def _summary(documented: type) -> str:
    return (documented.__doc__ or "").split("\n\n")[0]


def _table(section: type, prefixes: list[str]) -> str:
    return "".join(["| key | value | default | |\n| --- | --- | --- | --- |\n", *_rows(section, prefixes)])


def _rows(section: type, prefixes: list[str]) -> Iterator[str]:
    """Yield a row per key; both sides of the pairs share their rows."""
    texts, hints = describe(section, "Attributes"), typing.get_type_hints(section)
    fields = dataclasses.fields(section)
    sides = [field for field in fields if field.name in ("x", "y")]
    for field in fields:
        if field in sides:
            if field.name == "x":
                yield from _rows(hints["x"], [f"{prefix}{side.name}." for prefix in prefixes for side in sides])
        elif not dataclasses.is_dataclass(field.default_factory) and field.name != "options":
            keys = ", ".join(f"`{prefix}{field.name}`" for prefix in prefixes)
            kinds = _kinds(hints[field.name])
            schema = section.__pydantic_fields__[field.name]
            allowed = " or ".join(map(_name, kinds)) + _bounds(schema.metadata)
            yield f"| {keys} | {allowed} | {_default(schema)} | {_cell(texts[field.name])} |\n"
            for kind in kinds:
                if typing.get_origin(kind) is Mapping:  # from names to sections
                    yield from _rows(typing.get_args(kind)[1], [f"{prefix}{field.name}.NAME." for prefix in prefixes])


def _kinds(hint: Any) -> list[Any]:
    """Return the alternatives of a type, without None."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [kind for kind in (typing.get_args(hint) if is_union else [hint]) if kind is not type(None)]


def _name(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(kind))
    numbers = {bool: "`true` or `false`", int: "integer", float: "number"}
    others = {str: "text", tuple: "list", list: "list", Mapping: "sections"}
    return (numbers | others)[origin or kind]


def _bounds(metadata: list[Any]) -> str:
    """Return the bounds among pydantic's constraints, such as " from 0 to 1"."""
    words = {"gt": "above", "ge": "from", "le": "to"}
    limits = {name: getattr(one, name) for one in metadata for name in words if hasattr(one, name)}
    return "".join(f" {word} {limits[name]:,}" for name, word in words.items() if name in limits)


def _default(field: Any) -> str:
    missing = field.is_required() or field.default in (None, ())
    return "" if missing else f"`{_value(field.default)}`"


def _value(value: Any) -> str:
    """Return a value as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _sentence(text: str) -> str:
    """Return the text with a capital letter, unless it starts with a symbol or a name."""
    return text if re.match(r"(tau|zeta|beta|log|inf)\b|\w*_|\W", text) else text[:1].upper() + text[1:]


def _objective_rows() -> Iterator[str]:
    """Yield a row per option and meaning, with the objectives that have it."""
    meanings: dict[str, dict[str, dict[str, Any]]] = {}  # option -> meaning -> objective -> default
    for name in objectives.names():
        for option, default in objectives.entry(name).flat_options.items():
            text = _meaning(objectives.entry(name).cls, option)
            meanings.setdefault(option, {}).setdefault(text, {})[name] = default
    for option, texts in meanings.items():
        for text, defaults in texts.items():
            of = "all" if len(defaults) == len(objectives.names()) else ", ".join(f"`{name}`" for name in defaults)
            yield f"| `objective.{option}` | {_defaults(defaults)} | {of} | {_cell(text)} |\n"


def _defaults(defaults: dict[str, Any]) -> str:
    names: dict[str, list[str]] = {}
    for name, default in defaults.items():
        names.setdefault("" if default is None else f"`{_value(default)}`", []).append(name)
    return "; ".join(value if len(names) == 1 else f"{value} ({', '.join(of)})" for value, of in names.items())


def _meaning(cls: type, option: str) -> str:
    """Return the description of an option, from the class or the first base class that has one, or from its record."""
    name, _, field = option.partition(".")
    if field:
        record = type(inspect.signature(cls).parameters[name].default)
        return _sentence(describe(record, "Attributes")[field])
    documented = [describe(base, "Args") | describe(base, "Attributes") for base in cls.__mro__]
    return _sentence(next(texts[option] for texts in documented if option in texts))
