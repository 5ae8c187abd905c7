"""Checked arrays: types, rows that are checked once, norms of extreme rows, copies to devices."""

import math

import numpy as np
import pytest
import torch

from nuclr import arrays
from nuclr.arrays import (
    as_features,
    as_integers,
    as_links,
    as_rows,
    as_tensor,
    as_vector,
    can_pin,
    evenly_spaced,
    free_memory,
    rescale_extreme_rows,
    to_device,
)

X = torch.nn.functional.normalize(torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), dim=1)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (X[0], r"x is float32 of shape \(4,\)"),
        (X.int(), "x is int32"),
        (X.tolist(), "x is list"),
        ("file", "x is 'file'"),
        (X.numpy().astype(str), "x is a numpy array of <U"),
        (X.masked_fill(torch.eye(12, 4) > 0, math.nan), r"x\[0, 0\]=nan"),
        (X.masked_fill((torch.arange(12) == 11)[:, None], math.inf), r"x\[11, 0\]=inf"),
        (X * (1 + 0.02 * (torch.arange(12) == 9)[:, None]), r"x: row 9 has norm 1.02 \(1 of"),
        (X[:, :3], "x has 3 columns.*4"),
    ],
)
def test_wrong_features_are_named(value, words, monkeypatch):
    monkeypatch.setattr(arrays, "BLOCK", 5)  # a row of a later block has its own number
    with pytest.raises(ValueError, match=words):
        as_features("x", value, width=4)
    with pytest.raises(TypeError, match="x is list"):
        as_tensor("x", [1.0])
    with pytest.raises(ValueError, match="x: row 3"):
        as_features("x", X * (torch.arange(12) != 3)[:, None], "normalize")


def test_rows_are_checked_once(monkeypatch):
    checks = []
    monkeypatch.setattr(arrays, "check_finite", lambda name, *_: checks.append(name))
    rows = as_rows("x", X.numpy())
    again = as_rows("y", as_rows("y", rows), "any", width=4)
    assert checks == ["x"] and again.stored is rows.stored
    assert torch.equal(as_features("y", rows.take(torch.tensor([7, 2]))), X[[7, 2]]) and checks == ["x"]
    free = as_rows("x", 2 * X, "any")
    assert torch.allclose(as_rows("y", free, "normalize")[:], X)
    with pytest.raises(ValueError, match="y: row 0 has norm 2"):
        as_rows("y", free)


def test_numpy_arrays_of_any_layout_are_read():
    array = np.arange(12.0).reshape(3, 4)
    frozen = array.copy()
    frozen.flags.writeable = False
    for other in (array[::-1, ::2], array.T, array.astype(">f8"), frozen):
        assert np.array_equal(as_tensor("x", other).numpy(), other)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: as_vector("bias", [1, 2], 3), r"bias.*\(2,\).*3"),
        (lambda: as_vector("bias", [1, math.nan], 2), "bias"),
        (lambda: as_vector("bias", [[1], [1, 2]], 2), "bias"),
        (lambda: as_integers("labels", [0.5, 1], 2), "labels.*float64"),
        (lambda: as_integers("labels", [True, False], 2), "labels.*bool"),
        (lambda: as_integers("labels", [[1, 2]], None), r"labels.*\(1, 2\)"),
        (lambda: as_links("links", [[0, 3]], 1, 3, ("queries", "gallery")), "links.*row 3.*gallery"),
        (lambda: as_links("links", [[-1, 0]], 1, 3), "links.*row -1.*x"),
        (lambda: as_links("links", np.zeros((0, 2), int), 1, 3), "links has no rows"),
    ],
)
def test_wrong_vectors_integers_and_links_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_evenly_spaced_numbers_reach_both_ends():
    assert evenly_spaced(5, 9).tolist() == [0, 1, 2, 3, 4]
    for total in range(2, 60):
        for size in range(2, total):
            numbers = evenly_spaced(total, size).tolist()
            assert (numbers[0], numbers[-1], len(set(numbers))) == (0, total - 1, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_rows_get_a_norm_that_can_be_computed(dtype):
    ordinary = torch.randn(4, 6, dtype=dtype)
    large, small = (1e25, 1e-25) if dtype == torch.float32 else (1e200, 1e-200)
    features = torch.stack([ordinary[0], ordinary[1] * large, ordinary[2] * small, torch.zeros(6, dtype=dtype)])
    scaled = rescale_extreme_rows(features)
    assert torch.equal(scaled[0], ordinary[0]) and not scaled[3].any()
    torch.testing.assert_close(
        torch.nn.functional.normalize(scaled[:3], dim=1), torch.nn.functional.normalize(ordinary[:3], dim=1)
    )
    kept = rescale_extreme_rows(features, small=False)
    assert torch.equal(kept[2], features[2]) and torch.equal(kept[1], scaled[1])
    # The gradient is that of normalizing the rows in float64.
    rows = (ordinary.double() * 1e25).to(dtype).requires_grad_()
    wide = rows.detach().double().requires_grad_()
    for value in (rescale_extreme_rows(rows), wide):
        (torch.nn.functional.normalize(value, dim=1) * torch.arange(6.0)).sum().backward()
    torch.testing.assert_close(rows.grad.double() * 1e25, wide.grad * 1e25, rtol=1e-4, atol=1e-5)
    for ordinary in (torch.randn(5, 7), torch.randn(5, 7).double() * 1e100, torch.zeros(3, 2), torch.empty(0, 4)):
        assert rescale_extreme_rows(ordinary) is ordinary, "returned unchanged"


def test_copies_to_devices():
    pinned = ["cpu", "meta", "mps"] + ([] if torch.accelerator.is_available() else ["cuda"])
    assert not any(can_pin(torch.device(name)) for name in pinned)
    tensor = torch.zeros(2, 3, dtype=torch.uint8)
    assert to_device(tensor, torch.device("cpu")) is tensor
    moved = to_device(tensor, torch.device("meta"))
    assert (moved.device.type, moved.dtype, moved.shape) == ("meta", torch.uint8, (2, 3))


def test_free_memory_is_that_of_the_container(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr("nuclr.arrays.CONTAINER", tmp_path)
    free = free_memory(cpu)
    for name, content in {
        "max": "9000",
        "current": "7000",
        "stat": "anon 4\nactive_file 20\ninactive_file 300",
    }.items():
        (tmp_path / f"memory.{name}").write_text(content)
    assert free > free_memory(cpu) == 2320
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(cpu) > 2320
