"""The archives of CIFAR: the same images from every version, and damaged files."""

import gzip
import io
import tarfile

import numpy as np
import pytest

from nuclr.data.formats import cifar
from nuclr.data.formats.cifar import open_cifar
from nuclr.errors import UserError
from tests.data import layouts


def test_all_versions_hold_the_same_images(tmp_path):
    writers = {"cifar10": (layouts.cifar10_binary, layouts.cifar10_python),
               "cifar100": (layouts.cifar100_binary, layouts.cifar100_python)}  # fmt: skip
    pixels = layouts.cifar_pixels()
    for name, (binary, python) in writers.items():
        archive = "cifar-10-python.tar.gz" if name == "cifar10" else "cifar-100-binary.tar.gz"
        packed = layouts.pack((python if name == "cifar10" else binary)(tmp_path / f"{name}_packed"), archive)
        folder = binary(tmp_path / f"{name}_binary")
        places = [folder, next(folder.iterdir()), python(tmp_path / f"{name}_python"), packed, packed.parent]
        opened = [open_cifar(name, place) for place in places]
        assert len({images.fingerprint for images in opened}) == 1
        for images in opened:
            assert images.y_id.tolist() == [n % len(images.classes) for n in range(6)]
            image = np.asarray(images.x(4))
            assert image.shape == (32, 32, 3) and image[1, 2].tolist() == pixels[4, [34, 1058, 2082]].tolist()
            assert images.y(1) == images.classes[1] and images[3].y_id == images.y_id[3]
    assert images.classes[1] == "aquarium fish" and images.keys[1] == "aquarium_fish"
    assert open_cifar("cifar10", tmp_path / "nothing") is None


def test_damaged_files_are_refused(tmp_path, monkeypatch):
    folder = layouts.cifar10_binary(tmp_path / "binary") / "cifar-10-batches-bin"
    content = (folder / "test_batch.bin").read_bytes()
    for damaged, message in (
        (content[:-1], "not a multiple of 3,073"),
        (b"", "0 bytes"),
        (b"\x09" + content[1:], "label 9"),
    ):
        (folder / "test_batch.bin").write_bytes(damaged)
        with pytest.raises(UserError, match=rf"test_batch\.bin: .*{message}"):
            open_cifar("cifar10", folder)
    (folder / "batches.meta.txt").write_text("cat cat")
    with pytest.raises(UserError, match="does not list the names"):
        open_cifar("cifar10", folder)
    monkeypatch.setattr(cifar, "MOST_BYTES", 100)
    with pytest.raises(UserError, match=r"test_batch\.bin: has 18,438 bytes"):
        open_cifar("cifar10", folder)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"labels": [1], "data": [1]}, "'data' is not an array of 3,072 bytes"),
        ({"labels": [1], "data": layouts.cifar_pixels()}, "'labels' is not a list of 6 whole numbers"),
        ({"labels": ["a"] * 6, "data": layouts.cifar_pixels()}, "'labels' is not a list of 6"),
        ([1, 2], "'data' is not an array"),
    ],
)
def test_python_files_with_other_content_are_refused(tmp_path, batch, message):
    folder = layouts.cifar10_python(tmp_path / "python") / "cifar-10-batches-py"
    (folder / "test_batch").write_bytes(layouts.python2_pickle(batch))
    with pytest.raises(UserError, match=f"test_batch: {message}"):
        open_cifar("cifar10", folder)


def test_wrong_archives_are_refused(tmp_path, monkeypatch):
    archive = tmp_path / "cifar-10-python.tar.gz"
    for content in (b"no archive", gzip.compress(b"no tar"), gzip.compress(b"\0" * 2000)):
        archive.write_bytes(content)
        with pytest.raises(UserError, match=r"cifar-10-python\.tar\.gz: "):
            open_cifar("cifar10", archive)
    whole = layouts.pack(layouts.cifar10_python(tmp_path / "python"), archive.name).read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="not the original archive, or damaged"):
        open_cifar("cifar10", archive)
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("cifar-10-batches-py/test_batch"), io.BytesIO())
    with pytest.raises(UserError, match=r"holds no cifar-10-batches-py/batches\.meta"):
        open_cifar("cifar10", archive)
    archive.write_bytes(whole)
    monkeypatch.setattr(cifar, "MOST_UNPACKED", 1000)
    with pytest.raises(UserError, match="more than 1,000 bytes unpacked"):
        open_cifar("cifar10", archive)
