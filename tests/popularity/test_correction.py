"""Correction of hubs: the bias of a gallery, the coordinates of an index, tuning, and files."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from nuclr import arrays
from nuclr.errors import UserError
from nuclr.evaluation import query_ranks
from nuclr.popularity import PopularityCorrection, correction, solve
from nuclr.popularity.bank import query_weights, score_std
from nuclr.popularity.hubs import reciprocal_ranks

METRICS = ("ip", "cosine", "l2")


def features(seed=0, n=60, d=8, noise=0.6):
    """Images with one caption each, and a hub: a caption near to all images."""
    generator = torch.Generator().manual_seed(seed)
    x = normalize(torch.randn(n, d, generator=generator) + 1, dim=1)
    y = normalize(x + noise * torch.randn(n, d, generator=generator) / d**0.5, dim=1)
    y[0] = normalize(torch.ones(d), dim=0)
    return x, y, torch.arange(n)[:, None].expand(n, 2)


# The bias


def reference_bias(queries, items, temperature, prior=0.1, answers=None, demand=None):
    """The popularity problem in float64, written from the formulas; queries must be different from one another."""
    queries = normalize(queries.double(), dim=1)
    items = normalize(items.double(), dim=1)
    n, m = len(queries), len(items)
    among = queries @ queries.T
    spread = among[~torch.eye(n, dtype=torch.bool)].std(correction=0)
    weight = 1 / torch.exp((among - 1) / (0.5 * spread)).sum(dim=1)
    scores = queries @ items.T
    allowed = torch.ones(n, m, dtype=torch.bool)
    for query, item in answers or []:
        allowed[query, item] = False
    demand = torch.ones(m).double() if demand is None else demand.double() / demand.double().mean()
    popularity = torch.ones(m).double()
    for _ in range(3000):
        chosen = torch.zeros(m).double()  # how often each item would be chosen if its own popularity were 1
        for i in range(n):
            share = demand * torch.exp(scores[i] / temperature) / popularity * allowed[i]
            chosen += weight[i] * torch.exp(scores[i] / temperature) * allowed[i] / share.sum()
        chosen += prior * m / (demand / popularity).sum()
        popularity = chosen / chosen.mean()
    bias = temperature * popularity.log()
    return bias - bias.mean()


@pytest.mark.parametrize("prior", [0.0, 0.1, 2.0])
def test_bias_is_that_of_the_formulas(monkeypatch, prior):
    monkeypatch.setattr(correction, "TOLERANCE", 1e-10)
    x, y, _ = features(n=30)
    fix = PopularityCorrection(0.2, prior=prior).fit(x.double(), y.double())
    expected = reference_bias(x, y, 0.2, prior)
    assert torch.allclose(fix.bias(y.double()), expected, atol=1e-5)
    assert int(expected.argmax()) == 0, "the hub"
    half = PopularityCorrection(0.2, 0.5, prior=prior).fit(x.double(), y.double())
    assert torch.allclose(half.bias(y.double()), 0.5 * expected, atol=1e-5)
    repeated = PopularityCorrection(0.2, prior=prior).fit(torch.cat([x, x[:7], x[:3]]).double(), y.double())
    assert torch.equal(repeated.bias(y.double()), fix.bias(y.double())), "equal queries count once"


def test_answers_do_not_count_as_crowding(monkeypatch):
    monkeypatch.setattr(correction, "TOLERANCE", 1e-10)
    x, y, _ = features(n=30)
    x, y = normalize(x.double(), dim=1), normalize(y.double(), dim=1)
    links = [(0, 3), (1, 3), (2, 3), (2, 5), (4, 0)]
    expected = reference_bias(x, y, 0.2, answers=links)
    fix = PopularityCorrection(0.2).fit(x, y, links)
    assert torch.allclose(fix.bias(y), expected, atol=1e-5)
    # the same query asked twice, with one of its answers each time
    log = torch.cat([x, x[2:3]])
    again = PopularityCorrection(0.2).fit(log, y, [(0, 3), (1, 3), (2, 3), (30, 5), (4, 0)])
    assert torch.equal(again.bias(y), fix.bias(y))
    single = torch.full((30,), -1)
    single[[0, 1, 2, 4]] = torch.tensor([3, 3, 3, 0])
    vector = PopularityCorrection(0.2).fit(x, y, single)
    assert torch.allclose(
        vector.bias(y), reference_bias(x, y, 0.2, answers=[link for link in links if link[1] != 5]), atol=1e-5
    )
    assert torch.equal(
        PopularityCorrection(0.2).fit(x, y, [-1] * 30).bias(y), PopularityCorrection(0.2).fit(x, y).bias(y)
    )


def test_an_item_that_answers_all_queries_has_a_bias_that_the_index_can_hold():
    x, y, _ = features(n=60)
    fix = PopularityCorrection(0.05).fit(x, y, [0] * 60)
    assert fix.bias(y).abs().max() < 2
    expected = (x @ y.T - fix.bias(y)).argsort(dim=1)[:, -10:]
    for metric in METRICS:
        found = ranking(metric, fix.queries(x, metric), fix.gallery(y, metric)).argsort(dim=1)[:, -10:]
        assert (found == expected).double().mean() > 0.99, metric
    for options in ({"prior": 0}, {}):
        with pytest.raises(ValueError, match=r"answers.*prior"):
            PopularityCorrection(0.05, **options).fit(x, y, [0] * 60, transductive=not options)


def test_answers_of_repeated_queries_in_a_transductive_fit():
    x, y, _ = features(n=40)
    once = PopularityCorrection(0.2).fit(x[:8], y, list(range(8)), transductive=True)
    twice = PopularityCorrection(0.2).fit(x[:8].repeat(2, 1), y, [*range(8), *range(8)], transductive=True)
    assert torch.allclose(twice.bias(y), once.bias(y), atol=1e-4)


def test_a_fit_that_fails_changes_nothing(monkeypatch):
    x, y, _ = features(n=40)
    fix = PopularityCorrection().fit(x, y)
    bias = fix.bias(y)
    p_values = fix.suspicious(y).p_value
    for wrong in ({"pairs": (x, y, [[0, 999]])}, {"demand": [0.0] * 40}):
        with pytest.raises(ValueError, match=r"999|demand"):
            fix.fit(x[:20], y, **wrong)
        assert torch.equal(fix.bias(y), bias) and torch.equal(fix.suspicious(y).p_value, p_values)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(correction.Solver, "__call__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fix.fit(x[:20], y)
    assert torch.equal(fix.bias(y), bias)


def test_demand_and_boosts(monkeypatch):
    monkeypatch.setattr(correction, "TOLERANCE", 1e-10)
    x, y, _ = features(n=30)
    x, y = normalize(x.double(), dim=1), normalize(y.double(), dim=1)
    demand = torch.arange(30.0) + 1
    fix = PopularityCorrection(0.2).fit(x, y, demand=demand)
    assert torch.allclose(fix.bias(y), reference_bias(x, y, 0.2, demand=demand), atol=1e-5)
    boost = 0.2 * demand.log().double()
    assert torch.allclose(fix.bias(y, boost=boost, center=False), fix.bias(y, center=False) - boost)
    bias = fix.bias(y, boost=boost, center=False)
    corrected = fix.queries(x) @ fix.gallery(y, boost=boost).T
    assert torch.allclose(corrected, x @ y.T - bias)
    scores, found = corrected.topk(10, dim=1)
    assert torch.allclose(scores + bias[found], (x @ y.T).gather(1, found)), "the cosine next to the corrected score"
    penalty = 0.2 * (boost - boost.max())
    expected = (x @ y.T - fix.bias(y, boost=penalty)).argsort(dim=1)
    for metric in METRICS:
        values = ranking(metric, fix.queries(x, metric), fix.gallery(y, metric, boost=penalty))
        assert torch.equal(values.argsort(dim=1), expected), metric


def test_hubness_is_not_demand():
    """Many wordings of a few questions push their answers down little, with known answers not at all."""
    generator = torch.Generator().manual_seed(0)
    y = normalize(torch.randn(300, 16, generator=generator), dim=1)
    wanted = torch.arange(10).repeat(40)
    log = torch.cat([y[wanted], y[100:200]])
    log = normalize(log + 0.3 * torch.randn(log.shape, generator=generator) / 4, dim=1)
    answers = torch.cat([wanted, torch.arange(100, 200)])
    scale = score_std(log, y)
    equal = solve(log, y, temperature=0.6 * scale).zeta
    fix = PopularityCorrection().fit(log, y)
    known = PopularityCorrection().fit(log, y, answers)
    pushed = [float(bias[:10].mean()) / scale for bias in (equal, fix.bias(y), known.bias(y))]
    assert pushed[0] > 1.5 and pushed[1] < 0.5 * pushed[0] and pushed[2] < 0.25
    lifted = [-float(bias[200:].mean()) / scale for bias in (equal, fix.bias(y))]
    assert lifted[1] < lifted[0], "items that the log does not touch"


def test_a_transductive_correction_is_saved_and_fits_into_every_index(tmp_path):
    x, y, _ = features(n=60)
    fix = PopularityCorrection().fit(x, y, transductive=True)
    fix.save(tmp_path / "fix.safetensors")
    assert torch.equal(PopularityCorrection.load(tmp_path / "fix.safetensors").bias(y), fix.bias(y))
    scores = x @ y.T - fix.bias(y)
    for metric in ("ip", "l2", "cosine"):
        items = fix.gallery(y, metric=metric)
        asked = fix.queries(x, metric=metric)
        found = -torch.cdist(asked.double(), items.double()) if metric == "l2" else asked @ items.T
        assert (found.argmax(dim=1) == scores.argmax(dim=1)).float().mean() > 0.98


def test_items_that_search_items():
    _, y, _ = features(n=200)
    for size in (200, 20):
        with pytest.raises(ValueError, match=r"queries.*items=True"):
            PopularityCorrection(0.1, bank_size=size).fit(y[:150], y)
    itself = PopularityCorrection(0.1, prior=0).fit(y, y, items=True).bias(y)
    assert int(itself.argsort(descending=True).tolist().index(0)) < 100, "a copy of itself does not make an item a hub"
    assert float(itself[1::2].mean() - itself[2::2].mean()) == pytest.approx(0, abs=0.02)
    x = features(n=200)[0]
    plain = PopularityCorrection(0.1).fit(x, y).bias(y)
    named = PopularityCorrection(0.1).fit(torch.cat([x, y[50:60]]), y).bias(y)
    assert (named - plain)[50:60].abs().max() < 0.02, "a query that equals an item does not make it popular"


def test_swapped_arguments_are_noticed_when_items_are_corrected():
    x, y, _ = features(n=200)
    swapped = PopularityCorrection().fit(y, x)
    for apply in (swapped.bias, swapped.gallery, swapped.transform):
        with pytest.raises(ValueError, match=r"gallery.*fit\(queries, gallery\)"):
            apply(y[20:80])
    assert len(swapped.bias(y[:5])) == 5, "a few items may well equal queries"
    assert len(PopularityCorrection().fit(y, y, items=True).bias(y)) == 200


def test_a_correction_that_changes_nothing_says_so():
    generator = torch.Generator().manual_seed(2)
    x, y = (normalize(torch.randn(n, 4, generator=generator), dim=1) for n in (12, 200))
    with pytest.warns(UserWarning, match=r"changes nothing.*answers="):
        assert PopularityCorrection().fit(x, y).bias(y).abs().max() == 0


def test_defaults_are_in_units_of_the_scores():
    x, y, links = features(n=200)
    fix = PopularityCorrection().fit(x, y)
    assert fix.temperature_ == 0.6 * score_std(x, y) and 0 < fix.strength_ <= 0.75
    wide = PopularityCorrection(1.5 * score_std(x, y)).fit(x, y).bias(y)
    expected = PopularityCorrection(fix.temperature_).fit(x, y).bias(y) - 0.4 * wide
    assert torch.allclose(fix.bias(y), fix.strength_ * expected, atol=1e-6), "two scales"
    half = PopularityCorrection(strength=0.375).fit(x, y)
    assert torch.allclose(half.bias(y), 0.375 * expected, atol=1e-6), "both in proportion"
    answered = PopularityCorrection().fit(x, y, torch.arange(200))
    assert answered.temperature_ == 0.4 * score_std(x, y)
    assert PopularityCorrection(0.1).fit(x, y).strength_ == 1.0, "with a given temperature the bias is zeta"
    assert score_std(x, y + 0.3) == pytest.approx(float((x.double() @ (y + 0.3).double().T).std(correction=0)))
    whole = PopularityCorrection().fit(x, y, transductive=True)
    assert (whole.temperature_, whole.strength_) == (0.4 * score_std(x, y), 1.0)
    expected = solve(x, y, temperature=whole.temperature_, tolerance=1e-3).zeta
    assert torch.allclose(whole.bias(y), expected, atol=1e-3), "all queries count the same, without a prior count"
    given = PopularityCorrection(0.1, 0.7).fit(x, y, transductive=True)
    assert (given.temperature_, given.strength_) == (0.1, 0.7)
    assert whole.fit(x, y).temperature_ == fix.temperature_, "the option belongs to one fit"
    tuned = PopularityCorrection().fit(x, y, pairs=(x, y, links), transductive=True)
    assert tuned.temperature_ / score_std(x, y) in {0.25, 0.4, 0.6, 0.8}


def test_the_check_of_a_bank():
    generator = torch.Generator().manual_seed(0)
    x = normalize(torch.randn(400, 16, generator=generator), dim=1)
    y = normalize(torch.randn(100, 16, generator=generator), dim=1)
    fix = PopularityCorrection().fit(x[:300], y)
    same = fix.check(x[300:350])
    assert same.fits and same.p_value > 0.01 and "fits=True" in repr(same)
    other = fix.check(normalize(x[350:] + 0.2, dim=1))
    assert not other.fits and "differ" in other.message
    with pytest.raises(ValueError, match="queries has 3 different rows"):
        fix.check(x[[0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]])
    with pytest.raises(ValueError, match="fit"):
        PopularityCorrection().check(x)


def test_the_protocol_of_scikit_learn():
    """What `sklearn.base.clone` and searches over settings rely on."""
    x, y, _ = features()
    arguments = {"temperature": np.float32(0.1), "strength": 1, "prior": 0, "normalize": True, "bank_size": 50}
    fix = PopularityCorrection(**arguments).fit(x, y)
    copy = type(fix)(**fix.get_params(deep=False))
    assert all(copy.get_params()[name] is value for name, value in arguments.items()), "stored as given, not converted"
    assert torch.equal(fix.transform(y), fix.gallery(y))
    default = PopularityCorrection().fit(x, y)
    assert default.get_params()["temperature"] is None and default.temperature_ > 0
    before = default.bias(y)
    assert default.set_params(temperature=0.1, strength=0.5) is default
    assert torch.equal(default.bias(y), before), "until the next fit"
    assert torch.equal(default.fit(x, y).bias(y), PopularityCorrection(0.1, 0.5).fit(x, y).bias(y))
    for wrong, message in (({"temprature": 1.0}, "temprature.*temperature"), ({"strength": -1.0}, "strength=-1")):
        with pytest.raises(ValueError, match=message):
            default.set_params(**wrong)
    assert default.strength == 0.5


# Nothing to correct


def isotropic(seed, items, bank, d, noise):
    """Items without hubs; queries, and a bank of other queries for some of the items."""
    generator = torch.Generator().manual_seed(seed)
    gallery = normalize(torch.randn(items, d, generator=generator), dim=1)

    def ask(rows):
        return normalize(gallery[rows] + noise * torch.randn(len(rows), d, generator=generator) / d**0.5, dim=1)

    return gallery, ask(torch.arange(items)), ask(torch.randperm(items, generator=generator)[:bank])


@pytest.mark.parametrize(
    ("items", "bank", "d", "noise"),
    [(400, 30, 32, 1.5), (400, 200, 32, 1.5), (100, 50, 16, 1.0), (60, 60, 16, 1.0), (400, 90, 64, 2.0)],
)
def test_without_hubs_the_default_costs_little_recall(items, bank, d, noise):
    links = torch.arange(items)[:, None].expand(items, 2)
    change = []
    for seed in range(5):
        gallery, queries, bank_queries = isotropic(seed, items, bank, d, noise)
        plain = query_ranks(queries, gallery, links).hits(1).mean()
        bias = PopularityCorrection().fit(bank_queries, gallery).bias(gallery)
        change.append(float(query_ranks(queries, gallery, links, bias).hits(1).mean() - plain))
    assert sum(change) / 5 > -0.01


# Properties


@given(seed=st.integers(0, 2**31), temperature=st.floats(0.1, 1.0), strength=st.floats(0.0, 3.0))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_properties_of_the_bias(seed, temperature, strength):
    x, y, _ = features(seed, n=30)
    x, y, weight = x.double(), y.double(), torch.rand(30, generator=torch.Generator().manual_seed(seed)) + 0.1
    x, y = normalize(x, dim=1), normalize(y, dim=1)

    def bias(queries, candidates, gallery, demand=None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(correction, "TOLERANCE", 1e-10)
            return PopularityCorrection(temperature, strength).fit(queries, candidates, demand=demand).bias(gallery)

    plain = bias(x, y, y)
    assert abs(float(plain.mean())) < 1e-12
    order = torch.randperm(30, generator=torch.Generator().manual_seed(seed + 1))
    close = {"atol": 1e-6 * (1 + strength), "rtol": 0}
    assert torch.allclose(bias(x[order], y, y), plain, **close), "the order of the queries"
    assert torch.allclose(bias(x, y[order], y), plain, **close), "the order of the candidates"
    assert torch.allclose(bias(x, y, y[order]), plain[order], **close), "the order of the gallery"
    assert torch.allclose(bias(x, y, y, 7 * weight), bias(x, y, y, weight), **close)
    assert torch.allclose(bias(x, y, y, np.full(30, 0.2)), plain, **close)


@pytest.mark.parametrize("temperature", [0.05, 0.2])
def test_a_new_item_gets_the_bias_of_solving_again(monkeypatch, temperature):
    """A candidate of weight zero has no influence, so solving with new items of weight zero is the reference."""
    x, y, new = (
        normalize(side.double(), dim=1) for side in (*features(n=50)[:2], features(seed=3, n=20)[1])
    )  # at low temperatures zeta is determined to far fewer digits than the residual
    monkeypatch.setattr(correction, "TOLERANCE", 1e-10)
    fix = PopularityCorrection(temperature, prior=0).fit(x, y)
    again = solve(
        x,
        torch.cat([y, new]),
        temperature=temperature,
        tolerance=1e-10,
        x_weight=query_weights(x),
        y_weight=torch.cat([torch.ones(50), torch.zeros(20)]),
    ).zeta
    together = fix.bias(torch.cat([y, new]))
    assert torch.allclose(together, again - again.mean(), atol=1e-7)
    apart = torch.cat([fix.bias(y, center=False), fix.bias(new, center=False)])
    assert torch.allclose(apart - apart.mean(), together, atol=1e-12), "two calls have the same constant"


# Indexes


def ranking(metric, queries, gallery):
    """Return what an index of this metric computes: larger is better."""
    if metric == "l2":
        return -torch.cdist(queries.double(), gallery.double())
    if metric == "cosine":
        queries, gallery = normalize(queries.double(), dim=1), normalize(gallery.double(), dim=1)
    return queries.double() @ gallery.double().T


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("strength", [0.0, 1.0, 2.5])
def test_the_coordinates_give_the_corrected_ranking(metric, strength):
    x, y, _ = features()
    x, y = normalize(x.double(), dim=1) * 1.005, normalize(y.double(), dim=1) * 0.995
    fix = PopularityCorrection(0.1, strength).fit(x, y[:40])
    expected = (x @ y.T - fix.bias(y)).argsort(dim=1)
    rows = torch.cat([fix.gallery(y[:40], metric), fix.gallery(y[40:], metric)])  # the last 20 are added later
    assert rows.shape[1] == fix.queries(x, metric).shape[1] == (10 if metric == "cosine" else 9)
    assert torch.equal(ranking(metric, fix.queries(x, metric), rows).argsort(dim=1), expected)
    if metric == "cosine":
        assert torch.allclose(rows.norm(dim=1), rows[0].norm()), "all rows have one norm"


@pytest.mark.parametrize("metric", METRICS)
def test_extreme_items_fit_into_the_index(metric):
    """The farthest and the nearest possible vectors stay within the bounds that the coordinates need."""
    x, y, _ = features()
    fix = PopularityCorrection(0.02, 1.5).fit(x, y)
    extreme = torch.cat([-x, x, -y, torch.eye(8), -torch.eye(8), -normalize(x.mean(dim=0, keepdim=True), dim=1)])
    scores = x.double() @ extreme.double().T - fix.bias(extreme).double()
    values = ranking(metric, fix.queries(x, metric), fix.gallery(extreme, metric))
    assert bool(values.isfinite().all())
    gap = scores.sort(dim=1).values - scores.gather(1, values.argsort(dim=1))
    assert float(gap.abs().max()) < 2e-6, "the order differs only among scores that are equal up to float32 rounding"


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_the_ranking_of_ten_thousand_by_ten_thousand_in_float32(exact):
    """The appended coordinate gives the ranking of s - bias in float32.

    If the arithmetic is exact (features and biases are multiples of powers of two, so that no product or sum rounds),
    all scores are equal bit for bit, and so is the whole ranking, ties included. Otherwise the two programs round
    differently, and the order may differ only among items whose scores differ by less than that rounding.
    """
    n, d = 10_000, 64
    generator = torch.Generator().manual_seed(0)
    if exact:
        x, y = (torch.randint(0, 2, (2, n, d), generator=generator) * 2 - 1).float() / 8  # unit norm: 64 entries of 1/8
    else:
        x, y = normalize(torch.randn(2, n, d, generator=generator) + 0.3, dim=-1)
    fix = PopularityCorrection(bank_size=1000).fit(x, y)
    queries, rows = fix.queries(x), fix.gallery(y)
    bias = -rows[:, -1]
    if exact:
        bias = (bias * 2**12).round() / 2**12
        rows[:, -1] = -bias
    for start in range(0, n, 1000):
        part = slice(start, start + 1000)
        one, other = x[part] @ y.T - bias, queries[part] @ rows.T
        if exact:
            assert torch.equal(one, other)
        else:
            scores = x[part].double() @ y.double().T - bias.double()
            rounding = 2 * float((one - scores).abs().max() + (other - scores).abs().max())
            assert rounding < 2e-6
            ranked = scores.gather(1, other.argsort(dim=1))
            assert float((ranked.cummax(dim=1).values - ranked).max()) <= rounding


# Tuning


@pytest.mark.parametrize(("seed", "among_themselves"), [(0, False), (2, False), (3, False), (0, True)])
def test_tuning_leaves_the_default_only_for_a_clear_gain(seed, among_themselves):
    """If every query finds itself first, all settings look equal, so items that search one another are excluded."""
    x, y, links = features(seed=seed, n=150)
    bank_x, bank_y, _ = features(seed=1, n=200)
    rows = torch.arange(150)
    if among_themselves:
        x = y = normalize(torch.cat([features(n=75)[1], features(n=75, noise=0.7)[1]]), dim=1)
        links = torch.stack([rows, (rows + 75) % 150], dim=1)
    pairs = (x, y, links)
    fix = PopularityCorrection().fit(bank_x, bank_y, pairs=pairs, exclude=rows if among_themselves else None)
    plain = PopularityCorrection().fit(bank_x, bank_y)
    default = (plain.temperature_, plain.strength_)
    scale = score_std(bank_x, bank_y)
    grid = [(factor * scale, strength) for factor in (0.25, 0.4, 0.6, 0.8) for strength in (0.5, 0.75, 1.0, 1.25)]
    found = {}
    for setting in (default, *grid):
        scores = x @ y.T - PopularityCorrection(*setting).fit(bank_x, bank_y).bias(y)
        if among_themselves:
            scores.fill_diagonal_(-torch.inf)
        rank = 1 + (scores > scores.gather(1, links[:, 1:])).sum(dim=1)
        found[setting] = torch.where(rank <= 10, 1 / rank, 0).double()
    best = max(found, key=lambda setting: float(found[setting].mean()))
    gain = found[best] - found[default]
    clear = gain.mean() > gain.std() / len(gain) ** 0.5
    assert (fix.temperature_, fix.strength_) == (best if clear else default)


def test_tuning_keeps_what_is_given_and_belongs_to_one_fit():
    x, y, links = features()
    bank_x, bank_y, _ = features(seed=1, n=200)
    assert PopularityCorrection(0.2).fit(bank_x, bank_y, pairs=(x, y, links)).temperature_ == 0.2
    both = PopularityCorrection(0.2, 0.9).fit(bank_x, bank_y, pairs=(x, y, links))
    assert (both.temperature_, both.strength_) == (0.2, 0.9)
    fix = PopularityCorrection().fit(bank_x, y, pairs=(x, y, links))
    fix.fit(y, x)
    again = PopularityCorrection().fit(y, x)
    assert (fix.temperature_, fix.strength_) == (again.temperature_, again.strength_)


def test_reciprocal_ranks_of_several_right_answers():
    rows = torch.tensor([[3, 1, 0], [2, 0, 1], [4, 3, 2]])
    links = [[0, 0], [0, 1], [2, 0]]  # query 1 has no right answer
    assert reciprocal_ranks(rows, links, 5).tolist() == [0.5, 0.0]
    for wrong in ([[0, 5]], [[3, 0]], [[-1, 0]], [[0.0, 1.0]], [0, 1], []):
        with pytest.raises(ValueError, match="links"):
            reciprocal_ranks(rows, wrong, 5)


# Inputs


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_kinds_of_input(dtype, tmp_path, monkeypatch):
    """Tensors of every dtype, and arrays on disk, which are read in blocks."""
    x, y, _ = features()
    bank = [side.to(dtype) for side in features(seed=1)[:2]]
    expected = PopularityCorrection(0.1).fit(*features(seed=1)[:2]).bias(y)
    fix = PopularityCorrection(0.1).fit(*bank)
    bias = fix.bias(y.to(dtype))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert bias.dtype == fix.gallery(y.to(dtype)).dtype == fix.queries(x.to(dtype)).dtype == wide
    assert torch.allclose(bias.float(), expected, atol=2e-3 if dtype == torch.float16 else 1e-5)
    mapped = []
    for name, side in (("x", bank[0]), ("y", bank[1]), ("gallery", y.to(dtype))):
        np.save(tmp_path / f"{name}.npy", side.numpy())
        mapped.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    monkeypatch.setattr(arrays, "BLOCK", 17)
    again = PopularityCorrection(0.1).fit(*mapped[:2])
    assert torch.allclose(again.bias(mapped[2]), bias, atol=1e-6)
    assert torch.allclose(again.gallery(mapped[2], "cosine"), fix.gallery(y.to(dtype), "cosine"), atol=1e-6)


def test_of_a_large_bank_evenly_spaced_rows_are_used():
    x, y, _ = features(n=101)
    few = PopularityCorrection(0.1, bank_size=51).fit(x, y)
    assert torch.equal(few.bias(y), PopularityCorrection(0.1).fit(x[::2], y[::2]).bias(y))
    weight = torch.arange(101.0) + 1
    few.fit(x, y, demand=weight)
    assert torch.equal(few.bias(y), PopularityCorrection(0.1).fit(x[::2], y[::2], demand=weight[::2]).bias(y))
    log = torch.cat([x[:1].expand(1000, -1), x])
    assert torch.equal(
        PopularityCorrection(0.1, bank_size=101).fit(log, y).bias(y), PopularityCorrection(0.1).fit(x, y).bias(y)
    ), "distinct queries first"
    bad = x.clone()
    bad[1] *= 2  # a row that is not used
    with pytest.raises(ValueError, match="queries: row 1 has norm 2"):
        few.fit(bad, y)


def test_features_of_other_norms_are_refused_or_normalized():
    x, y, _ = features()
    fix = PopularityCorrection().fit(x, y)
    for call, name in (
        (lambda: PopularityCorrection().fit(3 * x, y), "queries"),
        (lambda: PopularityCorrection().fit(x, 3 * y), "gallery"),
        (lambda: fix.bias(3 * y), "gallery"),
    ):
        with pytest.raises(ValueError, match=f"{name}: row 0 .*normalize=True"):
            call()
    scaled = PopularityCorrection(normalize=True).fit(3 * x, 5 * y)
    assert torch.allclose(scaled.bias(2 * y), fix.bias(y), atol=1e-5)
    assert torch.allclose(scaled.gallery(2 * y, "l2"), fix.gallery(y, "l2"), atol=1e-5)
    assert torch.allclose(scaled.queries(2 * x), fix.queries(x), atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y: PopularityCorrection(-1.0), "temperature=-1"),
        (lambda x, y: PopularityCorrection(0.1, -1.0), "strength=-1"),
        (lambda x, y: PopularityCorrection(bank_size=1), "bank_size=1"),
        (lambda x, y: PopularityCorrection().fit(x, y[:, :5]), "gallery has 5 columns.* 8"),
        (lambda x, y: PopularityCorrection().fit(x[:1], y), "queries has 1 row"),
        (lambda x, y: PopularityCorrection().fit(x[:1].expand(5, -1), y), "queries has only equal rows"),
        (lambda x, y: PopularityCorrection().fit(normalize(x[:1] + 1e-6 * x, dim=1), y), "queries has only equal rows"),
        (lambda x, y: PopularityCorrection().fit(x, y[:40], torch.arange(60)), "answers.*row 40 of the gallery"),
        (lambda x, y: PopularityCorrection().fit(x, y, demand=-torch.ones(60)), "demand has minimum -1"),
        (lambda x, y: PopularityCorrection().fit(x, y[:1]), "gallery has 1 row"),
        (lambda x, y: PopularityCorrection(prior=-1.0), "prior=-1"),
        (lambda x, y: PopularityCorrection().fit(x[:0], y), "queries has no rows"),
        (lambda x, y: PopularityCorrection().fit(x, y[:40], [[0, 40]]), "answers.*40"),
        (lambda x, y: PopularityCorrection().fit(x, y, [0, 1]), "answers.*60"),
        (lambda x, y: PopularityCorrection().fit(x, y, torch.full((60,), -2)), "answers.*-2"),
        (lambda x, y: PopularityCorrection().fit(x, y, demand=torch.zeros(60)), "demand has minimum 0"),
        (lambda x, y: PopularityCorrection().fit(x, y, demand=[1.0]), "demand has shape"),
        (lambda x, y: PopularityCorrection().fit(x, y).gallery(y, "l2", boost=torch.ones(60)), "boost.*l2"),
        (lambda x, y: PopularityCorrection().fit(x, y).gallery(y, "cosine", boost=-torch.ones(60)), "boost.*cosine"),
        (lambda x, y: PopularityCorrection().fit(x, y).gallery(y, boost=[1.0]), "boost has shape"),
        (lambda x, y: PopularityCorrection().bias(y), "not fitted"),
        (lambda x, y: PopularityCorrection().fit(x, y).bias(y[:, :5]), "gallery has 5 columns.* 8"),
        (lambda x, y: PopularityCorrection().fit(x, y).gallery(y[:0]), "vectors has no rows"),
        (lambda x, y: PopularityCorrection().fit(x, y).queries(x[:, :5]), "queries has 5 columns.* 8"),
        (lambda x, y: PopularityCorrection().fit(x, y).gallery(y, "dot"), "metric='dot'"),
        (lambda x, y: PopularityCorrection().save("file"), "call fit"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    x, y, _ = features()
    with pytest.raises(ValueError, match=message):
        call(x, y)


# Files


def test_damaged_files_are_refused(tmp_path):
    x, y, _ = features()
    path = tmp_path / "fix.safetensors"
    PopularityCorrection(0.1).fit(x, y).save(path)
    tensors = load_file(path)
    settings = '{"arguments": {"temperature": 0.1}, "scales": [[0.1, 1.0]]}'
    contents = [tensors | {"log_z": tensors["log_z"][:, :5].clone()}, {"queries": tensors["queries"]}]
    contents += [tensors | {"mass": mass} for mass in (torch.full((61,), torch.nan), torch.zeros(61))]
    contents += [tensors | {"queries": 2 * tensors["queries"]}]
    files = [(content, settings) for content in contents]
    for wrong in ("{}", "[]", "[", *(settings.replace("0.1", value) for value in ("null", '"a"', "-1"))):
        files.append((tensors, wrong))
    for number, (content, metadata) in enumerate(files):
        save_file(content, tmp_path / str(number), {"nuclr.PopularityCorrection": metadata})
    save_file(tensors, tmp_path / "foreign")
    (tmp_path / "cut").write_bytes(path.read_bytes()[:-10])
    (tmp_path / "text").write_text("no tensors")
    for file in {*tmp_path.iterdir(), tmp_path / "nothing"} - {path}:
        with pytest.raises(UserError, match=str(file)):
            PopularityCorrection.load(file)
    assert PopularityCorrection.load(path).temperature_ == 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_save_and_load_are_exact(dtype, tmp_path):
    x, y, links = features()
    x, y = x.to(dtype), y.to(dtype)
    fix = PopularityCorrection(normalize=True, prior=0.2).fit(3 * x, 2 * y, links[:20], pairs=(x, y, links))
    fix.set_params(prior=np.float32(0.25))  # json does not know numbers of numpy
    fix.save(tmp_path / "fix.safetensors")
    loaded = PopularityCorrection.load(tmp_path / "fix.safetensors")
    assert repr(loaded) == repr(fix) and loaded.normalize and loaded.prior == 0.25
    new = features(seed=5)[1]
    assert torch.equal(loaded.bias(new), fix.bias(new))
    for metric in METRICS:
        assert torch.equal(loaded.gallery(new, metric), fix.gallery(new, metric))
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "fix.safetensors").read_bytes()


def forge(path, scales=None, arguments=None, metadata=None, **tensors):
    """Write a file of `save` with other settings or tensors."""
    PopularityCorrection(0.5).fit(torch.eye(3), torch.eye(3), items=True).save(path)
    settings = {
        "arguments": PopularityCorrection(0.5).get_params() | (arguments or {}),
        "scales": [[0.5, 1.0]] if scales is None else scales,
    }
    save_file(load_file(path) | tensors, path, {correction.FORMAT: metadata or json.dumps(settings)})
    return path


def test_a_file_that_is_replaced_while_it_is_read_is_not_mixed(tmp_path, monkeypatch):
    path = forge(tmp_path / "a.safetensors")
    expected = PopularityCorrection.load(path).bias(torch.eye(3), center=False)
    parse = correction._parse

    def replace_and_parse(content):
        forge(path, [[0.25, 1.0]], log_z=torch.ones(1, 4).double())
        return parse(content)

    monkeypatch.setattr(correction, "_parse", replace_and_parse)
    fix = PopularityCorrection.load(path)
    assert fix.temperature_ == 0.5 and torch.equal(fix.bias(torch.eye(3), center=False), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"log_z": torch.full((1, 4), -1e300, dtype=torch.float64)},
        {"log_z": torch.zeros(2, 4).double()},
        {"scales": [[1e-320, 1.0]]},
        {"scales": [[[1], 1.0]]},
        {"scales": [[0.5, 1e308]]},
        {"scales": []},
        {"arguments": {"temprature": 1.0}},
        {"metadata": "[" * 100_000},
        {"metadata": "7"},
        {"queries": torch.eye(4, 3).to(torch.float8_e4m3fn)},
        {"queries": torch.empty(2**62, 0)},
        {"answer_scores": torch.full((4, 1), torch.inf)},
        {"answer_scores": torch.ones(2, 1)},
        {"clean_scores": torch.ones(3, 3).double()},
        {"clean_scores": torch.full((3,), torch.nan).double()},
        {"clean_scale": torch.zeros(2, 3).double()},
        {"clean_scale": torch.full((2, 3), torch.inf).double()},
        {"clean_thresholds": torch.full((4, 2), torch.nan)},
        {"scales": [[10**400, 1.0]]},
        {"scales": [[0.5, 0.0]], "log_z": torch.full((1, 4), -1e300, dtype=torch.float64)},
    ],
)
def test_forged_corrections_are_refused(tmp_path, changes):
    path = forge(tmp_path / "a.safetensors", **changes)
    with pytest.raises(UserError, match="not a popularity correction"):
        PopularityCorrection.load(path)
