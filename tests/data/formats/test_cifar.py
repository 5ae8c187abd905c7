"""The unpacked binary archives of CIFAR; damaged files are refused."""

import numpy as np
import pytest

from nuclr.data.formats.cifar import open_cifar
from nuclr.errors import UserError
from tests.data import layouts


def test_images_and_classes(tmp_path):
    pixels = layouts.cifar_pixels()
    for name, write in (("cifar10", layouts.cifar10_binary), ("cifar100", layouts.cifar100_binary)):
        folder = write(tmp_path / name / "unpacked")
        opened = [open_cifar(name, place) for place in (folder, next(folder.iterdir()))]
        assert len({images.fingerprint for images in opened}) == 1
        for images in opened:
            assert images.labels.tolist() == [n % len(images.classes) for n in range(6)]
            image = np.asarray(images.item("x", 4))
            assert image.shape == (32, 32, 3) and image[1, 2].tolist() == pixels[4, [34, 1058, 2082]].tolist()
            assert images.item("y", 1) == images.classes[1] and images[3].y_id == images.labels[3]
    assert images.classes[1] == "aquarium fish" and images.keys[1] == "aquarium_fish"
    assert open_cifar("cifar10", tmp_path / "nothing") is None


def test_damaged_files_are_refused(tmp_path):
    folder = layouts.cifar10_binary(tmp_path / "binary") / "cifar-10-batches-bin"
    content = (folder / "test_batch.bin").read_bytes()
    for damaged, value in ((content[:-1], "18,437"), (b"", "empty"), (b"\x09" + content[1:], "9")):
        (folder / "test_batch.bin").write_bytes(damaged)
        with pytest.raises(UserError, match=rf"(test_batch\.bin|batches\.meta\.txt): .*{value}"):
            open_cifar("cifar10", folder)
    (folder / "batches.meta.txt").write_text("cat cat")
    with pytest.raises(UserError, match=r"batches\.meta\.txt"):
        open_cifar("cifar10", folder)
    (folder / "batches.meta.txt").unlink()
    with pytest.raises(UserError, match=r"batches\.meta\.txt"):
        open_cifar("cifar10", folder)
