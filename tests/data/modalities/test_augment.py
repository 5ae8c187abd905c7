"""Augmentation: the same for any number of processes, and each operation does what its name says."""

import numpy as np
import pytest
import torch

from nuclr.data import Augment
from nuclr.data.modalities.augment import (
    COLOR,
    GEOMETRY,
    OPERATIONS,
    Draw,
    covering_side,
    random_crops,
)

IMAGES = torch.randint(256, (8, 3, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("world", [2, 4])
def test_each_process_augments_its_slice_of_the_global_batch(world):
    augment = Augment(seed=1)
    whole = augment(IMAGES, epoch=2, step=7)
    parts = [augment(part, 2, 7, rank=rank, world=world) for rank, part in enumerate(IMAGES.chunk(world))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-6)
    crops = random_crops(8, (0.2, 1.0), 1, 2, 7)
    local = [random_crops(8 // world, (0.2, 1.0), 1, 2, 7, 0, rank, world) for rank in range(world)]
    np.testing.assert_array_equal(np.concatenate([part.position for part in local]), crops.position)
    boxes = [part.box(row, 50, 40) for part in local for row in range(8 // world)]
    assert boxes == [crops.box(row, 50, 40) for row in range(8)]


def test_choices_depend_only_on_seed_epoch_step_and_view():
    first = Augment(seed=1)(IMAGES, 2, 7)
    torch.manual_seed(5)
    torch.testing.assert_close(Augment(seed=1)(IMAGES, 2, 7), first, rtol=0, atol=0)
    assert first.shape == IMAGES.shape and first.min() >= 0 and first.max() <= 1
    crops = random_crops(8, (0.2, 1.0), 1, 2, 7)
    for seed, epoch, step, view in ((2, 2, 7, 0), (1, 3, 7, 0), (1, 2, 8, 0), (1, 2, 7, 1)):
        assert (Augment(seed=seed)(IMAGES, epoch, step, view) - first).abs().mean() > 0.01
        assert not (random_crops(8, (0.2, 1.0), seed, epoch, step, view).position == crops.position).any()


def test_flip_mirrors_images():
    images = IMAGES / 255
    torch.testing.assert_close(Augment(flip=0.0, operations=0)(images, 0, 0), IMAGES / 255, rtol=0, atol=0)
    torch.testing.assert_close(Augment(flip=1.0, operations=0)(IMAGES, 0, 0), IMAGES.flip(-1) / 255, rtol=0, atol=0)
    flipped = Augment(flip=0.5, operations=0).draw(2000, 0, 0).flip
    assert 0.45 < flipped.float().mean() < 0.55


@pytest.mark.parametrize(("width", "height"), [(640, 480), (100, 100), (300, 500)])
def test_crops_are_within_the_image_and_have_the_requested_area(width, height):
    crops = random_crops(2000, (0.3, 0.9), 0, 0, 0)
    boxes = np.array([crops.box(row, width, height) for row in range(2000)])
    left, top, right, bottom = boxes.T
    assert left.min() == 0 and top.min() == 0 and right.max() == width and bottom.max() == height  # edges are reached
    share = (right - left) * (bottom - top) / (width * height)
    assert share.min() > 0.29 and share.max() < 0.91
    ratio = (right - left) / (bottom - top)
    assert ratio.min() > 0.73 and ratio.max() < 1.37


@pytest.mark.parametrize(("width", "height", "box"), [(400, 10, (193, 0, 206, 10)), (10, 400, (0, 193, 10, 206))])
def test_an_image_that_no_crop_fits_into_gives_its_middle(width, height, box):
    assert random_crops(1, (0.9, 1.0), 0, 0, 0).box(0, width, height) == box


@pytest.mark.parametrize("share", [0.08, 0.5, 1.0])
def test_crops_of_an_image_of_the_covering_side_have_enough_pixels(share):
    side = covering_side(64, share)
    crops = random_crops(500, (share, 1.0), 0, 0, 0)
    boxes = np.array([crops.box(row, side, side) for row in range(500)])
    assert (boxes[:, 2:] - boxes[:, :2]).min() >= 63


def test_every_operation_is_drawn_and_changes_the_image():
    operations = Augment().draw(4000, 0, 0).operations
    counts = operations.flatten().bincount(minlength=len(OPERATIONS)) / operations.numel()
    assert abs(counts[0] - 0.55) < 0.03 and (counts[1:] - 0.05).abs().max() < 0.01
    smooth = torch.nn.functional.interpolate(IMAGES[:, :, :4, :4] / 400 + 0.2, size=20, mode="bilinear")
    for name in COLOR:
        still, name_at = torch.eye(2, 3).repeat(8, 1, 1), torch.full((8, 1), OPERATIONS.index(name))
        changed = Augment().apply(smooth, Draw(torch.zeros(8, dtype=torch.bool), still, name_at))
        assert (changed - smooth).abs().amax(dim=(1, 2, 3)).min() > 0.005, name
        assert changed.min() >= 0 and changed.max() <= 1
    assert set(OPERATIONS) == {"identity", *COLOR, *GEOMETRY}


def test_rotation_turns_by_the_magnitude():
    augment = Augment(operations=1, magnitude=10.0)
    draw = augment.draw(400, 0, 0)
    turned = (draw.operations[:, 0] == OPERATIONS.index("rotate")).nonzero().flatten()
    thetas = draw.theta[turned]
    torch.testing.assert_close(torch.linalg.det(thetas[:, :, :2]), torch.ones(len(turned)))
    assert set(torch.rad2deg(torch.asin(thetas[:, 1, 0])).round().tolist()) == {-30.0, 30.0}


def test_no_value_is_read_back_from_the_device():
    """Tensors on "meta" have no values, so an operation that reads one, and would make an accelerator wait, fails."""
    augment = Augment(operations=2)
    draw = augment.draw(64, 0, 0)
    assert set(draw.operations.flatten().tolist()) == set(range(len(OPERATIONS)))
    images = torch.empty(64, 3, 20, 20, dtype=torch.uint8, device="meta")
    assert augment.apply(images, draw).device.type == "meta"


def test_pixels_from_outside_have_the_brightness_of_fill():
    shift = torch.tensor([[[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]])  # by half of the width
    draw = Draw(torch.tensor([False]), shift, torch.zeros(1, 1, dtype=torch.int64))
    for fill in (0.0, 0.5):
        image = Augment(fill=fill).apply(IMAGES[:1], draw)
        torch.testing.assert_close(image[..., 11:], torch.full_like(image[..., 11:], fill))
        torch.testing.assert_close(image[..., :9], IMAGES[:1, :, :, 10:19] / 255)
