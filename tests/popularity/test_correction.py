"""Correction of hubs: the bias of a gallery, the coordinates of an index, tuning, and files."""

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
from nuclr.popularity import PopularityCorrection, solve
from nuclr.popularity.correction import TRANSDUCTIVE_FACTOR, reciprocal_ranks
from nuclr.popularity.defaults import default_strength, score_std, zeta_reliability

METRICS = ("ip", "cosine", "l2")


def features(seed=0, n=60, d=8, noise=0.6):
    """Images with one caption each, and a hub: a caption near to all images."""
    generator = torch.Generator().manual_seed(seed)
    x = normalize(torch.randn(n, d, generator=generator) + 1, dim=1)
    y = normalize(x + noise * torch.randn(n, d, generator=generator) / d**0.5, dim=1)
    y[0] = normalize(torch.ones(d), dim=0)
    return x, y, torch.arange(n)[:, None].expand(n, 2)


# The bias


def test_bias_is_the_solvers_zeta():
    x, y, _ = features()
    zeta = solve(x, y[:40], temperature=0.1, tolerance=1e-3).zeta
    assert torch.allclose(PopularityCorrection(0.1).fit(x, y[:40]).bias(y[:40]), zeta, atol=2e-4)
    assert torch.allclose(PopularityCorrection(0.1, 0.5).fit(x, y[:40]).bias(y[:40]), 0.5 * zeta, atol=1e-4)
    assert int(PopularityCorrection(0.1).fit(x, y).bias(y).argmax()) == 0


def test_the_banks_queries_choose_from_its_candidates():
    _, y, _ = features(n=50)
    bank_x, bank_y, _ = features(seed=1, n=70)
    solution = solve(bank_x.double(), bank_y.double(), temperature=0.1, tolerance=1e-9)
    # the definition of q, without `extend`
    probabilities = torch.exp((bank_x @ y.T).double() / 0.1 - solution.log_z[:, None])
    expected = 0.1 * probabilities.sum(dim=0).log()
    expected -= expected.mean()
    bias = PopularityCorrection(0.1, 2.0).fit(bank_x, bank_y).bias(y)
    assert torch.allclose(bias.double(), 2 * expected, atol=1e-3)


def test_equal_queries_count_once_unless_they_have_weights():
    x, y, _ = features()
    log = torch.cat([x, x[:7], x[:7]])
    once, repeated = (PopularityCorrection(0.1).fit(queries, y).bias(y) for queries in (x, log))
    assert torch.equal(repeated, once)
    weight = torch.ones(60).index_fill_(0, torch.arange(7), 3.0)
    weighted = PopularityCorrection(0.1).fit(x, y, query_weight=weight).bias(y)
    counted = PopularityCorrection(0.1).fit(log, y, query_weight=torch.ones(74)).bias(y)
    assert torch.allclose(weighted, counted, atol=1e-4) and not torch.allclose(weighted, once, atol=1e-2)


def test_a_query_that_equals_an_item_does_not_make_it_popular():
    x, y, _ = features(n=200)
    plain = PopularityCorrection(0.1).fit(x, y).bias(y)
    named = PopularityCorrection(0.1).fit(torch.cat([x, y[50:60]]), y).bias(y)
    assert (named - plain)[50:60].abs().max() < 0.02
    itself = PopularityCorrection(0.1).fit(y, y).bias(y)
    assert int(itself.argmax()) == 0, "the hub is found without any query"
    assert float(itself[1::2].mean() - itself[2::2].mean()) == pytest.approx(0, abs=0.02)


def test_without_candidates_the_first_gallery_takes_their_place():
    x, y, _ = features()
    late = PopularityCorrection(0.1).fit(x)
    assert "no candidates yet" in repr(late)
    assert torch.equal(late.bias(y), PopularityCorrection(0.1).fit(x, y).bias(y))
    new = features(seed=2)[1]
    assert torch.equal(late.bias(new), PopularityCorrection(0.1).fit(x, y).bias(new)), "later galleries are extended"


