"""Planted hubs: documents are compared with a clean gallery before they enter it."""

import math

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from nuclr.errors import UserError
from nuclr.popularity import PopularityCorrection, planted
from nuclr.popularity.bank import query_weights
from nuclr.popularity.planted import MEASURES, Suspicion

TOPICS = 20


def search(seed=0, queries=600, documents=1500, d=24):
    """Queries and documents about 20 topics, clean; and the directions of the topics."""
    generator = torch.Generator().manual_seed(seed)
    topics = torch.randn(TOPICS, d, generator=generator)

    def draw(count):
        topic = torch.randint(TOPICS, (count,), generator=generator)
        return normalize(topics[topic] + 1.2 * torch.randn(count, d, generator=generator) + 0.3, dim=1)

    return draw(queries), draw(documents), normalize(topics + 0.3, dim=1)


@pytest.fixture(scope="module")
def clean():
    queries, documents, topics = search()
    return PopularityCorrection().fit(queries, documents[:1000]), queries, documents, topics


def moved(documents, queries, deviations, gallery):
    """Documents moved towards the mean query until their mean score is this far above the mean of the gallery."""
    mean = queries.mean(dim=0)
    level = gallery @ mean
    goal = level.mean() + deviations * level.std()
    result = []
    for document in documents:
        step = 0.0
        while normalize(document + step * mean, dim=0) @ mean < goal:
            step += 0.05
            assert step < 100
        result.append(normalize(document + step * mean, dim=0))
    return torch.stack(result)


def test_planted_hubs_are_found(clean):
    fix, _, documents, topics = clean
    attacker = search(seed=0, queries=1200)[0][600:]  # other queries about the same topics
    found = fix.suspicious(moved(documents[1000:1020], attacker, 4, documents[:1000]))
    assert bool((found.p_value <= 0.004).all())
    assert bool((found.score > 1).all())
    of_topics = fix.suspicious(topics)
    assert int((of_topics.p_value <= 0.004).sum()) >= 15
    assert MEASURES[int(of_topics.measure.mode().values)] != "mean score"
    everything = fix.suspicious(normalize(attacker.mean(dim=0, keepdim=True), dim=1))
    assert float(everything.p_value) == pytest.approx(1 / 1001)
    assert float(everything.score) > float(found.score.median())


def test_p_values_of_clean_documents_are_uniform():
    values = []
    for seed in range(4):
        queries, documents, _ = search(seed)
        values.append(PopularityCorrection().fit(queries, documents[:750]).suspicious(documents[750:]).p_value)
    values = torch.cat(values)
    for level in (0.5, 0.1, 0.02):
        share = float((values <= level).double().mean())
        assert abs(share - level) < 4 * math.sqrt(level * (1 - level) * (1 / 3000 + 1 / 3000)), level
    assert float(values.min()) >= 1 / 751


def test_clean_items_and_their_copies_have_the_same_score(clean):
    fix, _, documents, _ = clean
    again = fix.suspicious(documents[:1000])
    assert torch.allclose(again.score.sort().values, fix._clean.scores, atol=1e-5)
    for level in (0.5, 0.1):
        assert float((again.p_value <= level).double().mean()) == pytest.approx(level, abs=0.02)
    assert int((again.p_value <= 0.01).sum()) in range(8, 12), "copies of clean items are no alarms"


