"""Copies to devices on a machine without an accelerator: nothing is pinned, and nothing is copied needlessly."""

import pytest
import torch

from nuclr.transfer import can_pin, to_device


@pytest.mark.parametrize("name", ["cpu", "meta", "mps"])
def test_memory_is_pinned_for_no_such_device(name):
    assert not can_pin(torch.device(name))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_memory_is_not_pinned_without_an_accelerator():
    assert not can_pin(torch.device("cuda"))


def test_a_tensor_on_its_device_is_not_copied():
    tensor = torch.arange(4)
    assert to_device(tensor, torch.device("cpu")) is tensor


def test_the_dtype_and_shape_are_kept():
    moved = to_device(torch.zeros(2, 3, dtype=torch.uint8), torch.device("meta"))
    assert (moved.device.type, moved.dtype, moved.shape) == ("meta", torch.uint8, (2, 3))
