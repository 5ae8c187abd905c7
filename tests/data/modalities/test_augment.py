"""Augmentation: the same for any number of processes, and each operation does what its name says."""

import pytest
import torch

from nuclr.data import Augment, normalize
from nuclr.data.modalities.augment import COLOR, GEOMETRY, MEAN, OPERATIONS, STD, Draw

IMAGES = torch.randint(256, (8, 3, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
QUIET = {"scale": (1.0, 1.0), "flip": 0.0, "operations": 0}


@pytest.mark.parametrize("world", [2, 4])
def test_each_process_augments_its_slice_of_the_global_batch(world):
    augment = Augment(16, seed=1)
    whole = augment(IMAGES, epoch=2, step=7)
    parts = [augment(part, 2, 7, rank, world) for rank, part in enumerate(IMAGES.chunk(world))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-6)


def test_choices_depend_only_on_seed_epoch_and_step():
    first = Augment(16, seed=1)(IMAGES, 2, 7)
    torch.manual_seed(5)
    torch.testing.assert_close(Augment(16, seed=1)(IMAGES, 2, 7), first, rtol=0, atol=0)
    for seed, epoch, step in ((2, 2, 7), (1, 3, 7), (1, 2, 8)):
        assert (Augment(16, seed=seed)(IMAGES, epoch, step) - first).abs().mean() > 0.01
    assert first.shape == (8, 3, 16, 16) and first.min() >= 0 and first.max() <= 1


def test_without_any_operation_images_do_not_change():
    torch.testing.assert_close(Augment(20, **QUIET)(IMAGES, 0, 0), IMAGES / 255, rtol=0, atol=1e-5)


def test_flip_mirrors_images():
    flipped = Augment(20, **(QUIET | {"flip": 1.0}))(IMAGES, 0, 0)
    torch.testing.assert_close(flipped, IMAGES.flip(-1) / 255, rtol=0, atol=1e-5)


def test_crops_are_within_the_image_and_have_the_requested_area():
    theta = Augment(16, scale=(0.3, 0.9), operations=0).draw(2000, 0, 0).theta
    width, height, shift = theta[:, 0, 0].abs(), theta[:, 1, 1], theta[:, :, 2].abs()
    assert (width + shift[:, 0]).max() <= 1 + 1e-6 and (height + shift[:, 1]).max() <= 1 + 1e-6
    area = width * height
    assert area.max() <= 0.9 + 1e-6 and (area < 0.3).float().mean() < 0.02  # the widest are clipped
    assert 0.45 < (theta[:, 0, 0] < 0).float().mean() < 0.55
    assert ((width / height) < 4 / 3 + 1e-6).all() and ((width / height) > 3 / 4 - 1e-6).all()


def test_every_operation_is_drawn_and_changes_the_image():
    operations = Augment(16).draw(4000, 0, 0).operations
    counts = operations.flatten().bincount(minlength=len(OPERATIONS)) / operations.numel()
    assert abs(counts[0] - 0.55) < 0.03 and (counts[1:] - 0.05).abs().max() < 0.01
    smooth = torch.nn.functional.interpolate(IMAGES[:, :, :4, :4] / 400 + 0.2, size=20, mode="bilinear")
    for name in COLOR:
        draw = Draw(torch.eye(2, 3).repeat(8, 1, 1), torch.full((8, 1), OPERATIONS.index(name)))
        changed = Augment(20).apply(smooth.clone(), draw)
        assert (changed - smooth).abs().amax(dim=(1, 2, 3)).min() > 0.005, name
        assert changed.min() >= 0 and changed.max() <= 1
    assert set(OPERATIONS) == {"identity", *COLOR, *GEOMETRY}


def test_rotation_turns_by_the_magnitude():
    augment = Augment(21, scale=(1.0, 1.0), flip=0.0, operations=1, magnitude=10.0)
    draw = augment.draw(400, 0, 0)
    turned = (draw.operations[:, 0] == OPERATIONS.index("rotate")).nonzero().flatten()
    thetas = draw.theta[turned]
    torch.testing.assert_close(torch.linalg.det(thetas[:, :, :2]), torch.ones(len(turned)))
    assert set(torch.rad2deg(torch.asin(thetas[:, 1, 0])).round().tolist()) == {-30.0, 30.0}


def test_normalize_uses_the_mean_and_deviation_per_channel():
    expected = (IMAGES / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(normalize(IMAGES), expected)
    torch.testing.assert_close(normalize(IMAGES / 255), expected)
