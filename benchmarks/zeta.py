r"""Compare steps of zeta on fixed features: how near do they come to the exact popularity, and how far is one move?

    python benchmarks/zeta.py DATA/flickr8k/embeddings/train.npz [--part small|paper|both] [--out FILE]

The features are a ridge regression of the first caption's embedding on that of its image: n = 6,000 pairs, batches of
64, tau = 0.1 and 0.03. The part "paper" repeats the pairs 454 times (n = 2,724,000, batches of 512, tau = 0.03, two
epochs); the exact zeta is that of the 6,000. All rules see the same batches; the candidates are the captions. On one
thread, each part takes two to four minutes of processor time.

The correlations depend on the space: this one, and its ridge of 40, were chosen among some hundred because the numbers
of an earlier trial come out (zeta/tau with a standard deviation of 2.1 at tau = 0.03). `--ridge` tries another one.

A visit estimates c_j, the sum of the probabilities that all anchors give candidate j, and t_j = a (c_j - 1). In units
of tau, zeta_j moves by

    sgd     t_j                      clip    t_j, but at most 1
    log     log(1 + t_j)             tanh    2 tanh(t_j / 2)
    decay   log(1 + t_j) with a_k = a / sqrt(k) at visit k

and with "center" minus the mean of the moves of the batch. The estimator "paper" is the letter of Algorithm 1 with
eta = a tau B, and "reference" that of the published code with the step n/B times smaller. The velocity is
v <- beta v + (1 - beta) (c - 1), and t = a v. The row "nuclr" is the objective `build("nuclr")` itself.
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.evaluation.ranks import rank_correlation
from nuclr.objectives import build
from nuclr.popularity import solve

GAMMA = 0.8
COPIES = 454
EPOCHS = (10, 20, 40, 100)
SIZE = 0.3


@dataclass(frozen=True)
class Rule:
    """One way to move zeta. `epochs` is the length of the cosine schedule, 0 for a constant step."""

    form: str
    a: float
    center: bool = False
    momentum: float = 0.0
    epochs: int = 0
    estimator: str = "unbiased"

    def step_size(self, epoch: float, visit: int) -> float:
        """Return a at this time."""
        size = self.a
        if self.epochs:
            size *= 0.5 * (1 + math.cos(math.pi * min(1.0, epoch / self.epochs)))
        return size / math.sqrt(visit) if self.form == "decay" else size

    def move(self, t: Tensor) -> Tensor:
        """Return the moves of zeta/tau of a batch."""
        if self.form == "sgd":
            moved = t
        elif self.form == "clip":
            moved = t.clamp(max=1.0)
        elif self.form == "tanh":
            moved = 2 * torch.tanh(t / 2)
        else:
            moved = torch.log1p(t)
        return moved - moved.mean() if self.center else moved


class Rules:
    """The state of several rules, which get the same batches: zeta/tau, log u and the velocity, (n, rules)."""

    def __init__(self, rules: list[Rule], n: int) -> None:
        self.rules = rules
        self.zeta = torch.zeros(n, len(rules))
        self.log_u = torch.full((n, len(rules)), -math.inf)
        self.velocity = torch.zeros(n, len(rules)) if any(rule.momentum for rule in rules) else None
        self.largest_move = torch.zeros(len(rules), dtype=torch.float64)

    def step(self, weights: Tensor, index: Tensor, epoch: float) -> None:
        """Take a step; weights (B, B) are exp((s_ij - s_ii)/tau), with zeros on the diagonal."""
        n = len(self.zeta)
        batch = len(index)
        scale = (n - 1) / (batch - 1)
        zeta = self.zeta[index].double()
        old = self.log_u[index].double()
        inverse = torch.exp(-zeta)
        phi = scale * weights @ inverse
        u = torch.where(old.isneginf(), phi, (1 - GAMMA) * old.exp() + GAMMA * phi)
        own = inverse / (inverse + u)
        masses = inverse * (weights.T @ (1 / (inverse + u)))
        self.log_u[index] = u.log().float()
        moves = []
        for column, rule in enumerate(self.rules):
            excess = own[:, column] + scale * masses[:, column] - 1
            if rule.estimator == "paper":  # (n/B) (c - 1) + n/B - 1, with the step divided by n/B
                excess = excess + 1 - batch / n
            elif rule.estimator == "reference":
                excess = own[:, column] + masses[:, column] - batch / n
            if rule.momentum:
                excess = rule.momentum * self.velocity[index, column] + (1 - rule.momentum) * excess
                self.velocity[index, column] = excess.float()
            moves.append(rule.move(rule.step_size(epoch, 1 + int(epoch)) * excess))
        moved = torch.stack(moves, dim=1)
        self.largest_move = torch.maximum(self.largest_move, moved.abs().amax(dim=0))
        self.zeta[index] = (zeta + moved).float()

    def measure(self, exact: Tensor) -> list[dict]:
        """Return the numbers of every rule."""
        rows = []
        for column in range(len(self.rules)):
            rows.append(row(self.zeta[:, column].double(), exact, float(self.largest_move[column])))
        return rows


def features(path: Path, ridge: float) -> tuple[Tensor, Tensor]:
    """Return unit-norm features of the images and of one caption each, (6000, 384)."""
    with np.load(path) as arrays:
        x = torch.from_numpy(arrays["x"]).double()
        y = torch.from_numpy(arrays["y"]).double()
        image = torch.from_numpy(arrays["y_to_x"]).long()
    first = torch.full((len(x),), len(y)).scatter_reduce_(0, image, torch.arange(len(y)), "amin")
    x = x - x.mean(dim=0)
    y = (y - y.mean(dim=0))[first]
    covariance = x.T @ x + ridge * torch.eye(x.shape[1], dtype=torch.float64)
    predicted = x @ torch.linalg.solve(covariance, x.T @ y)
    return normalize(predicted, dim=1).float(), normalize(y, dim=1).float()


def small_rules() -> list[Rule]:
    """Return the rules that are compared on 6,000 pairs."""
    rules = [
        Rule("sgd", SIZE),
        Rule("log", SIZE),
        Rule("sgd", SIZE, center=True),
        Rule("log", SIZE, center=True),
        Rule("tanh", SIZE, center=True),
        Rule("decay", 0.5, center=True),
        Rule("sgd", SIZE, estimator="paper"),
        Rule("sgd", SIZE, estimator="reference"),
    ]
    for a in (0.1, 0.2, SIZE, 0.5):
        rules.append(Rule("clip", a, center=True))
    for momentum in (0.1, 0.9):
        for form in ("sgd", "log", "clip"):
            rules.append(Rule(form, SIZE, center=True, momentum=momentum))
    for epochs in EPOCHS:
        for form in ("sgd", "log", "clip"):
            rules.append(Rule(form, SIZE, center=True, epochs=epochs))
        rules.append(Rule("clip", SIZE, center=True, momentum=0.1, epochs=epochs))
        rules.append(Rule("clip", 0.5, center=True, epochs=epochs))
    return rules


def paper_rules() -> list[Rule]:
    """Return the rules that are compared at the paper's scale."""
    return [
        Rule("sgd", SIZE),
        Rule("log", SIZE),
        Rule("log", SIZE, center=True),
        Rule("clip", SIZE, center=True),
        Rule("clip", 0.5, center=True),
        Rule("sgd", SIZE, estimator="paper"),
    ]


