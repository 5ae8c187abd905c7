"""Export a trained run to the formats of other tools: one module per target.

>>> from nuclr.export import export                                                     # doctest: +SKIP
>>> export("runs/demo", "sentence-transformers", "demo-st")                             # doctest: +SKIP
"""

import contextlib
import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from nuclr import files
from nuclr.errors import UserError, first_line

__all__ = ["TARGETS", "export"]

RECORD = ".nuclr-export.json"  # in each export: its files with their sizes and times
# The module of a target, nuclr.export.<name>, has a function `write(trained, folder)`, which writes the model to an
# empty folder and returns `Written`.
TARGETS = {
    "hf": "a CLIPModel or SiglipModel",
    "sentence-transformers": "a SentenceTransformer",
    "open-clip": "a CLIP of open_clip",
    "onnx": "one ONNX file per side",
}


def export(
    source: str | os.PathLike[str],
    to: str,
    out: str | os.PathLike[str],
    best: bool = False,
) -> list[str]:
    """Write a trained model in the format of another tool, with a model card, to a folder of its own.

    Args:
        source: a finished run.
        to: the name of a target: one of `TARGETS`.
        out: the folder to create. If an export has written it and nothing in it was changed since, it is replaced.
        best: use the weights of the best checkpoint instead of the last ones.

    Returns:
        Lines that say what was written.

    Raises:
        UserError: if the target is unknown or cannot hold the model, the run is not finished, or `out` holds anything
            that no export has written.

    """
    if to not in TARGETS:
        raise UserError(f"--to {to}: unknown target; use one of {', '.join(TARGETS)}")
    from nuclr.export.card import write_card
    from nuclr.export.trained import open_trained

    target = importlib.import_module(f"nuclr.export.{to.replace('-', '_')}")
    with new_folder(Path(out)) as folder:
        trained = open_trained(Path(source), to, best)
        written = target.write(trained, folder)
        write_card(trained, written, folder)
    return list(written.lines)


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give an empty folder that becomes `out` when the block ends. If the block fails, `out` stays as it was.

    Args:
        out: the folder to create. It may exist if it is empty, or if all of its files are as an earlier block wrote
            them, according to its `RECORD`. If a process is killed between the two renames, the next one puts the
            earlier export back.

    Yields:
        The folder to write to. It has the same name as `out`.

    Raises:
        UserError: if `out` is a file, holds other or changed files, or cannot be written.

    """
    out = out.resolve()  # a link stays one
    earlier = out.with_name(f".{out.name}.nuclr-earlier")
    written = out.with_name(f".{out.name}.tmp") / out.name
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(out.parent, out.name):
            _settle(earlier, out)
            _refuse_other_content(out)
            written.mkdir(parents=True)
            try:
                yield written
                files.write_json(written / RECORD, {"files": _stamps(written)})
                _refuse_other_content(out)  # again, because exporting takes a while
                if out.is_dir():
                    out.rename(earlier)
                written.rename(out)
            finally:
                _settle(earlier, out)
                shutil.rmtree(written.parent, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--out {out}: cannot be written ({first_line(error)})") from error


def _settle(earlier: Path, out: Path) -> None:
    """Put the earlier export back if there is no new one, and remove it otherwise."""
    if out.exists():
        shutil.rmtree(earlier, ignore_errors=True)
    elif earlier.is_dir():
        earlier.rename(out)


def _stamps(folder: Path) -> dict[str, list[int]]:
    """Return all files of a folder with size and time; links, which no export writes, have neither."""
    stamps = {}
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            stamps[path.relative_to(folder).as_posix()] = [] if path.is_symlink() else files.file_stamp(path)
    stamps.pop(RECORD, None)
    return stamps


def _refuse_other_content(out: Path) -> None:
    """Refuse a file, or a folder with anything that no export has written or that was changed since."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: exists and is not a folder; name another one")
    written: dict[str, list[int]] = {}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        written = dict(files.read_object(out / RECORD)["files"])
    for name, stamp in sorted(_stamps(out).items()):
        if written.get(name) != stamp:
            raise UserError(
                f"--out {out}: {name} was not written by `nuclr export`, or was changed since; remove the folder or "
                "name another one"
            )
