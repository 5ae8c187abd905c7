"""The bootstrap against loops and against known results."""

import numpy as np
import pytest

from nuclr.evaluation.intervals import Bootstrap, Interval, change_interval, cut_halves, fold, per_seed


def hits(seed: int, images: int = 7, captions: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(images), captions)[: images * captions - 2]  # the last image has one caption
    return {
        "x_to_y": rng.integers(0, 2, (images, 3)).astype("float32"),
        "x_to_y_cluster": np.arange(images),
        "y_to_x": rng.integers(0, 2, (len(owner), 3)).astype("float32"),
        "y_to_x_cluster": owner,
    }


def test_resampled_metrics_equal_loops_over_the_drawn_images_and_seeds():
    outcomes = {"a": [hits(1), hits(2)], "b": [hits(3, images=5), hits(4, images=5)]}
    folds = [fold(name, per_seed_hits) for name, per_seed_hits in outcomes.items()]
    bootstrap = Bootstrap(2, resamples=20)
    resampled = bootstrap.metrics(folds)
    for r in range(20):
        values = []
        for name, hits_by_seed in outcomes.items():
            size = len(hits_by_seed[0]["x_to_y"])
            drawn = np.repeat(np.arange(size), bootstrap.clusters(name, np.ones(size))[r].astype(int))
            assert len(drawn) == size
            for key in ("x_to_y", "y_to_x"):
                by_seed = []
                for one in hits_by_seed:
                    queries = [q for image in drawn for q in np.flatnonzero(one[f"{key}_cluster"] == image)]
                    by_seed.append(np.mean([float(one[key][q, 0]) for q in queries]))
                values.append(by_seed)
        expected = np.mean(values, axis=0) @ bootstrap._seeds[r]
        assert resampled[r] == pytest.approx(expected, abs=1e-12)


def test_per_seed_is_the_mean_of_both_directions_and_of_the_folds():
    one, other = hits(1), hits(2)
    values = per_seed([fold("a", [one]), fold("b", [other])])
    expected = np.mean([h[key][:, 0].mean() for h in (one, other) for key in ("x_to_y", "y_to_x")])
    assert values == pytest.approx([expected])
    assert per_seed([fold("a", [one], 2)], "y_to_x") == pytest.approx([one["y_to_x"][:, 2].mean()])


def test_spread_of_a_single_seed_is_that_of_a_mean():
    rng = np.random.default_rng(0)
    values = rng.random((400, 1)) < 0.3
    outcome = {"top": np.repeat(values, 3, axis=1).astype("float32"), "top_cluster": np.arange(400)}
    drawn = Bootstrap(1, resamples=4000).metrics([fold("test", [outcome])])
    assert drawn.std() == pytest.approx(np.sqrt(values.var() / 400), rel=0.05)
    assert drawn.mean() == pytest.approx(values.mean(), abs=0.002)


def test_the_comparison_is_paired():
    """Two methods that differ by a constant on every image differ by that constant in every resample."""
    worse = hits(5)
    better = {key: value if key.endswith("_cluster") else value + 0.25 for key, value in worse.items()}
    difference = Bootstrap(1, resamples=200).difference([fold("a", [better])], [fold("a", [worse])])
    assert difference.difference == pytest.approx(0.25)
    assert difference.low == pytest.approx(0.25) == difference.high
    assert difference.significant and not Interval(0.1, -1, 1).significant and Interval(-0.5, -1, -0.1).significant


def test_the_change_of_a_search_has_the_interval_of_its_queries():
    """Kinds of equal clusters are drawn instead of clusters: the spread is that of a mean over clusters."""
    rng = np.random.default_rng(0)
    before = rng.random(600) < 0.3
    after = np.where(rng.random(600) < 0.2, 1, before)
    change = change_interval(before.astype(float), after)
    gain = after - before
    assert change.difference == pytest.approx(gain.mean())
    assert (change.high - change.low) / 2 == pytest.approx(1.96 * gain.std() / np.sqrt(600), rel=0.08)
    # Four copies of each query carry no more information than one.
    copied = change_interval(np.repeat(before, 4).astype(float), np.repeat(after, 4), np.repeat(np.arange(600), 4))
    assert copied.difference == pytest.approx(change.difference)
    assert copied.high - copied.low == pytest.approx(change.high - change.low, rel=0.08)


def test_halves_keep_groups_together_and_are_always_the_same():
    group = np.array([3, 3, 8, 5, 5, 1, 8])
    first, second = cut_halves(group)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(7))
    assert not set(group[first]) & set(group[second])
    assert cut_halves(group)[0].tolist() == first.tolist()
