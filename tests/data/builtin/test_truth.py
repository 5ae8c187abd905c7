"""The truth about the built-in pairs, compared with enumeration, sums over all pictures, and the exact solver."""

import numpy as np
import pytest
import torch

from nuclr.data.builtin import FLOOR, BuiltinPairs, Truth
from nuclr.data.builtin.grammar import LEVELS, SLOTS, WORDS
from nuclr.popularity import solve

CAPTIONS = np.arange(np.prod(WORDS), dtype=np.int32)
SCENES = np.arange(np.prod(LEVELS), dtype=np.int32)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return the rank correlation; ties get their mean rank."""
    ranks = []
    for values in (a, b):
        _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((count.cumsum() - (count - 1) / 2)[inverse])
    return float(np.corrcoef(*ranks)[0, 1])


def test_probabilities_of_all_captions_sum_to_one():
    pairs = Truth(SCENES[::97], CAPTIONS)
    total = np.exp(pairs.log_p(np.arange(len(pairs.scenes)), CAPTIONS)).sum(axis=1)
    assert np.allclose(total, 1.0, atol=1e-12)


def test_log_p_is_the_sum_over_words():
    pairs = BuiltinPairs(n=40, seed=2)
    numbers = np.arange(40)
    log_p = pairs.truth.log_p(numbers, numbers)
    for i in numbers:
        for j in numbers:
            levels = np.unravel_index(pairs.truth.scenes[i], LEVELS)
            words = np.unravel_index(pairs.truth.captions[j], WORDS)
            p = np.prod([slot.table[a, b] for slot, a, b in zip(SLOTS, levels, words, strict=True)])
            assert np.exp(log_p[i, j]) == pytest.approx(p, abs=1e-15)
    assert np.isfinite(log_p.diagonal()).all()
    assert np.array_equal(pairs.truth.log_p(numbers, numbers, floor=FLOOR), np.maximum(log_p, FLOOR))


@pytest.mark.parametrize("shapes", [1, 2])
def test_popularity_is_the_sum_of_p_over_pictures(shapes):
    truth = BuiltinPairs(n=300, seed=1, shapes=shapes).truth
    everything, some = np.arange(300), np.arange(0, 300, 7)
    assert np.allclose(truth.popularity(), np.exp(truth.log_p(everything, everything)).sum(axis=0))
    assert np.allclose(truth.popularity(some), np.exp(truth.log_p(some, some)).sum(axis=0))
    assert truth.caption_popularity().sum() == pytest.approx(300)


def test_popularity_is_the_expected_count_of_a_caption():
    truth = BuiltinPairs(n=100_000).truth
    count, q = np.bincount(truth.captions, minlength=len(CAPTIONS)), truth.caption_popularity()
    frequent = q > 20
    assert frequent.sum() > 200
    assert np.abs((count - q)[frequent] / np.sqrt(q[frequent])).max() < 5
    assert count[q == 0].sum() == 0


def test_false_negatives_are_other_captions_that_fit():
    pairs = BuiltinPairs(n=60)
    numbers = np.arange(5, 60)
    false = pairs.truth.false_negatives(numbers)
    fits = np.exp(pairs.truth.log_p(numbers, numbers)) > 0
    assert not false.diagonal().any()
    assert np.array_equal(false | np.eye(len(numbers), dtype=bool), fits)
    assert 0 < false.mean() < 0.3


def test_the_solver_recovers_the_true_popularity():
    """From the scores tau log p, the solver recovers q up to the sampling noise of the captions."""
    n, tau = 4000, 0.05
    truth = BuiltinPairs(n=n).truth
    scores = tau * torch.from_numpy(truth.log_p(np.arange(n), np.arange(n), floor=FLOOR))
    result = solve(scores=scores.float(), temperature=tau, tolerance=1e-3)
    assert result.converged
    assert spearman(result.popularity.numpy(), truth.popularity()) >= 0.99


def test_the_solver_gives_the_same_zeta_on_groups_and_on_pairs():
    n, tau = 600, 0.05
    truth = BuiltinPairs(n=n).truth
    scores = tau * torch.from_numpy(truth.log_p(np.arange(n), np.arange(n), floor=FLOOR))
    groups = truth.grouped(floor=FLOOR)
    assert groups.scene_count.sum() == groups.caption_count.sum() == n
    zeta = solve(
        scores=tau * torch.from_numpy(groups.log_p),
        temperature=tau,
        tolerance=1e-6,
        x_weight=torch.from_numpy(groups.scene_count),
        y_weight=torch.from_numpy(groups.caption_count),
    ).zeta[groups.caption]
    received = ((scores - zeta) / tau).softmax(dim=1).sum(dim=0)
    assert torch.allclose(received, torch.ones(n, dtype=torch.float64), atol=2e-6)


@pytest.mark.slow
def test_solver_recovers_the_popularity_of_distinct_captions_of_a_larger_set():
    tau = 0.05
    truth = BuiltinPairs(n=20_000).truth
    groups = truth.grouped(floor=FLOOR)
    result = solve(
        scores=tau * torch.from_numpy(groups.log_p).float(),
        temperature=tau,
        tolerance=1e-3,
        x_weight=torch.from_numpy(groups.scene_count),
        y_weight=torch.from_numpy(groups.caption_count),
    )
    q = np.empty(len(groups.caption_count))
    q[groups.caption] = truth.popularity()
    assert spearman(result.zeta.numpy(), q) >= 0.99
    assert spearman(result.zeta.numpy()[groups.caption], truth.popularity()) >= 0.995
