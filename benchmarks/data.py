"""Images per second and core of training batches: random resized crops and flips, from JPEG files to float tensors.

    python benchmarks/data.py [--images FOLDER] [--count 1500] [--size 64] [--operations 0] [--repeats 3]
    python benchmarks/data.py --size 256 --memory 0 --rates 500 1000 2000     # CC3M's setting: nothing stays in memory

Contestants, which take turns in one run:

- crops of the original: what `nuclr train` does. Crops are taken from the decoded image.
- until the copy to the device: the same without flips, operations and normalization.
- crops of the square: what it did before. The central square of the training size is loaded, and crops of it are
  enlarged again. It decodes fewer pixels of small images, but never sees what is outside of the square.
- DataLoader with PIL: torch.utils.data.DataLoader with worker processes; each image is decoded, cropped, resized
  (bicubic) and flipped by Pillow, as in most published code.

The first epoch of each turn decodes all images ("cold"); the second one finds them in memory if they fit ("warm", not
for the DataLoader, which has no cache). Images per second and core are images by CPU seconds of all threads and worker
processes, so they hardly depend on what else the machine does. The cores that a rate of training needs are the rate by
the images per second and core. Without --images, JPEGs of 500 x 375 pixels are made.

"Until the copy to the device" leaves out flips, operations and normalization, which run on the device in `nuclr train`:
with a GPU, only these images per second and core count.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample
from torch.utils.data import DataLoader, Dataset

from nuclr.data import Augment, ImageOptions, Loader, open_pairs
from nuclr.data.modalities.augment import Crops, random_crops
from nuclr.models.image_format import IMAGENET_MEAN, IMAGENET_STD, ImageFormat

SCALE = (0.5, 1.0)
NORMALIZED = ImageFormat(224, IMAGENET_MEAN, IMAGENET_STD)
Epoch = Callable[[int], Iterator[Tensor]]


def make_images(folder: Path, count: int) -> None:
    """Write JPEGs with the spectrum of photographs, roughly: noise of several scales."""
    rng = np.random.default_rng(0)
    for number in range(count):
        layers = [
            np.asarray(
                Image.fromarray(rng.integers(256, size=(n, n, 3), dtype=np.uint8)).resize((500, 375)), np.float32
            )
            for n in (4, 16, 64, 256)
        ]
        pixels = sum(weight * layer for weight, layer in zip((0.5, 0.25, 0.15, 0.1), layers, strict=True))
        Image.fromarray(np.asarray(pixels).astype(np.uint8)).save(folder / f"{number:05}.jpg", quality=90)


def batches(count: int, batch: int, epoch: int) -> list[np.ndarray]:
    order = np.random.default_rng([0, epoch]).permutation(count)
    return [order[begin : begin + batch] for begin in range(0, count - batch + 1, batch)]


def crops_of_originals(folder: Path, options: argparse.Namespace, count: int, on_host: bool = True) -> Epoch:
    pairs = open_pairs(folder, views=True)
    loader = Loader(pairs, ImageOptions(options.size, smallest_crop=SCALE[0]), workers=2, memory=options.memory * 2**20)
    augment = Augment(0, 0.5, options.operations)

    def epoch(number: int) -> Iterator[Tensor]:
        numbers = batches(count, options.batch, number)
        crops = ({"x": [random_crops(options.batch, SCALE, 0, number, step)]} for step in range(len(numbers)))
        for step, batch in enumerate(loader.load(numbers, side="x", crops=crops)):
            yield NORMALIZED.normalize(augment(batch.x, number, step)) if on_host else batch.x

    return epoch


def until_the_copy(folder: Path, options: argparse.Namespace, count: int) -> Epoch:
    return crops_of_originals(folder, options, count, on_host=False)


def crops_of_squares(folder: Path, options: argparse.Namespace, count: int) -> Epoch:
    pairs = open_pairs(folder, views=True)
    loader = Loader(pairs, ImageOptions(options.size), workers=2, memory=options.memory * 2**20)
    augment = Augment(0, 0.0, options.operations)

    def epoch(number: int) -> Iterator[Tensor]:
        for step, batch in enumerate(loader.load(batches(count, options.batch, number), side="x")):
            crops = random_crops(options.batch, SCALE, 0, number, step)
            boxes = np.array([crops.box(row, 1000, 1000) for row in range(options.batch)]) / 500 - 1
            left, top, right, bottom = torch.from_numpy(boxes).float().unbind(1)
            flip = torch.from_numpy(np.random.default_rng([number, step]).choice([-1.0, 1.0], options.batch)).float()
            theta = torch.zeros(options.batch, 2, 3)
            theta[:, 0, 0], theta[:, 0, 2] = flip * (right - left) / 2, (left + right) / 2
            theta[:, 1, 1], theta[:, 1, 2] = (bottom - top) / 2, (top + bottom) / 2
            pixels = batch.x.float() / 255
            grid = affine_grid(theta, list(pixels.shape), align_corners=False)
            yield NORMALIZED.normalize(augment(grid_sample(pixels, grid, align_corners=False), number, step))

    return epoch


class Photographs(Dataset):
    """Images that Pillow decodes, crops, resizes and flips."""

    def __init__(self, paths: list[Path], size: int, crops: dict[int, Crops]) -> None:
        self.paths, self.size, self.crops = paths, size, crops

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, key: tuple[int, int, int]) -> Tensor:
        number, step, row = key
        with Image.open(self.paths[number]) as image:
            box = self.crops[step].box(row, *image.size)
            part = image.convert("RGB").crop(box).resize((self.size, self.size), Image.Resampling.BICUBIC)
        if (number + step) % 2:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(part)).permute(2, 0, 1)


def find_images(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg", ".png"))


def data_loader(folder: Path, options: argparse.Namespace, count: int) -> Epoch:
    paths = find_images(folder)
    augment = Augment(0, 0.0, options.operations)

    def epoch(number: int) -> Iterator[Tensor]:
        numbers = batches(count, options.batch, number)
        crops = {step: random_crops(options.batch, SCALE, 0, number, step) for step in range(len(numbers))}
        keys = [[(int(n), step, row) for row, n in enumerate(batch)] for step, batch in enumerate(numbers)]
        images = Photographs(paths, options.size, crops)
        for step, pixels in enumerate(DataLoader(images, batch_sampler=keys, num_workers=2)):
            yield NORMALIZED.normalize(augment(pixels, number, step))

    return epoch


def cpu_seconds() -> float:
    """Return the CPU time of this process, its threads, and its worker processes that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


