"""Where pretrained weights lie: a folder, or a name on the Hugging Face hub that is fetched into its cache first.

Everything after this reads from a folder only, so it works without a network. Weights come as safetensors; pickled
ones are refused.
"""

import difflib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nuclr.errors import UserError

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
WANTED = ["*.json", "*.safetensors", "*.txt", "*.model"]


def locate(name: str | os.PathLike[str], key: str, presets: Iterable[str] = ()) -> Path:
    """The folder that `name` stands for; `key` names the argument in messages, `presets` what else it may be."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{key}: {folder} has no config.json; needs a folder written by save_pretrained")
        return folder
    known = list(presets)
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.7)
    if nearest:
        raise UserError(f"{key}: {str(name)!r} is neither a preset nor a folder; did you mean {nearest[0]!r}?")
    if HUB_NAME.fullmatch(str(name)) and not folder.exists() and (fetched := _fetch(str(name))):
        return fetched
    preset = f"not a preset ({', '.join(known)}), " if known else ""
    raise UserError(
        f"{key}: {str(name)!r} is {preset}not a folder, and not to be had from the Hugging Face hub (no network, or no "
        "such name with safetensors).\nSave it where there is a network, with AutoModel (and AutoTokenizer)"
        ".from_pretrained(NAME).save_pretrained(FOLDER), and give the folder."
    )


def _fetch(name: str) -> Path | None:
    from huggingface_hub import snapshot_download

    for cached_only in (True, False):
        try:
            folder = Path(snapshot_download(name, allow_patterns=WANTED, local_files_only=cached_only))
        except Exception:  # not in the cache, no such name, no network, a proxy: the user's way out is the same
            continue
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            return folder
    return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; UserError where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds {type(content).__name__}; needs a JSON object")
    return content