class Objective:
    """The objective itself, with the interface of `Rules`."""

    def __init__(self, x: Tensor, y: Tensor, n: int, tau: float, epochs: int) -> None:
        self.x = x
        self.y = y
        self.objective = build("nuclr", num_samples=n, temperature=tau, gamma=GAMMA, sides="x")
        self.rules = [Rule("nuclr", self.objective.zeta_lr, center=True, epochs=epochs)]
        self.largest_move = 0.0

    def step(self, index: Tensor, epoch: float) -> None:
        """Take a step."""
        pairs = index % len(self.x)
        before = self.objective.zeta_y[index]
        self.objective.zeta_lr = self.rules[0].step_size(epoch, 1)
        with torch.no_grad():
            self.objective(self.x[pairs], self.y[pairs], index)
        move = (self.objective.zeta_y[index] - before).abs().max() / self.objective.temperature
        self.largest_move = max(self.largest_move, float(move))

    def measure(self, exact: Tensor) -> list[dict]:
        """Return the numbers of the objective."""
        return [row(self.objective.zeta_y.double() / self.objective.temperature, exact, self.largest_move)]


def row(zeta: Tensor, exact: Tensor, largest_move: float) -> dict:
    """Return the numbers of one rule; zeta and exact are in units of tau, and exact has mean 0."""
    return {
        "correlation": rank_correlation(zeta, exact),
        "distance": float((zeta - zeta.mean() - exact).square().mean().sqrt()),
        "mean": float(zeta.mean()),
        "largest_zeta": float(zeta.abs().max()),
        "largest_move": largest_move,
    }


