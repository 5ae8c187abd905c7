"""Popularity-corrected retrieval against plain ranking and against its peers, on pairs that were not trained on.

    python benchmarks/correction.py RUN... [--out FILE.json]

For each run: the images of its validation pairs are split in two halves, each a gallery of its own; every method is
tuned on one half and reported on the other, and the reverse, averaged. Recall@1, mean of both directions, in percent.
The bank are training queries; `transductive` takes the queries of the half instead. All have the same bank, and as many
settings to choose from (SETTINGS). Scores s_ij of query i and candidate j, s_bj of query b of the bank:

- ours:              s_ij - c zeta_j, zeta solved at temperature t on the bank
- inverted softmax:  s_ij - c t log sum_b exp(s_bj/t)                   (Smith et al., ICLR 2017; there c = 1)
- QB-Norm, dynamic:  the same, only for queries whose plain best candidate is the best of one of the bank's queries
                     (Bogolin et al., CVPR 2022)
- NNN:               s_ij - c mean of the k largest s_bj                (Chowdhury et al., EMNLP 2024)

Intervals: paired bootstrap over the images of both halves, of the difference to plain ranking and to each peer.
"""

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nuclr.evaluation import gallery_bias
from nuclr.evaluation.ranks import ranks, ranks_of_scores
from nuclr.experiments.compare.sets import Features, halves
from nuclr.experiments.evaluate.features import pair_features, query_bank
from nuclr.experiments.evaluate.subject import open_subject
from nuclr.training import parts

TEMPERATURES = (0.03, 0.05, 0.07, 0.1)
FACTORS = (0.5, 0.75, 1.0, 1.25)
NEIGHBOURS = (32, 64, 128, 256)
SETTINGS = len(TEMPERATURES) * len(FACTORS)
METHODS = ("ours", "transductive", "inverted softmax", "QB-Norm", "NNN")
BOOTSTRAPS = 2000

# For a bank (m, d) and a gallery (n, d): every setting with its bias (n,).
Biases = Iterator[tuple[dict[str, float], Tensor]]


def ours(bank: Tensor, gallery: Tensor) -> Biases:
    """The popularity problem's zeta."""
    for temperature in TEMPERATURES:
        zeta = gallery_bias(bank, gallery, temperature)
        yield from (({"temperature": temperature, "factor": c}, c * zeta) for c in FACTORS)


def inverted_softmax(bank: Tensor, gallery: Tensor) -> Biases:
    """Log-mean-exp over the bank."""
    scores = bank @ gallery.T
    for temperature in TEMPERATURES:
        bias = temperature * torch.logsumexp(scores / temperature, dim=0)
        yield from (({"temperature": temperature, "factor": c}, c * bias) for c in FACTORS)


def nnn(bank: Tensor, gallery: Tensor) -> Biases:
    """Mean of the nearest queries of the bank."""
    nearest = (bank @ gallery.T).topk(max(NEIGHBOURS), dim=0).values
    for k in NEIGHBOURS:
        yield from (({"neighbours": k, "factor": c}, c * nearest[:k].mean(dim=0)) for c in FACTORS)


def hits_by_setting(method: str, queries: Tensor, gallery: Tensor, links: Tensor, bank: Tensor) -> dict[str, Tensor]:
    """Setting -> hit@1 of every query, (n,)."""
    if method != "QB-Norm":
        of: Callable[[Tensor, Tensor], Biases] = {"inverted softmax": inverted_softmax, "NNN": nnn}.get(method, ours)
        return {json.dumps(s): ranks(queries, gallery, links, bias).hits(1) for s, bias in of(bank, gallery)}
    plain = queries @ gallery.T
    hubs = torch.zeros(len(gallery), dtype=torch.bool)
    hubs[(bank @ gallery.T).argmax(dim=1)] = True
    touched = hubs[plain.argmax(dim=1)][:, None]
    return {
        json.dumps(s): ranks_of_scores(torch.where(touched, plain - bias, plain), links).hits(1)
        for s, bias in inverted_softmax(bank, gallery)
    }