def test_the_strength_without_labels_follows_from_the_noise_in_zeta():
    x, y, _ = features(n=150)
    fix = PopularityCorrection().fit(x, y)
    result = solve(x, y, temperature=fix.temperature, tolerance=1e-3)
    reliability = zeta_reliability(x, result.problem.a, result.log_z, y, fix.temperature)
    assert fix.strength == pytest.approx(default_strength(reliability), abs=1e-3)
    assert PopularityCorrection(0.1).fit(x, y).strength == 1.0, "with a given temperature the bias is zeta"
    assert PopularityCorrection(strength=0.5).fit(x, y).strength == 0.5
    assert score_std(x, y + 0.3) == pytest.approx(float((x.double() @ (y + 0.3).double().T).std(correction=0)))
    assert torch.equal(fix.bias(y), PopularityCorrection(fix.temperature, fix.strength).fit(x, y).bias(y))


def test_queries_of_weight_zero_have_no_influence_on_the_defaults():
    x, y, _ = features(n=240)
    weight = torch.arange(240) % 2 == 0
    fix = PopularityCorrection().fit(x, y, query_weight=weight.double())
    alone = PopularityCorrection().fit(x[weight], y)
    assert fix.temperature == pytest.approx(alone.temperature, rel=1e-6)
    assert fix.strength == pytest.approx(alone.strength, abs=1e-3)
    assert torch.allclose(fix.bias(y), alone.bias(y), atol=1e-3)


def test_transductive_fits_have_a_temperature_of_their_own():
    x, y, links = features(n=200)
    fix = PopularityCorrection().fit(x, y, transductive=True)
    assert (fix.temperature, fix.strength) == (TRANSDUCTIVE_FACTOR * score_std(x, y), 1.0)
    late = PopularityCorrection().fit(x, transductive=True)
    assert torch.equal(late.bias(y), fix.bias(y))
    given = PopularityCorrection(0.1, 0.7).fit(x, y, transductive=True)
    assert (given.temperature, given.strength) == (0.1, 0.7)
    again = fix.fit(x, y)
    assert again.temperature == PopularityCorrection().fit(x, y).temperature, "the option belongs to one fit"
    tuned = PopularityCorrection().fit(x, y, pairs=(x, y, links), transductive=True)
    assert tuned.temperature / score_std(x, y) in {0.25, 0.4, 0.6, 0.8}


# Nothing to correct


def isotropic(seed, items, bank, d, noise):
    """Items without hubs; queries, and a bank of other queries for some of the items."""
    generator = torch.Generator().manual_seed(seed)
    gallery = normalize(torch.randn(items, d, generator=generator), dim=1)

    def ask(rows):
        return normalize(gallery[rows] + noise * torch.randn(len(rows), d, generator=generator) / d**0.5, dim=1)

    return gallery, ask(torch.arange(items)), ask(torch.randperm(items, generator=generator)[:bank])


