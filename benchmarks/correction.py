"""Popularity-corrected retrieval compared with plain ranking and with its peers, on held-out pairs.

    python benchmarks/correction.py RUN... [--out FILE.json]

For each run, the images of its validation pairs are split into two halves, each with its own gallery. Every method is
tuned on one half (best mean reciprocal rank, which is less noisy than recall@1) and reported on the other, then the
other way round, and both are averaged. The table shows recall@1 in percent, the mean of both directions, averaged over
the runs of one objective. The bank consists of training queries; `transductive` uses the queries of the half instead.
All methods have the same bank and the same number of settings to choose from (SETTINGS). With scores s_ij of query i
and candidate j, and s_bj of query b of the bank:

- ours:              s_ij - c zeta_j, zeta solved at temperature t on the bank's queries and the training candidates
                     that they choose from, and extended to the gallery
- inverted softmax:  s_ij - c t log sum_b exp(s_bj/t)                   (Smith et al., ICLR 2017; there c = 1)
- QB-Norm, dynamic:  the same, only for queries whose plain best candidate is the best of one of the bank's queries
                     (Bogolin et al., CVPR 2022)
- NNN:               s_ij - c mean of the k largest s_bj                (Chowdhury et al., EMNLP 2024)

Intervals: paired bootstrap over runs and images, of the difference to plain ranking and to each peer.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nuclr.evaluation.corrected import Bank
from nuclr.evaluation.ranks import Ranks, query_ranks, query_ranks_from_scores
from nuclr.runs.features import PairFeatures
from nuclr.runs.run import Run
from nuclr.studies.compare.measure import halves
from nuclr.studies.evaluate.subject import query_bank, subject_of_run

TEMPERATURES = (0.03, 0.05, 0.07, 0.1)
FACTORS = (0.5, 0.75, 1.0, 1.25)
NEIGHBORS = (32, 64, 128, 256)
SETTINGS = len(TEMPERATURES) * len(FACTORS)
BOOTSTRAPS = 2000

# For a bank (m, d) and a gallery (n, d): every setting with its bias (n,).
Biases = Iterator[tuple[dict[str, float], Tensor]]
# Setting -> one row per image: hit of the image, hits of its captions, and the reciprocal ranks of both, (n, 4).
Outcomes = dict[str, np.ndarray]


def ours(bank: Bank, half: PairFeatures, side: int) -> Biases:
    """Yield zeta of the images (side 0) or captions (side 1) of a half."""
    for temperature in TEMPERATURES:
        zeta = bank.zeta(half.x, half.y, temperature)[side]
        yield from (({"temperature": temperature, "factor": c}, c * zeta) for c in FACTORS)


def inverted_softmax(bank: Tensor, gallery: Tensor) -> Biases:
    """Yield the log-sum-exp over the bank."""
    scores = bank @ gallery.T
    for temperature in TEMPERATURES:
        bias = temperature * torch.logsumexp(scores / temperature, dim=0)
        yield from (({"temperature": temperature, "factor": c}, c * bias) for c in FACTORS)


def nnn(bank: Tensor, gallery: Tensor) -> Biases:
    """Yield the mean score of the nearest queries of the bank."""
    nearest = (bank @ gallery.T).topk(max(NEIGHBORS), dim=0).values
    for k in NEIGHBORS:
        yield from (({"neighbors": k, "factor": c}, c * nearest[:k].mean(dim=0)) for c in FACTORS)


def by_method(half: PairFeatures, pairs: Bank, side: int) -> Iterator[tuple[str, str, Ranks]]:
    """Yield (method, setting, ranks) of all methods with the images (side 0) or captions (side 1) as the gallery."""
    queries, gallery, bank = (half.x, half.y, pairs.x) if side else (half.y, half.x, pairs.y)
    links = half.links if side else half.links.flip(1)
    yield "plain", "", query_ranks(queries, gallery, links)
    for method, biases in (
        ("ours", ours(pairs, half, side)),
        ("transductive", ours(Bank(half.x, half.y), half, side)),
        ("NNN", nnn(bank, gallery)),
    ):
        yield from (
            (method, json.dumps(setting), query_ranks(queries, gallery, links, bias)) for setting, bias in biases
        )
    plain = queries @ gallery.T
    hubs = torch.zeros(len(gallery), dtype=torch.bool)
    hubs[(bank @ gallery.T).argmax(dim=1)] = True
    touched = hubs[plain.argmax(dim=1)][:, None]
    for setting, bias in inverted_softmax(bank, gallery):
        yield "inverted softmax", json.dumps(setting), query_ranks_from_scores(plain, links, bias)
        yield "QB-Norm", json.dumps(setting), query_ranks_from_scores(torch.where(touched, plain - bias, plain), links)


def half_outcomes(half: PairFeatures, bank: Bank) -> dict[str, Outcomes]:
    """Return, per method, the outcomes of every setting on one half."""
    links, n_x = half.links, len(half.x)
    owner = torch.empty(len(half.y), dtype=torch.long)
    owner[links[:, 1]] = links[:, 0]

    def per_image(values: Tensor) -> Tensor:
        # The mean over images equals the mean over captions, for any number of captions per image.
        return torch.zeros(n_x, dtype=torch.float64).index_add(0, owner, values) * n_x / len(owner)

    outcomes: dict[str, Outcomes] = {}
    for (method, setting, of_x), (*same, of_y) in zip(by_method(half, bank, 1), by_method(half, bank, 0), strict=True):
        assert same == [method, setting]
        columns = [of_x.hits(1), per_image(of_y.hits(1)), 1 / of_x.expected(), per_image(1 / of_y.expected())]
        outcomes.setdefault(method, {})[setting] = torch.stack(columns, dim=1).numpy()
    return outcomes


def tuned(halves_: list[dict[str, Outcomes]]) -> dict[str, tuple[np.ndarray, list[str]]]:
    """Return, per method, the hits of every image of both halves, (n, 2), and the settings chosen on the other half."""
    best = {}
    for method in halves_[0]:
        hits, chosen = [], []
        for tuning, reporting in (halves_, halves_[::-1]):
            settings = tuning[method]
            chosen.append(max(settings, key=lambda setting: settings[setting][:, 2:].mean()))
            hits.append(reporting[method][chosen[-1]][:, :2])
        best[method] = np.concatenate(hits), chosen
    return best


def measure(run: Path, bank_size: int) -> tuple[str, list[dict[str, Outcomes]]]:
    """Return the run's objective and all outcomes on both halves of its validation pairs."""
    opened = Run.open(run, device="cpu")
    if opened.val is None:
        raise SystemExit(f"{run}: needs a run with held-out pairs (data.val)")
    bank = Bank(*query_bank(subject_of_run(opened), opened.train.pairs, opened.train.numbers, bank_size))
    whole = opened.features(opened.val)
    return opened.settings.objective.name, [half_outcomes(whole.of_x(rows), bank) for rows in halves(whole.x_group)]


