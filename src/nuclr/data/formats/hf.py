"""Pairs in a Hugging Face dataset on disk, as `save_to_disk` writes it: Arrow streams and a list of them.

Only pyarrow is needed to read it, not `datasets` itself.
"""

import json
from pathlib import Path

from nuclr.data.formats.arrow import ArrowPairs, choose_columns, first_line, load_pyarrow, open_arrow
from nuclr.data.formats.listed import ListedPairs
from nuclr.errors import UserError


def open_hf(
    path: Path,
    root: Path | None = None,
    image_key: str | None = None,
    caption_key: str | None = None,
    split: str | None = None,
) -> ListedPairs | ArrowPairs:
    """A folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`; the latter needs a `split`."""
    pyarrow = load_pyarrow(path)
    if (path / "dataset_dict.json").is_file():
        splits = sorted(folder.name for folder in path.iterdir() if (folder / "state.json").is_file())
        if split not in splits:
            asked = f"no split {split!r}" if split else "name a split"
            raise UserError(f"{path}: {asked}; found: {', '.join(splits)}")
        path = path / split
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        files = [path / entry["filename"] for entry in state["_data_files"]]
        if state.get("_indices_files"):
            raise UserError(f"{path}: holds a selection of rows only; write it anew with dataset.flatten_indices()")
        if not files:
            raise UserError(f"{path}: holds no pairs")
        table = pyarrow.concat_tables(
            [pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))).read_all() for file in files]
        )
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: cannot be read as a dataset on disk ({first_line(error)})") from None
    image, caption = choose_columns(path, table.schema, image_key, caption_key)
    return open_arrow(path, files, table, image, caption, root)


def is_hf(path: Path) -> bool:
    """Whether the folder was written by `save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
