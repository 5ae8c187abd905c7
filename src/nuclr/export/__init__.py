"""Export a trained run, or embeddings, to the formats of other tools: one module per target.

>>> from nuclr.export import export                                                     # doctest: +SKIP
>>> export("runs/demo", "sentence-transformers", "demo-st")                             # doctest: +SKIP
"""

import contextlib
import difflib
import importlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from nuclr.errors import UserError

__all__ = ["TARGETS", "Target", "export", "find_target", "new_folder"]


@dataclass(frozen=True)
class Target:
    """A format to export to.

    Args:
        name: the value of `--to`.
        module: the module with a function `write(source, folder, **options)`, which writes to an empty folder and
            returns lines to print. The folder has the name of `--out`, at another place.
        summary: what it writes, in a few words.
        options: the options of `nuclr export` that it takes.

    """

    name: str
    module: str
    summary: str
    options: tuple[str, ...] = ()


FAISS_OPTIONS = (
    *("bank", "correction", "index", "normalize", "temperature", "strength"),
    *("lists", "probes", "neighbors", "ef_construction", "ef_search"),
)
TARGETS = {
    target.name: target
    for target in (
        Target("hf", "nuclr.export.hf", "a CLIPModel, SiglipModel or VisionTextDualEncoderModel", ("best",)),
        Target("sentence-transformers", "nuclr.export.sentence_transformers", "a SentenceTransformer", ("best",)),
        Target("open-clip", "nuclr.export.open_clip", "a CLIP of open_clip", ("best",)),
        Target("onnx", "nuclr.export.onnx", "one ONNX file per side", ("best",)),
        Target("faiss", "nuclr.export.index", "an index of embeddings, corrected by popularity", FAISS_OPTIONS),
    )
}


# Other names that people use, for "did you mean".
_ABBREVIATIONS = {"st": "sentence-transformers", "sbert": "sentence-transformers"}
_ABBREVIATIONS |= {"transformers": "hf", "huggingface": "hf", "clip": "open-clip"}


def find_target(name: str) -> Target:
    """Return the target called `name`.

    Args:
        name: the value of `--to`.

    Returns:
        The target.

    Raises:
        UserError: if there is no such target.

    Example:
        >>> find_target("onnx").summary
        'one ONNX file per side'

    """
    if name not in TARGETS:
        known = {target.replace("-", ""): target for target in TARGETS} | _ABBREVIATIONS
        near = difflib.get_close_matches(name.lower().replace("-", "").replace("_", ""), known, n=1)
        fix = f"did you mean {known[near[0]]}?" if near else f"use one of {', '.join(TARGETS)}"
        raise UserError(f"--to {name}: unknown target; {fix}")
    return TARGETS[name]


def export(source: str | os.PathLike[str], to: str, out: str | os.PathLike[str], **options: Any) -> list[str]:
    """Write an export to a new folder.

    Args:
        source: a run folder, or what the target takes.
        to: the name of a target.
        out: the folder to create.
        options: options of the target. None and False stand for the target's default.

    Returns:
        Lines that say what was written.

    Raises:
        UserError: if the target is unknown, does not take an option or the source, or `out` is not empty.

    """
    target = find_target(to)
    chosen = {name: value for name, value in options.items() if value is not None and value is not False}
    for name in chosen:
        if name not in target.options:
            takes = [other.name for other in TARGETS.values() if name in other.options]
            raise UserError(
                f"--{name.replace('_', '-')}: not an option of --to {to}, but of {', '.join(takes) or 'no target'}"
            )
    with new_folder(Path(out)) as folder:
        return list(importlib.import_module(target.module).write(Path(source), folder, **chosen))


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give an empty folder that becomes `out` when the block ends. If the block fails, nothing remains.

    Args:
        out: the folder to create. It may exist if it is empty.

    Yields:
        The folder to write to. It has the same name as `out`.

    Raises:
        UserError: if `out` is a file, is not empty, or cannot be written.

    """
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: there is a file with this name; name a new folder")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"--out {out}: the folder is not empty; remove it or name another one")
    out = out.absolute()
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / out.name).mkdir(parents=True)
        yield temporary / out.name
        if out.is_dir():
            out.rmdir()
        (temporary / out.name).rename(out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"--out {out}: cannot be written ({reason})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