def summarize(runs: list[dict[str, tuple[np.ndarray, list[str]]]]) -> dict[str, dict[str, Any]]:
    """Return, per method, the metrics over the runs of one objective."""
    hits = {method: np.stack([run[method][0] for run in runs]) for method in runs[0]}  # (runs, n, 2)
    rng = np.random.default_rng(0)
    count, images, _ = hits["plain"].shape
    draws = [(rng.integers(count, size=count), rng.integers(images, size=images)) for _ in range(BOOTSTRAPS)]
    means = {m: np.array([100 * of[r][:, i].mean() for r, i in draws]) for m, of in hits.items()}
    table = {}
    for method, of in hits.items():
        table[method] = {
            "recall@1": 100 * of.mean(),
            "image_to_text": 100 * of[..., 0].mean(),
            "text_to_image": 100 * of[..., 1].mean(),
            "gain": 100 * (of.mean() - hits["plain"].mean()),
            "gain_interval": np.quantile(means[method] - means["plain"], [0.025, 0.975]).tolist(),
            "ours_minus_it": 100 * (hits["ours"].mean() - of.mean()),
            "ours_minus_it_interval": np.quantile(means["ours"] - means[method], [0.025, 0.975]).tolist(),
            "settings": [json.loads(setting) for run in runs for setting in run[method][1] if setting],
        }
    return table


def show(name: str, runs: int, table: dict[str, dict[str, Any]]) -> None:
    """Print a table."""
    print(f"\n{name}, {runs} run{'s' * (runs > 1)}: recall@1 in percent, {SETTINGS} settings, tuned on the other half")
    print(f"{'':18}{'mean':>8}{'i2t':>8}{'t2i':>8}{'gain':>8}{'95 %':>16}{'ours minus it':>16}{'95 %':>16}")
    for method, row in table.items():
        gain, ahead = ("[{:+.2f}, {:+.2f}]".format(*row[key]) for key in ("gain_interval", "ours_minus_it_interval"))
        print(
            f"{method:18}{row['recall@1']:>8.2f}{row['image_to_text']:>8.2f}{row['text_to_image']:>8.2f}"
            f"{row['gain']:>+8.2f}{gain:>16}{row['ours_minus_it']:>+16.2f}{ahead:>16}",
            flush=True,
        )


def main() -> None:
    """Print a table for each objective and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--bank-size", type=int, default=30_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "correction.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    by_objective: dict[str, list[Any]] = {}
    for run in options.runs:
        name, outcomes = measure(run, options.bank_size)
        by_objective.setdefault(name, []).append(tuned(outcomes))
        print(f"{run} done", file=sys.stderr, flush=True)
    tables = {name: summarize(runs) for name, runs in by_objective.items()}
    for name, table in tables.items():
        show(name, len(by_objective[name]), table)
    everything = [run for runs in by_objective.values() for run in runs]
    if len(tables) > 1:
        tables["all"] = summarize(everything)
        show("all", len(everything), tables["all"])
    options.out.parent.mkdir(exist_ok=True)
    content = {"settings": SETTINGS, "runs": {name: len(runs) for name, runs in by_objective.items()}, "tables": tables}
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
