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
        out: the folder to create. It may exist if it is empty.
        best: use the weights of the best checkpoint instead of the last ones.

    Returns:
        Lines that say what was written.

    Raises:
        UserError: if the target is unknown or cannot hold the model, the run is not finished, or `out` is not empty.

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
    """Give an empty folder that becomes `out` when the block ends. If the block fails, nothing is left.

    Args:
        out: the folder to create. It may exist if it is empty.

    Yields:
        The folder to write to. It has the same name as `out`.

    Raises:
        UserError: if `out` exists and is not an empty folder, or cannot be written.

    """
    out = out.resolve()  # a link stays one
    written = out.with_name(f".{out.name}.tmp") / out.name
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(out.parent, out.name):
            if out.is_file() or (out.is_dir() and any(out.iterdir())):
                raise UserError(f"--out {out}: exists; remove it, or name another folder")
            written.mkdir(parents=True)
            try:
                yield written
                written.rename(out)  # fails if somebody has put a file there meanwhile
            finally:
                shutil.rmtree(written.parent, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--out {out}: cannot be written ({first_line(error)})") from error
