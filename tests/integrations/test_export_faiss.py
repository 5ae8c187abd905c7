"""`nuclr export --to faiss`: ordinary queries of the old width, ranked by corrected scores."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from nuclr.export.index import add_items, build_index
from nuclr.popularity import PopularityCorrection
from tests.embedding_folders import make_clip_retrieval

faiss = pytest.importorskip("faiss")
faiss.omp_set_num_threads(1)  # several threads build another graph every time
ITEMS, QUERIES, WIDTH, K = 3000, 200, 16, 10
ROUNDING = 3e-6  # of scores in float32: an index sums in another order


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    """Write queries in ten groups, items near to them with some hubs, a bank, and new items."""
    folder = tmp_path_factory.mktemp("search")
    generator = torch.Generator().manual_seed(0)
    groups = torch.randn(10, WIDTH, generator=generator) + 0.8

    def around(count):
        noise = torch.randn(count, WIDTH, generator=generator)
        return normalize(groups[torch.arange(count) % 10] + 0.7 * noise, dim=1).numpy()

    arrays = {"bank": around(400), "queries": around(QUERIES), "items": around(ITEMS), "new": around(50)}
    arrays["items"][::150] = normalize(groups.mean(dim=0) + 0.2 * torch.randn(20, WIDTH, generator=generator), dim=1)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder, arrays


def corrected_scores(arrays, items, fix) -> np.ndarray:
    """Return the corrected score of every query and item in float64, by brute force."""
    bias = fix.bias(items, center=False).double().numpy()
    return arrays["queries"].astype(np.float64) @ items.T.astype(np.float64) - bias


def assert_ranked(ids, scores):
    """Check that the ids are the best items, in order, up to the rounding of equal scores."""
    best = -np.sort(-scores, axis=1)[:, : ids.shape[1]]
    np.testing.assert_allclose(np.take_along_axis(scores, ids, axis=1), best, rtol=0, atol=ROUNDING)


def recall(ids, scores) -> float:
    best = np.argsort(-scores, axis=1)[:, :K]
    return float(np.mean([len(set(row) & set(exact)) / K for row, exact in zip(ids, best.tolist(), strict=True)]))


def test_the_flat_index_ranks_as_brute_force(nuclr, search, tmp_path):
    folder, arrays = search
    out = tmp_path / "out"
    done = nuclr("export", folder / "items.npy", "--to", "faiss", "--bank", folder / "bank.npy", "--out", out)
    assert done.status == 0, done.err
    assert "3,000 items of width 16" in done.out
    index, fix = faiss.read_index(str(out / "index.faiss")), PopularityCorrection.load(out / "correction.safetensors")
    assert index.d == WIDTH and index.ntotal == ITEMS and index.metric_type == faiss.METRIC_INNER_PRODUCT
    scores = corrected_scores(arrays, arrays["items"], fix)
    found, ids = index.search(arrays["queries"], K)  # queries as they are
    np.testing.assert_array_equal(ids, np.argsort(-scores, axis=1, kind="stable")[:, :K])
    np.testing.assert_allclose(found, np.take_along_axis(scores, ids, axis=1), atol=1e-5)
    plain = np.argsort(-(arrays["queries"] @ arrays["items"].T), axis=1)[:, :K]
    assert (np.sort(ids) == np.sort(plain)).mean() < 0.9  # the correction changes what is found
    expected = PopularityCorrection().fit(arrays["bank"], arrays["items"])
    assert torch.equal(fix.bias(arrays["items"]), expected.bias(arrays["items"]))


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_other_kinds_lose_as_much_as_without_correction(search, kind):
    _, arrays = search
    fix = PopularityCorrection().fit(arrays["bank"], arrays["items"])
    plain = arrays["queries"].astype(np.float64) @ arrays["items"].T.astype(np.float64)
    shares = [
        recall(build_index(arrays["items"], correction, kind).search(arrays["queries"], K)[1], scores)
        for correction, scores in ((None, plain), (fix, corrected_scores(arrays, arrays["items"], fix)))
    ]
    assert min(shares) > 0.9 and shares[1] > shares[0] - 0.03, shares


@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_new_items(nuclr, search, tmp_path, kind):
    folder, arrays = search
    arguments = ["--index", kind] + (["--probes", "54"] if kind == "ivf" else [])  # all lists
    done = nuclr("export", folder / "items.npy", "--to", "faiss", "--bank", folder / "bank.npy", "--out",
                 tmp_path / "out", *arguments)  # fmt: skip
    assert done.status == 0, done.err
    index = faiss.read_index(str(tmp_path / "out" / "index.faiss"))
    fix = PopularityCorrection.load(tmp_path / "out" / "correction.safetensors")
    add_items(index, fix, arrays["new"])
    assert index.ntotal == ITEMS + 50
    faiss.write_index(index, str(tmp_path / "new.faiss"))
    ids = faiss.read_index(str(tmp_path / "new.faiss")).search(arrays["queries"], K)[1]
    scores = corrected_scores(arrays, np.concatenate([arrays["items"], arrays["new"]]), fix)
    if kind == "hnsw":
        assert recall(ids, scores) > 0.95
    else:
        assert_ranked(ids, scores)
    assert (ids >= ITEMS).any()


def test_adding_to_another_index_is_refused(search):
    _, arrays = search
    fix = PopularityCorrection().fit(arrays["bank"], arrays["items"])
    with pytest.raises(ValueError, match="index is IndexFlatIP; give an index of nuclr export"):
        add_items(faiss.IndexFlatIP(WIDTH), fix, arrays["new"])
    with pytest.raises(ValueError, match="vectors has 5 columns; the bank has 16"):
        add_items(build_index(arrays["items"], fix), fix, np.eye(5, dtype="f4"))


def test_a_correction_of_hubness_and_options_of_the_index(nuclr, search, tmp_path):
    folder, _ = search
    done = nuclr("hubness", folder / "queries.npy", folder / "items.npy", "--bank", folder / "bank.npy", "--out",
                 tmp_path / "hubs")  # fmt: skip
    assert done.status == 0, done.err
    correction = tmp_path / "hubs" / "correction.safetensors"
    common = ("export", folder / "items.npy", "--to", "faiss", "--correction", correction)
    options = {
        "ivf": ("--lists", "20", "--probes", "7"),
        "hnsw": ("--neighbors", "8", "--ef-construction", "50", "--ef-search", "40"),
    }
    for kind, arguments in options.items():
        done = nuclr(*common, "--out", tmp_path / kind, "--index", kind, *arguments)
        assert done.status == 0, done.err
        index = faiss.read_index(str(tmp_path / kind / "index.faiss"))  # it owns the inner index
        inner = faiss.downcast_index(index.index)
        if kind == "ivf":
            assert (inner.nlist, inner.nprobe) == (20, 7)
        else:
            assert (inner.hnsw.nb_neighbors(1), inner.hnsw.efConstruction, inner.hnsw.efSearch) == (8, 50, 40)
    assert (tmp_path / "ivf" / "correction.safetensors").read_bytes() == correction.read_bytes()


def test_normalized_items_and_queries(nuclr, search, tmp_path):
    folder, arrays = search
    scale = np.random.default_rng(0).uniform(0.2, 5, size=(ITEMS, 1)).astype("f4")
    np.save(tmp_path / "items.npy", scale * arrays["items"])
    done = nuclr("export", tmp_path / "items.npy", "--to", "faiss", "--bank", folder / "bank.npy", "--out",
                 tmp_path / "out", "--normalize")  # fmt: skip
    assert done.status == 0, done.err
    index = faiss.read_index(str(tmp_path / "out" / "index.faiss"))
    fix = PopularityCorrection.load(tmp_path / "out" / "correction.safetensors")
    ids = index.search(3 * arrays["queries"], K)[1]  # queries of any norm
    assert_ranked(ids, corrected_scores(arrays, arrays["items"], fix))


def test_items_and_bank_from_folders_and_files_of_pairs(nuclr, search, tmp_path):
    _, arrays = search
    bank, items = arrays["bank"], arrays["items"][:400]
    make_clip_retrieval(tmp_path / "bank", bank, items, (150, 250))
    np.savez(tmp_path / "bank.npz", x=bank, y=items)
    np.savez(tmp_path / "pairs.npz", x=bank, y=arrays["items"][400:900])
    make_clip_retrieval(tmp_path / "items", bank[:100], arrays["items"][400:500], (100,))
    fix = PopularityCorrection().fit(bank, items)
    for source, name in ((tmp_path / "pairs.npz", "bank.npz"), (tmp_path / "items", "bank")):
        out = tmp_path / f"out {name}"
        done = nuclr("export", source, "--to", "faiss", "--bank", tmp_path / name, "--out", out)
        assert done.status == 0, done.err
        saved = PopularityCorrection.load(out / "correction.safetensors")
        assert torch.equal(saved.bias(items), fix.bias(items))
    # Items that are their own bank search one another.
    done = nuclr("export", tmp_path / "pairs.npz:y", "--to", "faiss", "--bank", tmp_path / "pairs.npz:y", "--out",
                 tmp_path / "same")  # fmt: skip
    assert done.status == 0, done.err
    itself = arrays["items"][400:900]
    expected = PopularityCorrection().fit(itself, itself).bias(items)
    assert torch.equal(PopularityCorrection.load(tmp_path / "same" / "correction.safetensors").bias(items), expected)


def test_wrong_input(nuclr, search, tmp_path, monkeypatch):
    folder, arrays = search
    monkeypatch.chdir(tmp_path)
    np.save("wide.npy", np.eye(20, dtype="f4"))
    np.save("long.npy", 2 * arrays["items"])
    broken = arrays["items"].copy()
    broken[17, 3] = np.nan
    np.save("nan.npy", broken)
    PopularityCorrection(0.1).fit(np.eye(20), np.eye(20)).save("fix.safetensors")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    bank = ("--bank", folder / "bank.npy")
    for source, arguments, words in (
        ("items", (), "needs either --bank QUERIES or --correction FILE"),
        ("items", (*bank, "--correction", "fix.safetensors"), "needs either --bank QUERIES or --correction FILE"),
        ("items", ("--bank", "wide.npy"), "--bank wide.npy has 20 columns and"),
        ("items", ("--correction", "fix.safetensors"), "--correction fix.safetensors has 20 columns and"),
        ("items", ("--correction", "wide.npy"), "wide.npy: not a popularity correction"),
        ("items", ("--bank", "none.npy"), "none.npy: no such file or folder"),
        ("items", (*bank, "--index", "annoy"), "--index annoy: unknown kind of index; use one of flat, ivf, hnsw"),
        ("items", (*bank, "--lists", "9"), "--lists belongs to --index ivf, not to --index flat"),
        ("items", (*bank, "--index", "ivf", "--probes", "0"), "--probes 0: needs a number of at least 1"),
        ("items", (*bank, "--index", "ivf", "--lists", "5000"), "--lists 5000: there are only 3000 items"),
        ("items", (*bank, "--temperature", "-1"), "--temperature is -1; it needs a number above 0"),
        ("items", (*bank, "--best"), "--best: not an option of --to faiss"),
        ("items", (*bank, "--out", "full"), "--out full: the folder is not empty"),
        ("nan", bank, "nan.npy: row 17 holds a NaN or an infinity"),
        ("long", bank, "long.npy: row 0 has norm 2"),
    ):
        path = folder / "items.npy" if source == "items" else f"{source}.npy"
        refused = nuclr("export", path, "--to", "faiss", "--out", "out", *arguments)
        assert refused.status == 2 and words in refused.err, refused.err
        assert len(refused.err.strip().splitlines()) == 1, refused.err
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "full" / "mine").read_text() == "mine"
    refused = nuclr("export", "run", "--to", "hf", "--out", "out", *bank)
    assert refused.status == 2 and "--bank: not an option of --to hf, but of faiss" in refused.err
