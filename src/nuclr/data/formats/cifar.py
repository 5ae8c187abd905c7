"""The test images of CIFAR-10 and CIFAR-100 in their binary version, unpacked.

| folder | images | names of the classes |
| --- | --- | --- |
| `cifar-10-batches-bin` | `test_batch.bin` | `batches.meta.txt` |
| `cifar-100-binary` | `test.bin` | `fine_label_names.txt` |

An image has 3 x 32 x 32 bytes: red, green, blue. Its label (for CIFAR-100, the coarse and the fine label, a byte each)
is in front of it. The Python version of the data sets consists of pickles, which are not read.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from nuclr.data.modalities import get_modality
from nuclr.data.pairs import Labeled, Side, SideName
from nuclr.errors import UserError
from nuclr.files import readable
from nuclr.image_files import read_file

SIDE = 32
PIXELS = 3 * SIDE * SIDE
_ARCHIVE = "the binary version, unpacked from the original archive"


class Version(NamedTuple):
    """The files of one data set.

    Attributes:
        folder: the folder that the archive unpacks to.
        images: the file with the test images.
        names: the file with the names of the classes.
        label_bytes: bytes in front of each image, of which the last one is the label.

    """

    folder: str
    images: str
    names: str
    label_bytes: int


VERSIONS = {
    "cifar10": Version(
        folder="cifar-10-batches-bin",
        images="test_batch.bin",
        names="batches.meta.txt",
        label_bytes=1,
    ),
    "cifar100": Version(
        folder="cifar-100-binary",
        images="test.bin",
        names="fine_label_names.txt",
        label_bytes=2,
    ),
}


class CifarImages(Labeled):
    """Labeled images of 32 x 32 pixels, held in memory.

    Args:
        pixels: (n, 3072) uint8, the red, green and blue values of each image, row by row.
        labels: (n,) in [0, c).
        names: the names of the c classes.
        path: the file with the images.

    Attributes:
        keys: the names of the classes, as the data set writes them: "aquarium_fish".
        classes: the same as words: "aquarium fish".

    """

    def __init__(
        self,
        pixels: np.ndarray,
        labels: np.ndarray,
        names: list[str],
        path: Path,
    ) -> None:
        self.keys = names
        self.classes = [name.replace("_", " ") for name in names]
        self.path = path
        self.label = path.name
        self._pixels = pixels
        labels = labels.astype(np.int64)
        self.sides = {
            "x": Side("image", None, get_modality("image"), np.arange(len(pixels))),
            "y": Side("text", None, get_modality("text"), labels),
        }
        hashed = hashlib.sha256("\n".join(names).encode())
        hashed.update(np.ascontiguousarray(pixels).data)
        hashed.update(labels.tobytes())
        self.fingerprint = hashed.hexdigest()

    def __len__(self) -> int:
        return len(self._pixels)

    def item(self, side: SideName, number: int) -> Any:
        """Return the image, or the name of the class."""
        if side == "y":
            return self.classes[self.labels[number]]
        return Image.fromarray(np.ascontiguousarray(self._pixels[number].reshape(3, SIDE, SIDE).transpose(1, 2, 0)))

    def name(self, number: int) -> str:
        """Return the file and the number."""
        return f"{self.label}[{number}]"


def open_cifar(name: str, place: Path) -> CifarImages | None:
    """Open the test images of CIFAR-10 or CIFAR-100.

    Args:
        name: "cifar10" or "cifar100".
        place: an unpacked archive, or the folder that holds it.

    Returns:
        The images; None if there are none.

    Raises:
        UserError: if a file is missing or damaged; it names the file.

    """
    version = VERSIONS[name]
    for folder in (place, place / version.folder):
        if (folder / version.images).is_file() or (folder.name == version.folder and folder.is_dir()):
            return _parse(version, folder)
    return None


def _parse(version: Version, folder: Path) -> CifarImages:
    path = folder / version.images
    with readable(path, _ARCHIVE):
        content = read_file(path)
    with readable(folder / version.names, _ARCHIVE):
        names = read_file(folder / version.names).decode("utf-8", errors="replace").split()
    width = version.label_bytes + PIXELS
    size = len(content)
    if not size or size % width:
        raise UserError(f"{path}: has {size:,} bytes, not a multiple of {width:,}; the file is incomplete")
    rows = np.frombuffer(content, np.uint8).reshape(-1, width)
    labels = rows[:, version.label_bytes - 1]
    if labels.max() >= len(names) or len(set(names)) < len(names) or len(names) < 2:
        raise UserError(f"{folder / version.names}: {len(names)} names do not fit the labels 0 to {labels.max()}")
    return CifarImages(
        rows[:, version.label_bytes :],
        labels,
        names,
        path,
    )
