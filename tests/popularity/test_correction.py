"""Correction of hubs: the popularity of a gallery, as a bias and as an additional coordinate."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from nuclr.evaluation import query_ranks
from nuclr.popularity import Bank, append_bias, append_one, bias_from_scores, gallery_bias, solve
from nuclr.popularity.correction import score_std


def features(seed=0, n=60, d=8, noise=0.6):
    """Images with one caption each, and a hub: a caption near to all images."""
    generator = torch.Generator().manual_seed(seed)
    x = normalize(torch.randn(n, d, generator=generator) + 1, dim=1)
    y = normalize(x + noise * torch.randn(n, d, generator=generator) / d**0.5, dim=1)
    y[0] = normalize(torch.ones(d), dim=0)
    return x, y, torch.arange(n)[:, None].expand(n, 2)


def test_bias_is_the_solvers_zeta():
    x, y, _ = features()
    zeta = solve(x, y[:40], temperature=0.1, tolerance=1e-3).zeta
    assert torch.allclose(gallery_bias(x, y[:40], 0.1), zeta)
    assert torch.allclose(gallery_bias(x, y[:40], 0.1, strength=0.5), 0.5 * zeta)
    assert torch.allclose(bias_from_scores(x @ y[:40].T, 0.1), zeta, atol=1e-4)
    assert int(gallery_bias(x, y, 0.1).argmax()) == 0


def test_the_banks_queries_choose_from_its_candidates():
    x, y, _ = features(n=50)
    bank_x, bank_y, _ = features(seed=1, n=70)
    solution = solve(bank_x.double(), bank_y.double(), temperature=0.1, tolerance=1e-9)
    probabilities = torch.exp(
        (bank_x @ y.T).double() / 0.1 - solution.log_z[:, None]
    )  # the definition of q, without `extend`
    expected = 0.1 * probabilities.sum(dim=0).log()
    expected -= expected.mean()
    bias = gallery_bias(bank_x, y, 0.1, strength=2.0, candidates=bank_y)
    assert torch.allclose(bias.double(), 2 * expected, atol=1e-3)
    assert torch.allclose(bias_from_scores(bank_x @ y.T, 0.1, candidates=bank_x @ bank_y.T), bias / 2, atol=1e-4)
    bias_x, bias_y = Bank(bank_x, bank_y).biases(x, y, 0.1)
    assert torch.allclose(bias_y, bias / 2)
    assert torch.allclose(bias_x, gallery_bias(bank_y, x, 0.1, candidates=bank_x))


def test_a_bank_equal_to_the_gallery_gives_the_gallerys_own_zeta():
    x, y, _ = features()
    bias_x, bias_y = Bank(x, y).biases(x, y, 0.1)
    assert torch.allclose(bias_y, gallery_bias(x, y, 0.1), atol=2e-4)  # up to tau times the residual
    assert torch.allclose(bias_x, gallery_bias(y, x, 0.1), atol=2e-4)


def test_an_additional_coordinate_gives_the_corrected_scores():
    x, y, links = features()
    bias = gallery_bias(x, y, 0.1)
    assert torch.allclose(append_one(x) @ append_bias(y, bias).T, x @ y.T - bias, atol=1e-6)
    by_bias, by_coordinate = query_ranks(x, y, links, bias), query_ranks(append_one(x), append_bias(y, bias), links)
    assert torch.equal(by_bias.above, by_coordinate.above)


def test_correction_raises_recall_if_there_is_a_hub():
    x, y, links = features(n=300)
    bank = features(seed=1, n=400)[0]
    bias = gallery_bias(bank, y, 0.05)
    assert float(query_ranks(x, y, links, bias).hits(1).mean()) > float(query_ranks(x, y, links).hits(1).mean())


def test_score_std_is_that_of_all_scores():
    x, y, _ = features()
    y = y[:40]
    assert score_std(x, y + 0.3) == pytest.approx(float((x.double() @ (y + 0.3).double().T).std(correction=0)))
    scores = x @ y.T
    assert torch.allclose(gallery_bias(x, y), gallery_bias(x, y, 0.6 * score_std(x, y)))
    assert torch.allclose(bias_from_scores(scores), bias_from_scores(scores, 0.6 * float(scores.std())))


def test_numpy_arrays_give_the_same_tensors():
    x, y, _ = features()
    bank_x, bank_y, _ = features(seed=1)
    arrays = [side.numpy() for side in (x, y, bank_x, bank_y)]
    bias = gallery_bias(bank_x, y, 0.1, candidates=bank_y)
    assert torch.equal(gallery_bias(arrays[2], arrays[1], 0.1, candidates=arrays[3]), bias)
    assert torch.equal(bias_from_scores((bank_x @ y.T).numpy(), 0.1), bias_from_scores(bank_x @ y.T, 0.1))
    for ours, theirs in zip(
        Bank(*arrays[2:]).biases(*arrays[:2], 0.1), Bank(bank_x, bank_y).biases(x, y, 0.1), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert torch.equal(append_bias(arrays[1], bias.numpy()), append_bias(y, bias))
    assert torch.equal(append_one(arrays[0]), append_one(x))
    assert score_std(arrays[0], arrays[1]) == score_std(x, y)


def test_features_of_other_norms_are_refused_or_normalized():
    x, y, _ = features()
    for arguments, name in (((3 * x, y), "bank"), ((x, 3 * y), "gallery"), ((x, y, 0.1, 1.0, 3 * y), "candidates")):
        with pytest.raises(ValueError, match=rf"{name}: row 0 has norm 3 .*normalize=True"):
            gallery_bias(*arguments)
    bias = gallery_bias(x, y, candidates=y)
    assert torch.allclose(gallery_bias(3 * x, 2 * y, candidates=5 * y, normalize=True), bias, atol=1e-5)
    with pytest.raises(ValueError, match=r"y: row 0 has norm 2"):
        Bank(x, 2 * y)
    scaled = Bank(2 * x, 3 * y, normalize=True).biases(4 * x, 5 * y, None)
    for ours, theirs in zip(scaled, Bank(x, y).biases(x, y, None), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_wrong_arguments_are_named():
    x, y, _ = features()
    with pytest.raises(ValueError, match="temperature=-1"):
        gallery_bias(x, y, -1.0)
    with pytest.raises(ValueError, match="gallery is list"):
        gallery_bias(x, y.tolist())
    with pytest.raises(ValueError, match=r"scores\[0, 0\]=nan"):
        bias_from_scores(np.full((3, 3), np.nan))
    with pytest.raises(ValueError, match=r"bias has shape \(3,\); it must be \(60,\)"):
        append_bias(y, torch.zeros(3))