def run(
    x: Tensor,
    y: Tensor,
    tau: float,
    rules: list[Rule],
    copies: int,
    batch_size: int,
    epochs: tuple[int, ...],
) -> list[dict]:
    """Return the rows of all rules and of the objective after the given numbers of epochs."""
    scores = x @ y.T
    exact = solve(scores=scores, temperature=tau).zeta.double() / tau
    exact = (exact - exact.mean()).repeat(copies)
    print(
        f"\nn = {len(exact)}, B = {batch_size}, tau = {tau}; distance of zeta = 0: {exact.square().mean().sqrt():.3f}"
    )
    n = len(exact)
    simulated = Rules(rules, n)
    objectives = [Objective(x, y, n, tau, 0)]
    if copies == 1:
        objectives.append(Objective(x, y, n, tau, max(epochs)))
    generator = torch.Generator().manual_seed(0)
    steps = n // batch_size
    results = []
    for epoch in range(max(epochs)):
        order = torch.randperm(n, generator=generator)
        for step in range(steps):
            index = order[step * batch_size : (step + 1) * batch_size]
            pairs = index % len(x)
            batch = scores[pairs][:, pairs].double()
            weights = torch.exp((batch - batch.diagonal()[:, None]) / tau)
            weights.fill_diagonal_(0.0)
            simulated.step(weights, index, epoch + step / steps)
            for objective in objectives:
                objective.step(index, epoch + step / steps)
        if epoch + 1 in epochs:
            for state in (simulated, *objectives):
                for rule, numbers in zip(state.rules, state.measure(exact), strict=True):
                    setting = {"n": n, "B": batch_size, "tau": tau, "epoch": epoch + 1}
                    results.append(setting | asdict(rule) | numbers)
    return results


def show(results: list[dict]) -> None:
    """Print one line per rule: rank correlation and distance after each number of epochs."""
    by_rule: dict[Rule, list[dict]] = {}
    for result in results:
        rule = Rule(**{field.name: result[field.name] for field in fields(Rule)})
        # after the end of its schedule, a rule does not move any more
        if not rule.epochs or result["epoch"] <= rule.epochs:
            by_rule.setdefault(rule, []).append(result)
    print(f"{'rule':48}{'epochs: rank correlation, distance':76}{'mean':>7}{'largest':>9}{'move':>7}")
    for rule, found in by_rule.items():
        name = f"{rule.form} {rule.a:g}"
        name += " centered" if rule.center else ""
        name += f" momentum {rule.momentum:g}" if rule.momentum else ""
        name += f" cosine {rule.epochs}" if rule.epochs else ""
        name += f" {rule.estimator}" if rule.estimator != "unbiased" else ""
        columns = "  ".join(f"{r['epoch']:>3}: {r['correlation']:.3f} {r['distance']:.3f}" for r in found)
        last = found[-1]
        print(
            f"{name:48}{columns:76}{last['mean']:7.2f}{last['largest_zeta']:9.2f}{last['largest_move']:7.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("embeddings", type=Path)
    parser.add_argument("--part", choices=("small", "paper", "both"), default="both")
    parser.add_argument("--ridge", type=float, default=40.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "zeta.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    x, y = features(options.embeddings, options.ridge)
    results = []
    if options.part != "paper":
        for tau in (0.1, 0.03):
            found = run(x, y, tau, small_rules(), copies=1, batch_size=64, epochs=EPOCHS)
            show(found)
            results += found
    if options.part != "small":
        found = run(x, y, 0.03, paper_rules(), copies=COPIES, batch_size=512, epochs=(1, 2))
        show(found)
        results += found
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
