"""Groups of arrays in one .npz file, under names "GROUP/ARRAY"; a file is whole or not there."""

import os
from pathlib import Path

import numpy as np

Groups = dict[str, dict[str, np.ndarray]]


def read_groups(path: Path) -> Groups:
    """All arrays by group; nothing where there is no file."""
    found: Groups = {}
    if not path.is_file():
        return found
    with np.load(path, allow_pickle=False) as archive:
        for name in archive.files:
            group, _, key = name.rpartition("/")
            found.setdefault(group, {})[key] = archive[name]
    return found


def group_names(path: Path) -> set[str]:
    """Names of the groups alone; no array is read."""
    if not path.is_file():
        return set()
    with np.load(path, allow_pickle=False) as archive:
        return {name.rpartition("/")[0] for name in archive.files}


def write_groups(path: Path, groups: Groups) -> None:
    """Write them, flushed to the disk before the file gets its name."""
    temporary = path.with_name(f".{path.name}.tmp")
    arrays = {
        f"{group}/{key}" if group else key: array for group, members in groups.items() for key, array in members.items()
    }
    with temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