@given(
    seed=st.integers(0, 2**31),
    items=st.sampled_from([60, 150, 400]),
    bank=st.sampled_from([8, 30, 60, 120, 300]),
    d=st.sampled_from([16, 32, 64]),
    noise=st.sampled_from([0.5, 1.5]),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_without_hubs_the_default_changes_next_to_nothing(seed, items, bank, d, noise):
    gallery, queries, bank = isotropic(seed, items, min(bank, items), d, noise)
    bias = PopularityCorrection().fit(bank, gallery).bias(gallery)
    assert float(bias.std()) < 0.15 * score_std(queries, gallery)


@pytest.mark.parametrize(
    ("items", "bank", "d", "noise"),
    [(400, 30, 32, 1.5), (400, 200, 32, 1.5), (100, 50, 16, 1.0), (60, 60, 16, 1.0), (400, 90, 64, 2.0)],
)
def test_without_hubs_the_default_costs_no_recall(items, bank, d, noise):
    """Before the strength followed the noise in zeta, the first case lost six points of recall@1."""
    links, change, certain = torch.arange(items)[:, None].expand(items, 2), [], []
    for seed in range(5):
        gallery, queries, bank_queries = isotropic(seed, items, bank, d, noise)
        plain = query_ranks(queries, gallery, links).hits(1).mean()
        for fix, changes in ((PopularityCorrection(), change), (PopularityCorrection(strength=1.0), certain)):
            bias = fix.fit(bank_queries, gallery).bias(gallery)
            changes.append(float(query_ranks(queries, gallery, links, bias).hits(1).mean() - plain))
    assert sum(change) / 5 > -0.005
    assert sum(certain) < sum(change)


# Properties


@given(seed=st.integers(0, 2**31), temperature=st.floats(0.1, 1.0), strength=st.floats(0.0, 3.0))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_properties_of_the_bias(seed, temperature, strength):
    x, y, _ = features(seed, n=30)
    x, y, weight = x.double(), y.double(), torch.rand(30, generator=torch.Generator().manual_seed(seed)) + 0.1
    x, y = normalize(x, dim=1), normalize(y, dim=1)

    def bias(queries, candidates, gallery, **weights):
        fix = PopularityCorrection(temperature, strength).fit(queries, candidates, tolerance=1e-10, **weights)
        return fix.bias(gallery)

    plain = bias(x, y, y)
    assert abs(float(plain.mean())) < 1e-12
    order = torch.randperm(30, generator=torch.Generator().manual_seed(seed + 1))
    close = {"atol": 1e-6 * (1 + strength), "rtol": 0}
    assert torch.allclose(bias(x[order], y, y), plain, **close), "the order of the queries"
    assert torch.allclose(bias(x, y[order], y), plain, **close), "the order of the candidates"
    assert torch.allclose(bias(x, y, y[order]), plain[order], **close), "the order of the gallery"
    weighted = bias(x, y, y, query_weight=weight, candidate_weight=weight)
    scaled = bias(x, y, y, query_weight=7 * weight, candidate_weight=0.1 * weight)
    assert torch.allclose(scaled, weighted, **close)
    ones = bias(x, y, y, query_weight=torch.full((30,), 3.0), candidate_weight=np.full(30, 0.2))
    assert torch.allclose(ones, plain, **close)


@pytest.mark.parametrize("temperature", [0.05, 0.2])
def test_a_new_item_gets_the_bias_of_solving_again(temperature):
    """A candidate of weight zero has no influence, so solving with new items of weight zero is the reference."""
    x, y, new = (
        normalize(side.double(), dim=1) for side in (*features(n=50)[:2], features(seed=3, n=20)[1])
    )  # at low temperatures zeta is determined to far fewer digits than the residual
    fix = PopularityCorrection(temperature).fit(x, y, tolerance=1e-10)
    weight = torch.cat([torch.ones(50), torch.zeros(20)])
    again = solve(x, torch.cat([y, new]), temperature=temperature, tolerance=1e-10, y_weight=weight).zeta
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
    default = (plain.temperature, plain.strength)
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
    assert (fix.temperature, fix.strength) == (best if clear else default)


def test_tuning_keeps_what_is_given_and_belongs_to_one_fit():
    x, y, links = features()
    bank_x, bank_y, _ = features(seed=1, n=200)
    assert PopularityCorrection(0.2).fit(bank_x, bank_y, pairs=(x, y, links)).temperature == 0.2
    both = PopularityCorrection(0.2, 0.9).fit(bank_x, bank_y, pairs=(x, y, links))
    assert (both.temperature, both.strength) == (0.2, 0.9)
    fix = PopularityCorrection().fit(bank_x, pairs=(x, y, links))
    assert fix.temperature is not None, "candidates: the gallery"
    fix.fit(y, x)
    again = PopularityCorrection().fit(y, x)
    assert (fix.temperature, fix.strength) == (again.temperature, again.strength)


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
    few.fit(x, y, query_weight=weight, candidate_weight=weight)
    same = PopularityCorrection(0.1).fit(x[::2], y[::2], query_weight=weight[::2], candidate_weight=weight[::2])
    assert torch.equal(few.bias(y), same.bias(y))
    bad = x.clone()
    bad[1] *= 2  # a row that is not used
    with pytest.raises(ValueError, match="queries: row 1 has norm 2"):
        few.fit(bad, y)


def test_features_of_other_norms_are_refused_or_normalized():
    x, y, _ = features()
    fix = PopularityCorrection().fit(x, y)
    for call, name in (
        (lambda: PopularityCorrection().fit(3 * x, y), "queries"),
        (lambda: PopularityCorrection().fit(x, 3 * y), "candidates"),
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
        (lambda x, y: PopularityCorrection().fit(x, y[:, :5]), "candidates has 5 columns.* 8"),
        (lambda x, y: PopularityCorrection().fit(x[:1], y), "queries has 1 row"),
        (lambda x, y: PopularityCorrection().fit(x[:1].expand(5, -1), y), "queries has only equal rows"),
        (lambda x, y: PopularityCorrection().fit(x, y[:1]), "candidates has 1 row"),
        (lambda x, y: PopularityCorrection().fit(x, candidate_weight=[1.0]), "candidate_weight needs candidates"),
        (lambda x, y: PopularityCorrection().fit(x, y, query_weight=[1.0]), "query_weight has shape"),
        (lambda x, y: PopularityCorrection().bias(y), "not fitted"),
        (lambda x, y: PopularityCorrection().fit(x, y).bias(y[:, :5]), "gallery has 5 columns.* 8"),
        (lambda x, y: PopularityCorrection().fit(x, y).gallery(y[:0]), "vectors has no rows"),
        (lambda x, y: PopularityCorrection().fit(x, y).queries(x[:, :5]), "queries has 5 columns.* 8"),
        (lambda x, y: PopularityCorrection().fit(x, y).gallery(y, "dot"), "metric='dot'"),
        (lambda x, y: PopularityCorrection().save("file"), "cannot be saved"),
        (lambda x, y: PopularityCorrection().fit(x).save("file"), "no candidates yet"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    x, y, _ = features()
    with pytest.raises(ValueError, match=message):
        call(x, y)


@pytest.mark.parametrize("name", ["temperature", "strength", "normalize", "bank_size", "tolerence"])
def test_mistakes_in_fit_name_the_constructor(name):
    named = name if name == "tolerence" else rf"PopularityCorrection\({name}="
    with pytest.raises(TypeError, match=named):
        PopularityCorrection().fit(torch.eye(4), torch.eye(4), **{name: 1})


# Files


def test_damaged_files_are_refused(tmp_path):
    x, y, _ = features()
    path = tmp_path / "fix.safetensors"
    PopularityCorrection(0.1).fit(x, y).save(path)
    tensors = load_file(path)
    settings = '{"temperature": 0.1, "strength": 1.0, "normalize": false, "bank_size": 100}'
    contents = [tensors | {"log_z": tensors["log_z"][:5].clone()}, {"queries": tensors["queries"]}]
    contents += [tensors | {"mass": mass} for mass in (torch.full((60,), torch.nan), torch.zeros(60))]
    contents += [tensors | {"queries": 2 * tensors["queries"]}]
    files = [(content, settings) for content in contents]
    for wrong in ("{}", "[]", "[", settings.replace("0.1", "null"), settings.replace("0.1", '"a"')):
        files.append((tensors, wrong))
    for number, (content, metadata) in enumerate(files):
        save_file(content, tmp_path / str(number), {"nuclr.PopularityCorrection": metadata})
    save_file(tensors, tmp_path / "foreign")
    (tmp_path / "cut").write_bytes(path.read_bytes()[:-10])
    (tmp_path / "text").write_text("no tensors")
    for file in {*tmp_path.iterdir(), tmp_path / "nothing"} - {path}:
        with pytest.raises(UserError, match=str(file)):
            PopularityCorrection.load(file)
    assert PopularityCorrection.load(path).temperature == 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_save_and_load_are_exact(dtype, tmp_path):
    x, y, links = features()
    x, y = x.to(dtype), y.to(dtype)
    fix = PopularityCorrection(normalize=True).fit(
        3 * x, 2 * y, pairs=(x, y, links), query_weight=torch.arange(60.0) + 1
    )
    fix.save(tmp_path / "fix.safetensors")
    loaded = PopularityCorrection.load(tmp_path / "fix.safetensors")
    assert repr(loaded) == repr(fix) and loaded.normalize
    new = features(seed=5)[1]
    assert torch.equal(loaded.bias(new), fix.bias(new))
    for metric in METRICS:
        assert torch.equal(loaded.gallery(new, metric), fix.gallery(new, metric))
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "fix.safetensors").read_bytes()
