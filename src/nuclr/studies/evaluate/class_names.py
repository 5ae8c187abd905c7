"""What the classes of a usual set are called: from classes.json, a list that the set brings, or the folders' names."""

import json
import re
from pathlib import Path

from nuclr.errors import UserError
from nuclr.evaluation.test_sets import ClassificationSet
from nuclr.files import read_text

# Lists from a WordNet number to names, as they come with ImageNet (the contest's, the project's) and ImageNet-R.
LISTS = ("LOC_synset_mapping.txt", "words.txt", "README.txt")
_LINE = re.compile(r"^\s*(n\d{8})\s+(\S.*?)\s*$", re.MULTILINE)


def names_of(place: Path, top: Path, folders: list[str], known: ClassificationSet) -> dict[str, str]:
    """Folder -> name for every class; `place` holds the folders, `top` the whole set."""
    for folder in dict.fromkeys((place, top)):
        if (folder / "classes.json").is_file():
            return _from_json(folder / "classes.json", folders)
    if not known.wordnet:
        return {folder: folder.replace("_", " ") for folder in folders}
    for path in (folder / name for folder in dict.fromkeys((place, top)) for name in LISTS):
        if path.is_file():
            listed = {number: _first(names) for number, names in _LINE.findall(read_text(path))}
            if listed.keys() >= set(folders):
                return {folder: listed[folder] for folder in folders}
    raise UserError(
        f"{place}: the folders are WordNet numbers ({folders[0]}, ...), which no model was trained on; "
        f'put classes.json, {{"{folders[0]}": "name", ...}}, or {LISTS[0]} there'
    )


def _from_json(path: Path, folders: list[str]) -> dict[str, str]:
    try:
        names = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    if isinstance(names, list) and len(names) == len(folders):
        names = dict(zip(folders, names, strict=True))
    if not isinstance(names, dict) or set(names) != set(folders):
        raise UserError(f"{path}: needs a dict from folder to name for the {len(folders)} folders, or a list of names")
    if odd := next((name for name in names.values() if not isinstance(name, str) or not name.strip()), None):
        raise UserError(f"{path}: {odd!r} is no class name")
    return {folder: names[folder] for folder in folders}


def _first(names: str) -> str:
    """The first of several names of one thing."""
    return names.split(",")[0].replace("_", " ").strip()