def reference_score(queries, items, documents, allowed):
    """Scores in float64, counted by loops; allowed(query, item) is False for copies and known answers."""
    weight = query_weights(queries)
    weight = (weight / weight.sum()).tolist()
    depths = [min(3, len(items) // 10), min(100, len(items) // 10)]
    one_query = sum(w**2 for w in weight)

    def measures(document, number=None):
        values = []
        for depth in depths:
            share = 0.0
            for b, query in enumerate(queries):
                if allowed(b, number):
                    own = float(query @ document)
                    better = sum(
                        float(query @ item) > own + 1e-9
                        for j, item in enumerate(items)
                        if j != number and allowed(b, j)
                    )
                    share += weight[b] * (better < depth)
            values.append(math.log(share + one_query))
        rows = [b for b in range(len(queries)) if allowed(b, number)]
        mass = sum(weight[b] for b in rows)
        return [*values, sum(weight[b] * float(queries[b] @ document) for b in rows) / mass]

    clean = np.array([measures(item, j) for j, item in enumerate(items)])
    low, high = np.quantile(clean, [0.5, 0.99], axis=0)
    new = np.array([measures(document) for document in documents])
    return ((new - low) / (high - low)).max(axis=1), ((clean - low) / (high - low)).max(axis=1)


@pytest.mark.parametrize("known", [False, True])
def test_score_is_that_of_the_formulas(known, monkeypatch):
    queries, documents, topics = (part.double() for part in search(queries=30, documents=60))
    queries, documents, topics = (normalize(part, dim=1) for part in (queries, documents, topics))
    answers = {4: 17, 9: 3, 11: 17} if known else {}
    links = list(answers.items()) or None
    monkeypatch.setattr(planted, "TILE", 200)  # several tiles
    fix = PopularityCorrection().fit(queries, documents[:40], links)
    expected, clean = reference_score(
        queries, documents[:40], torch.cat([documents[40:], topics]), lambda b, j: j is None or answers.get(b) != j
    )
    found = fix.suspicious(torch.cat([documents[40:], topics]))
    assert torch.allclose(found.score, torch.from_numpy(expected))
    p_value = [(1 + sum(other >= score for other in clean)) / 41 for score in expected]
    assert found.p_value.tolist() == pytest.approx(p_value)


def test_items_that_search_items_do_not_count_themselves():
    _, documents, _ = search(queries=10, documents=1000)
    fix = PopularityCorrection().fit(documents[:500], documents[:500], items=True)
    values = fix.suspicious(documents[500:]).p_value
    assert abs(float((values <= 0.1).double().mean()) - 0.1) < 0.06
    assert torch.equal(
        fix.suspicious(documents[:500]).p_value.sort().values[[0, -1]] > 0.5, torch.tensor([False, True])
    )


def test_large_banks_are_thinned(clean, monkeypatch):
    _, queries, documents, topics = clean
    monkeypatch.setattr(planted, "QUERIES", 250)
    fix = PopularityCorrection().fit(queries, documents[:1000])
    assert fix._clean.thresholds.shape == (201, 2)
    assert int((fix.suspicious(topics).p_value <= 0.01).sum()) >= 12
    assert float(fix.suspicious(documents[1000:]).p_value.mean()) == pytest.approx(0.5, abs=0.06)


def test_saved_and_loaded_bit_for_bit(clean, tmp_path):
    fix, _, documents, topics = clean
    fix.save(tmp_path / "fix.safetensors")
    again = PopularityCorrection.load(tmp_path / "fix.safetensors")
    vectors = torch.cat([documents[1000:], topics])
    for name in ("score", "p_value", "measure"):
        assert torch.equal(getattr(again.suspicious(vectors), name), getattr(fix.suspicious(vectors), name))
    tensors = load_file(tmp_path / "fix.safetensors")
    added = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("clean_"))
    assert added < 0.25 * tensors["queries"].nbytes  # of only 24 dimensions


@pytest.mark.parametrize("name", ["clean_thresholds", "clean_scale", "clean_scores"])
def test_damaged_files_are_refused(clean, tmp_path, name):
    path = tmp_path / "fix.safetensors"
    clean[0].save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors[name] = tensors[name].flatten()[:-1] if name != "clean_scores" else tensors[name][None]
    save_file(tensors, path, metadata)
    with pytest.raises(UserError, match=name):
        PopularityCorrection.load(path)


def test_wrong_input(clean):
    fix, _, documents, _ = clean
    with pytest.raises(ValueError, match="vectors"):
        fix.suspicious(2 * documents)
    with pytest.raises(ValueError, match=r"vectors.*24"):
        fix.suspicious(documents[:, :5])
    with pytest.raises(ValueError, match="vectors"):
        fix.suspicious(documents[:0])
    with pytest.raises(ValueError, match="fit"):
        PopularityCorrection().suspicious(documents)


def test_small_galleries_and_arrays():
    queries, documents, _ = search(queries=5, documents=3)
    found = PopularityCorrection(0.5).fit(queries, documents[:2]).suspicious(documents.numpy())
    assert found.p_value.shape == (3,)
    assert set((3 * found.p_value).round().tolist()) <= {1, 2, 3}
    assert isinstance(found, Suspicion)
    assert "\n" not in repr(found)
    assert "documents=3" in repr(found)
