"""The test images of CIFAR-10 and CIFAR-100 as their archives hold them: the binary version and the Python version.

| folder | images | names of the classes |
| --- | --- | --- |
| `cifar-10-batches-bin` | `test_batch.bin` | `batches.meta.txt` |
| `cifar-10-batches-py` | `test_batch` | `batches.meta` |
| `cifar-100-binary` | `test.bin` | `fine_label_names.txt` |
| `cifar-100-python` | `test` | `meta` |

An image has 3 x 32 x 32 bytes: red, green, blue. In a binary file, its label (for CIFAR-100, the coarse and the fine
label, a byte each) is in front of it. Python files are pickles, which `plain_pickle` reads without unpickling them. The
`.tar.gz` archives are read in memory; only the two files above are kept.
"""

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
from PIL import Image

from nuclr.data.formats.plain_pickle import read_plain_pickle
from nuclr.data.pairs import Pairs
from nuclr.errors import UserError

SIDE = 32
PIXELS = 3 * SIDE * SIDE
MOST_BYTES = 64 * 2**20  # of a file; the largest one in use has 31 MB
MOST_UNPACKED = 512 * 2**20  # of an archive; the largest one has 186 MB


@dataclass(frozen=True)
class Version:
    """The files of one version.

    Attributes:
        folder: the folder that the archive unpacks to.
        archive: the archive.
        images: the file with the test images.
        names: the file with the names of the classes.
        label_bytes: in front of each image of a binary file, of which the last one is the label; 0 for Python files.
        keys: of the labels and of the names in Python files.

    """

    folder: str
    archive: str
    images: str
    names: str
    label_bytes: int
    keys: tuple[str, str] = ("", "")


VERSIONS: Mapping[str, tuple[Version, Version]] = {
    "cifar10": (
        Version("cifar-10-batches-bin", "cifar-10-binary.tar.gz", "test_batch.bin", "batches.meta.txt", 1),
        Version(
            "cifar-10-batches-py", "cifar-10-python.tar.gz", "test_batch", "batches.meta", 0, ("labels", "label_names")
        ),
    ),
    "cifar100": (
        Version("cifar-100-binary", "cifar-100-binary.tar.gz", "test.bin", "fine_label_names.txt", 2),
        Version("cifar-100-python", "cifar-100-python.tar.gz", "test", "meta", 0, ("fine_labels", "fine_label_names")),
    ),
}


class CifarImages(Pairs):
    """Labeled images of 32 x 32 pixels, held in memory.

    Args:
        pixels: (n, 3072) uint8, the red, green and blue values of each image, row by row.
        labels: (n,) in [0, c).
        names: the names of the c classes.
        path: the file with the images.

    Attributes:
        keys: the names of the classes, as the data set writes them: "aquarium_fish".
        classes: the same as words: "aquarium fish".
        y_id: (n,) int64, the class of each image.

    """

    x_kind = x_name = "image"
    y_kind = y_name = "text"

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, names: list[str], path: Path) -> None:
        self.keys = names
        self.classes = [name.replace("_", " ") for name in names]
        self.path, self.label = path, path.name
        self._pixels = pixels
        self.x_id = np.arange(len(pixels))
        self.y_id = labels.astype(np.int64)
        hashed = hashlib.sha256("\n".join(names).encode())
        hashed.update(np.ascontiguousarray(pixels).data)
        hashed.update(self.y_id.tobytes())
        self.fingerprint = hashed.hexdigest()

    def __len__(self) -> int:
        return len(self.x_id)

    def x(self, number: int) -> Image.Image:
        """Return the image."""
        return Image.fromarray(np.ascontiguousarray(self._pixels[number].reshape(3, SIDE, SIDE).transpose(1, 2, 0)))

    def y(self, number: int) -> str:
        """Return the name of the class."""
        return self.classes[self.y_id[number]]

    def name(self, number: int) -> str:
        """Return the file and the number."""
        return f"{self.label}[{number}]"


def open_cifar(name: str, place: Path) -> CifarImages | None:
    """Open the test images of CIFAR-10 or CIFAR-100.

    Args:
        name: "cifar10" or "cifar100".
        place: an unpacked archive or the folder that holds it, a `.tar.gz` archive or the folder that holds it.

    Returns:
        The images; None if there is none of these.

    Raises:
        UserError: if a file is missing or damaged; it names the file.

    """
    for version in VERSIONS[name]:
        for folder in (place, place / version.folder):
            unpacked = folder.name == version.folder and folder.is_dir()
            if unpacked or any((folder / file).is_file() for file in (version.images, version.names)):
                return _parse(version, _read_folder(version, folder), folder)
    for version in VERSIONS[name]:
        archive = place if place.name == version.archive else place / version.archive
        if archive.is_file():
            return _parse(version, _read_archive(version, archive), archive)
    return None


