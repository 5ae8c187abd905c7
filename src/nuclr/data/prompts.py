"""Prompt files: templates, names of classes, or prompts per class, for zero-shot classification.

| file | content |
| --- | --- |
| `.txt` | a template per line; empty lines and lines that begin with # are skipped |
| `.json`, a list | templates |
| `.json`, `{"classes": ..., "templates": [...]}` | names (a list in the classes' order, or folder -> name), templates |
| `.json`, a dict | class -> prompt or list of prompts; a class is called by its folder or by its name |
| `.json`, a dict | test set -> one of the above, as CLIP_benchmark's files have it |

`{}` or `{c}` in a template stands for the name of the class. Lines of open_clip's Python files, such as
`lambda c: f'a photo of a {c}.',`, are templates as well: the text between the quotes.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nuclr.errors import UserError
from nuclr.files import parse_json, read_text

MOST_BYTES = 32 * 2**20
MOST_PROMPTS = 2_000_000  # of all classes together
_LAMBDA = re.compile(r"""lambda (\w+): f(['"])(?P<text>.*)\2,?""")
_FORMS = (
    'a list of templates, {"classes": [...], "templates": [...]}, or a dict from class to prompts '
    "(docs/evaluation.md#prompts)"
)


@dataclass(frozen=True)
class ClassTexts:
    """Names and prompts of the classes of a test set.

    Attributes:
        names: the names of the classes.
        templates: the templates of all prompts; None if each class has prompts of its own.
        prompts: the prompts of each class.
        file: the prompt file; None for the set's own prompts.

    """

    names: list[str]
    templates: list[str] | None
    prompts: list[list[str]]
    file: Path | None = None


@dataclass(frozen=True)
class Prompts:
    """The content of a prompt file; what it does not say is None.

    Attributes:
        path: the file; None for prompts that do not come from a file.
        templates: with {} for the name of the class.
        classes: a list of names in the order of the classes, or folder or name -> name.
        of_class: folder or name of a class -> its prompts.

    """

    path: Path | None = None
    templates: list[str] | None = None
    classes: list[str] | dict[str, str] | None = None
    of_class: dict[str, list[str]] | None = None

    def texts(self, folders: Sequence[str], names: Sequence[str], templates: Sequence[str]) -> ClassTexts:
        """Return names and prompts of the classes.

        Args:
            folders: the classes as the data set writes them: names of folders, WordNet numbers.
            names: the names of the classes, unless the file has others.
            templates: used if the file has none.

        Raises:
            UserError: if the file does not fit the classes.

        """
        kept = list(names)
        if isinstance(self.classes, list):
            if len(self.classes) != len(kept):
                raise UserError(f"{self.path}: names {len(self.classes)} classes; the test set has {len(kept)}")
            kept = self.classes
        elif self.classes is not None:
            kept = [self._find(self.classes, keys) for keys in zip(folders, names, strict=True)]
        if self.of_class is None:
            used = list(templates) if self.templates is None else self.templates
            if len(used) * len(kept) > MOST_PROMPTS:
                raise UserError(f"{self.path}: {len(used):,} templates for {len(kept):,} classes are too many prompts")
            return ClassTexts(kept, used, [[fill(text, name) for text in used] for name in kept], self.path)
        prompts = []
        for keys in zip(folders, names, kept, strict=True):
            prompts.append([fill(text, keys[-1]) for text in self._find(self.of_class, keys)])
        return ClassTexts(kept, None, prompts, self.path)

    def _find(self, values: dict[str, Any], keys: Sequence[str]) -> Any:
        for key in keys:
            if key in values:
                return values[key]
        called = " or ".join(repr(key) for key in dict.fromkeys(keys))
        raise UserError(f"{self.path}: has no entry for the class {called}; it needs one for every class")


def fill(template: str, name: str) -> str:
    """Return a template with the name of a class."""
    return template.replace("{}", name)


def read_prompts(path: Path, name: str | None = None) -> Prompts:
    """Read a prompt file.

    Args:
        path: a `.txt` or `.json` file, as described above.
        name: the test set's name, for files that hold the prompts of several sets.

    Raises:
        UserError: if the file is missing or is not a prompt file; it names the entry that is wrong.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "templates.txt")
        ...     _ = path.write_text("a photo of a {}.")
        ...     read_prompts(path).texts(["cat"], ["cat"], []).prompts
        [['a photo of a cat.']]

    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.suffix not in (".txt", ".json"):
        raise UserError(f"{path}: prompts are in a .txt or .json file, {_FORMS}")
    if path.stat().st_size > MOST_BYTES:
        raise UserError(f"{path}: larger than the {MOST_BYTES:,} bytes that prompts may have")
    text = read_text(path)
    content = _lines(text) if path.suffix == ".txt" else read_json(path, text)
    if name is not None and isinstance(content, dict) and isinstance(content.get(name), list | dict):
        content = content[name]
    if isinstance(content, list):
        return Prompts(path, templates=check_templates(path, content))
    if not isinstance(content, dict) or not content:
        raise UserError(f"{path}: holds no prompts; it needs {_FORMS}")
    if content.keys() <= {"classes", "templates"}:
        templates, classes = content.get("templates"), content.get("classes")
        return Prompts(
            path,
            None if templates is None else check_templates(path, templates),
            None if classes is None else _check_names(path, classes),
        )
    return Prompts(path, of_class=_check_prompts(path, content))


def check_templates(path: Path, templates: Any) -> list[str]:
    """Return templates with {} for the class name.

    Args:
        path: the file or folder, for messages.
        templates: the content to check: texts with {} or {c}.

    Raises:
        UserError: if they are not templates; it names the first wrong one.

    """
    requirement = f"{path}: templates must be a list of texts with {{}} for the class name"
    if not isinstance(templates, list) or not templates:
        raise UserError(requirement)
    checked = [text.replace("{c}", "{}") if isinstance(text, str) else text for text in templates]
    for text, template in zip(templates, checked, strict=True):
        if not isinstance(template, str) or "{}" not in template:
            raise UserError(f"{requirement}; {text!r} does not have it")
    return checked


def read_json(path: Path, text: str) -> Any:
    """Return the content of a JSON file.

    Raises:
        UserError: if it is not JSON; it names the line.

    """
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None


def _lines(text: str) -> list[str]:
    kept = []
    for line in map(str.strip, text.splitlines()):
        if line and not line.startswith("#"):
            match = _LAMBDA.fullmatch(line)
            kept.append(match["text"].replace(f"{{{match[1]}}}", "{}") if match else line)
    return kept


def _check_names(path: Path, classes: Any) -> list[str] | dict[str, str]:
    names = list(classes.values()) if isinstance(classes, dict) else classes
    if not isinstance(names, list) or not names:
        raise UserError(f'{path}: "classes" must be a list of names, or a dict from folder to name')
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise UserError(f'{path}: "classes": {name!r} is not a class name')
    return dict(classes) if isinstance(classes, dict) else names


def _check_prompts(path: Path, content: dict[str, Any]) -> dict[str, list[str]]:
    of_class = {}
    for key, value in content.items():
        prompts = [value] if isinstance(value, str) else value
        if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) and p.strip() for p in prompts):
            raise UserError(f"{path}: {key!r} has no prompts; it needs a text or a list of texts")
        of_class[key] = [prompt.replace("{c}", "{}") for prompt in prompts]
    return of_class