def half_outcomes(half: Features, bank: tuple[Tensor, Tensor]) -> dict[str, dict[str, tuple[Tensor, Tensor]]]:
    """Method -> setting -> hit@1 of the images, (n_x,), and mean hit@1 of each image's captions, (n_x,)."""
    n_x, links = len(half.x), half.pairs
    owner = torch.empty(len(half.y), dtype=torch.long)
    owner[links[:, 1]] = links[:, 0]
    captions = torch.bincount(owner, minlength=n_x)

    def per_image(hits: Tensor) -> Tensor:
        # The mean over these is the mean over the captions, whatever number of them an image has.
        return torch.zeros(n_x, dtype=torch.float64).index_add(0, owner, hits) / captions.double().mean()

    found = {
        "plain": {"": (ranks(half.x, half.y, links).hits(1), per_image(ranks(half.y, half.x, links.flip(1)).hits(1)))}
    }
    for method in METHODS:
        bank_x, bank_y = (half.x, half.y) if method == "transductive" else bank
        to_text = hits_by_setting(method, half.x, half.y, links, bank_x)
        to_image = hits_by_setting(method, half.y, half.x, links.flip(1), bank_y)
        assert len(to_text) == SETTINGS
        found[method] = {setting: (to_text[setting], per_image(to_image[setting])) for setting in to_text}
    return found


def tuned(outcomes: list[dict[str, dict[str, tuple[Tensor, Tensor]]]]) -> dict[str, tuple[np.ndarray, list[str]]]:
    """Method -> outcome of every image of both halves, (n, 2), and the two settings, each chosen on the other half."""
    found = {}
    for method in outcomes[0]:
        chosen, parts_ = [], []
        for tuning, reporting in (outcomes, outcomes[::-1]):
            best = max(tuning[method], key=lambda setting: sum(float(h.mean()) for h in tuning[method][setting]))
            chosen.append(best)
            parts_.append(torch.stack(reporting[method][best], dim=1).numpy())
        found[method] = np.concatenate(parts_), chosen
    return found


def evaluate(run: Path, bank_size: int) -> dict[str, dict[str, object]]:
    """Every method's figures on a run's validation pairs."""
    subject = open_subject(run, False, None, torch.device("cpu"))
    data = subject.data
    assert data is not None and data.train is not None and data.val is not None, (
        "a run with training and validation pairs"
    )
    val, train = (
        parts.open_source(data, data.val, data.val_split),
        parts.open_source(data, data.train, data.split, data.keep),
    )
    features = pair_features(subject, val.pairs, val.numbers, "merge")
    bank = query_bank(subject, train.pairs, train.numbers, bank_size)
    whole = Features(features.x, features.y, features.pairs)
    found = tuned([half_outcomes(whole.of_images(rows), bank) for rows in halves(len(whole.x))])
    drawn = np.random.default_rng(0).integers(len(whole.x), size=(BOOTSTRAPS, len(whole.x)))
    means = {method: 100 * outcome[drawn].mean(axis=(1, 2)) for method, (outcome, _) in found.items()}
    return {
        method: {
            "recall@1": 100 * float(outcome.mean()),
            "image_to_text": 100 * float(outcome[:, 0].mean()),
            "text_to_image": 100 * float(outcome[:, 1].mean()),
            "gain": 100 * float(outcome.mean() - found["plain"][0].mean()),
            "gain_interval": np.quantile(means[method] - means["plain"], [0.025, 0.975]).tolist(),
            "ours_minus_this": 100 * float(found["ours"][0].mean() - outcome.mean()),
            "ours_minus_this_interval": np.quantile(means["ours"] - means[method], [0.025, 0.975]).tolist(),
            "settings": [json.loads(setting) if setting else {} for setting in chosen],
        }
        for method, (outcome, chosen) in found.items()
    }


def main() -> None:
    """Print a table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--bank-size", type=int, default=30_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "correction.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = {}
    for run in options.runs:
        found[run.name] = evaluate(run, options.bank_size)
        print(f"\n{run.name}: recall@1, halves of the validation images, tuned on the other, {SETTINGS} settings each")
        print(f"{'':18}{'mean':>8}{'i2t':>8}{'t2i':>8}{'gain':>8}{'95 %':>16}{'ours minus it':>16}{'95 %':>16}")
        for method, row in found[run.name].items():
            gain, ahead = (
                "[{:+.2f}, {:+.2f}]".format(*row[key]) for key in ("gain_interval", "ours_minus_this_interval")
            )
            print(
                f"{method:18}{row['recall@1']:>8.2f}{row['image_to_text']:>8.2f}{row['text_to_image']:>8.2f}"
                f"{row['gain']:>+8.2f}{gain:>16}{row['ours_minus_this']:>+16.2f}{ahead:>16}  {row['settings']}",
                flush=True,
            )
    print("\nmean over the runs")
    for method in ("plain", *METHODS):
        print(f"{method:18}{np.mean([of[method]['recall@1'] for of in found.values()]):>8.2f}")
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps({"settings": SETTINGS, "runs": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
