"""Rows whose squares over- or underflow are scaled before their norm is computed; all others stay as they are."""

import pytest
import torch

from nuclr.norms import rescale_extreme_rows


def test_ordinary_rows_are_returned_unchanged():
    for features in (torch.randn(5, 7), torch.randn(5, 7).double() * 1e100, torch.zeros(3, 2), torch.empty(0, 4)):
        assert rescale_extreme_rows(features) is features


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


def test_the_gradient_is_that_of_normalizing():
    ordinary = torch.randn(3, 4, dtype=torch.float64)
    features = (ordinary * 1e25).float().requires_grad_()
    weight = torch.randn(3, 4)
    (torch.nn.functional.normalize(rescale_extreme_rows(features), dim=1) * weight).sum().backward()
    reference = (ordinary * 1e25).requires_grad_()
    (torch.nn.functional.normalize(reference, dim=1) * weight.double()).sum().backward()
    torch.testing.assert_close(features.grad.double() * 1e25, reference.grad * 1e25, rtol=1e-4, atol=1e-5)