def _read_folder(version: Version, folder: Path) -> dict[str, bytes]:
    contents = {}
    for name in (version.images, version.names):
        path = folder / name
        try:
            size = path.stat().st_size
            if size > MOST_BYTES:
                raise UserError(f"{path}: has {size:,} bytes, but the original file has less; use the original file")
            contents[name] = path.read_bytes()
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; unpack the whole archive, {version.archive}") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return contents


class _Bounded:
    """A file that may be read only so far: a small archive can unpack to terabytes."""

    def __init__(self, file: IO[bytes], most: int) -> None:
        self._file, self._left = file, most

    def read(self, size: int) -> bytes:
        self._left -= size
        if self._left < 0:
            raise tarfile.ReadError(f"more than {MOST_UNPACKED:,} bytes unpacked")
        return self._file.read(size)


def _read_archive(version: Version, path: Path) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    wanted = {f"{version.folder}/{name}": name for name in (version.images, version.names)}
    try:
        with gzip.open(path, "rb") as unpacked:
            stream: Any = _Bounded(unpacked, MOST_UNPACKED)  # type: ignore[arg-type]
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    name = wanted.get(str(PurePosixPath(member.name)))
                    if name is None or not member.isreg() or len(contents) == len(wanted):
                        continue
                    file = archive.extractfile(member) if member.size <= MOST_BYTES else None
                    if file is None:
                        raise UserError(f"{path}: {member.name} has {member.size:,} bytes; use the original archive")
                    contents[name] = file.read()
                    if len(contents) == len(wanted):
                        break
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not the original archive, or damaged ({str(error)[:100]})") from None
    for place, name in wanted.items():
        if name not in contents:
            raise UserError(f"{path}: holds no {place}; use the original archive")
    return contents


def _parse(version: Version, contents: dict[str, bytes], place: Path) -> CifarImages:
    """Return the images in the two files; `place` is the folder or the archive that holds them."""
    path, names_path = place / version.images, place / version.names
    if version.label_bytes:
        names = contents[version.names].decode("utf-8", errors="replace").split()
        width = version.label_bytes + PIXELS
        if not contents[version.images] or len(contents[version.images]) % width:
            size = len(contents[version.images])
            raise UserError(f"{path}: has {size:,} bytes, not a multiple of {width:,}; the file is incomplete")
        rows = np.frombuffer(contents[version.images], np.uint8).reshape(-1, width)
        pixels, labels = rows[:, version.label_bytes :], rows[:, version.label_bytes - 1]
    else:
        batch, meta = (read_plain_pickle(contents[f.name], f) for f in (path, names_path))
        pixels, labels = _batch(batch, version.keys[0], path)
        names = _names(meta, version.keys[1], names_path)
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f"{names_path}: does not list the names of the classes; use the original file")
    if labels.min() < 0 or labels.max() >= len(names):
        raise UserError(f"{path}: holds the label {labels.max()}, but {names_path} names {len(names)} classes")
    return CifarImages(pixels, labels, names, path)


def _batch(content: Any, key: str, path: Path) -> tuple[np.ndarray, np.ndarray]:
    pixels, labels = _get(content, "data"), _get(content, key)
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != PIXELS or not len(pixels):
        raise UserError(f"{path}: 'data' is not an array of {PIXELS:,} bytes per image; use the original file")
    whole = isinstance(labels, list) and all(type(label) is int for label in labels)
    if not whole or len(labels) != len(pixels):
        raise UserError(f"{path}: {key!r} is not a list of {len(pixels):,} whole numbers; use the original file")
    return pixels, np.array(labels, np.int64)


def _names(content: Any, key: str, path: Path) -> list[str]:
    names = _get(content, key)
    if not isinstance(names, list) or not all(isinstance(name, str | bytes) for name in names):
        raise UserError(f"{path}: {key!r} is not a list of names; use the original file")
    return [name if isinstance(name, str) else name.decode("utf-8", errors="replace") for name in names]


def _get(content: Any, key: str) -> Any:
    """Return the value of a key, which Python 2 wrote as bytes."""
    return content.get(key.encode(), content.get(key)) if isinstance(content, dict) else None