def measure(epoch: Epoch, number: int) -> tuple[float, float]:
    """Return images per CPU second and images per second of one epoch."""
    cpu, wall, images = cpu_seconds(), time.perf_counter(), 0
    for pixels in epoch(number):
        images += len(pixels)
    return images / (cpu_seconds() - cpu), images / (time.perf_counter() - wall)


CONTESTANTS = {
    "crops of the original": crops_of_originals,
    "until the copy to the device": until_the_copy,
    "crops of the square": crops_of_squares,
    "DataLoader with PIL": data_loader,
}


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="a folder of images")
    parser.add_argument("--count", type=int, default=1500, help="images to make without --images, and to read")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--operations", type=int, default=0, help="operations of the random policy per image")
    parser.add_argument("--memory", type=int, default=2048, help="megabytes of decoded images to keep")
    parser.add_argument("--rates", type=float, nargs="+", default=[500, 1000, 2000], help="images per second to feed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "data.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rates: dict[str, dict[str, list[tuple[float, float]]]] = {name: {"cold": [], "warm": []} for name in CONTESTANTS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.images or Path(scratch)
        if options.images is None:
            make_images(folder, options.count)
        count = min(options.count, len(find_images(folder)))
        for turn in range(options.repeats):
            for name, make in CONTESTANTS.items():
                epoch = make(folder, options, count)
                rates[name]["cold"].append(measure(epoch, 2 * turn))
                if make is not data_loader:
                    rates[name]["warm"].append(measure(epoch, 2 * turn + 1))
    best = {
        name: {state: [max(values) for values in zip(*turns, strict=True)] for state, turns in states.items() if turns}
        for name, states in rates.items()
    }
    base = best["DataLoader with PIL"]["cold"][0]
    print(f"{count} images, size {options.size}, {options.operations} operations; best of {options.repeats} turns")
    needed = "".join(f"{f'for {rate:,.0f}/s':>12}" for rate in options.rates)
    print(f"{'':30}{'':6}{'images/s and core':>18}{'x DataLoader':>14}{'images/s':>10}    cores{needed}")
    rows = []
    for name, states in best.items():
        for state, (per_core, per_second) in states.items():
            cores = {f"{rate:g}": rate / per_core for rate in options.rates}
            row = {"what": name, "state": state, "images_per_second_and_core": per_core}
            rows.append(row | {"images_per_second": per_second, "cores_for": cores})
            cells = "".join(f"{value:12.1f}" for value in cores.values())
            print(f"{name:30}{state:6}{per_core:18,.0f}{per_core / base:14.2f}{per_second:10,.0f}{'':9}{cells}")
    options.out.parent.mkdir(exist_ok=True)
    content = {"images": count, "size": options.size, "operations": options.operations, "rates": rows}
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
