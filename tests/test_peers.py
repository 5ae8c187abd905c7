"""The corrections that benchmarks/search.py compares with ours, against loops written from their formulas."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

SPEC = importlib.util.spec_from_file_location("peers", Path(__file__).parent.parent / "benchmarks" / "peers.py")
peers = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(peers)


@pytest.fixture(scope="module")
def task():
    generator = torch.Generator().manual_seed(0)
    sizes = (5, 7, 30, 40)  # queries, gallery, bank, candidates
    return peers.Task(*(normalize(torch.randn(n, 6, generator=generator).double() + 0.3, dim=1) for n in sizes))


def chosen(task, method, **setting):
    """Return the scores of one setting."""
    return peers.PEERS[method](task, **setting)


def expected(task, score):
    """Return score(i, j) of every query and item as a matrix."""
    rows = [[score(i, j) for j in range(len(task.gallery))] for i in range(len(task.queries))]
    return torch.tensor(rows, dtype=torch.float64)


def bank_scores(task, j):
    return [float(query @ task.gallery[j]) for query in task.bank]


def plain(task, i, j):
    return float(task.queries[i] @ task.gallery[j])


def same(one, other):
    return torch.allclose(one.double(), other, atol=1e-9)


@pytest.mark.parametrize("method", peers.PEERS)
def test_every_method_has_the_same_number_of_settings_and_a_published_one(task, method):
    settings = {str(setting) for setting in peers.GRIDS[method]}
    assert len(settings) == len(peers.GRIDS[method]) == peers.SETTINGS
    for setting in (*peers.GRIDS[method], peers.published(task)[method]):
        assert bool(peers.PEERS[method](task, **setting).isfinite().all())


def test_known_answers_count_as_the_mean_of_their_item(task):
    answers = torch.full((len(task.bank), 2), -1)
    answers[3, 0] = 5
    with_answers = peers.Task(task.queries, task.gallery, task.bank, task.candidates, answers)
    changed = (with_answers.bank_scores != task.bank_scores).nonzero()
    assert changed.tolist() == [[3, 5]]
    assert torch.isclose(with_answers.bank_scores[3, 5], task.bank_scores[:, 5].mean())


def test_softmaxes(task):
    factor = peers.TEMPERATURES[8]
    t = factor * task.scale

    def inverted(i, j):
        return math.exp(plain(task, i, j) / t) / sum(math.exp(s / t) for s in bank_scores(task, j))

    corrected = chosen(task, "inverted softmax", temperature=factor)
    assert same((corrected / t).exp(), expected(task, inverted))

    def dual(i, j):
        own = math.exp(plain(task, i, j) / t)
        return plain(task, i, j) * own / (own + sum(math.exp(s / t) for s in bank_scores(task, j)))

    assert same(chosen(task, "dual softmax", temperature=factor), expected(task, dual))
    hubs = {max(range(7), key=lambda j: float(query @ task.gallery[j])) for query in task.bank}
    for i, row in enumerate(chosen(task, "QB-Norm", temperature=factor)):
        best = max(range(7), key=lambda j: plain(task, i, j))
        assert torch.equal(row, corrected[i] if best in hubs else task.scores[i])


def test_dual_bank_softmax(task):
    t, u = 0.4 * task.scale, 0.5 * peers.score_std(task.candidates, task.candidates)

    def both(i, j):
        inside = sum(math.exp(float(c @ task.gallery[j]) / u) for c in task.candidates)
        over_bank = sum(math.exp(s / t) for s in bank_scores(task, j))
        return math.exp(plain(task, i, j) / t) / over_bank * math.exp(plain(task, i, j) / u) / inside

    assert same(chosen(task, "DualIS", temperature=0.4, candidate_temperature=0.5).exp(), expected(task, both))


def test_neighbors(task):
    def mean(j, k):
        return sum(sorted(bank_scores(task, j))[-k:]) / k

    assert same(chosen(task, "CSLS", neighbors=5), expected(task, lambda i, j: 2 * plain(task, i, j) - mean(j, 5)))
    nnn = expected(task, lambda i, j: plain(task, i, j) - 0.75 * mean(j, 8))
    assert same(chosen(task, "NNN", neighbors=8, strength=0.75), nnn)

    def distances(j):
        return sorted(float((query - task.gallery[j]).norm()) for query in task.bank)

    def square(i, j):
        return float((task.queries[i] - task.gallery[j]).square().sum())

    kth = expected(task, lambda i, j: -square(i, j) / distances(j)[9])
    assert same(chosen(task, "local scaling", neighbors=10, form="k-th"), kth)
    nicdm = expected(task, lambda i, j: -square(i, j) / (sum(distances(j)[:10]) / 10))
    assert same(chosen(task, "local scaling", neighbors=10, form="mean"), nicdm)


def test_mutual_proximity(task):
    def of_item(j):
        return [float((query - task.gallery[j]).norm()) for query in task.bank]

    def of_query(i):
        return [float((candidate - task.queries[i]).norm()) for candidate in task.candidates]

    def empirical(i, j):
        d = float((task.queries[i] - task.gallery[j]).norm())
        return math.prod(sum(other > d for other in others) / len(others) for others in (of_item(j), of_query(i)))

    assert same(chosen(task, "mutual proximity", neighbors=None, form="empirical"), expected(task, empirical))

    def gaussian(i, j):
        d, product = float((task.queries[i] - task.gallery[j]).norm()), 1.0
        for others in (of_item(j), of_query(i)):
            values = torch.tensor(sorted(others)[:20], dtype=torch.float64)
            product *= 0.5 * math.erfc((d - float(values.mean())) / float(values.std()) / math.sqrt(2))
        return product

    assert same(chosen(task, "mutual proximity", neighbors=20, form="Gaussian").exp(), expected(task, gaussian))


def test_dual_bank_sinkhorn(task):
    factor = peers.TEMPERATURES[-1]  # ten iterations converge at a high temperature
    items = torch.cat([task.gallery, task.candidates])
    logits = (items @ task.bank.T) / (factor * task.scale)
    u, v = torch.zeros(len(items)).double(), torch.zeros(len(task.bank)).double()
    for _ in range(1000):
        v = -torch.logsumexp(logits + u[:, None], dim=0)
        u = -torch.logsumexp(logits + v, dim=1) + math.log(len(task.bank) / len(items))
    bias = task.scores - chosen(task, "DBSN", temperature=factor)
    zeta = -factor * task.scale * u[: len(task.gallery)]
    assert torch.allclose(bias[0] - bias[0].mean(), zeta - zeta.mean(), atol=1e-6)
