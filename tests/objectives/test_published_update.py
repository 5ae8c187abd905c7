"""nuclr-authors with its defaults against the update of the published code, as loops in float64.

`Published` is written from a reading of the class DGCL_Loss and of the training loop around it (bokun-wang/NUCLR at
ddaec8d), one pair at a time. It keeps what that code keeps: a sum s and a shift b per anchor, a velocity z and zeta per
candidate, and xi per side. Where the shift of an anchor grows, the published code multiplies s by exp(old b - new b)
although the terms of s are divided by the temperature; `repaired=True` divides by the temperature here too.
"""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from nuclr.objectives import AuthorsNUCLR
from nuclr.runs.settings import Schedule
from nuclr.training.schedules import step_size

PAIRS, BATCH, WIDTH, EPOCHS, FROZEN = 12, 4, 6, 8, 2
PLAN = Schedule(epochs=EPOCHS, zeta_frozen_epochs=FROZEN, zeta="cosine", zeta_steps=True, per_epoch=True)
TAU, GAMMA, THETA, ETA, RATIO, ZETA_INIT = 0.07, 0.8, 0.9, 3e-2, 0.1, -0.05


class Published:
    """The state of one side: anchors with s and b, candidates with zeta and z, and xi of the candidates."""

    def __init__(self, repaired: bool) -> None:
        self.repaired = repaired
        self.s, self.b, self.z = ([0.0] * PAIRS for _ in range(3))
        self.zeta, self.xi = [ZETA_INIT] * PAIRS, 0.0

    def step(self, scores: list[list[float]], index: list[int], eta: float | None) -> list[list[float]]:
        """Return the weights w[anchor][candidate] of the model's gradient, and update the state.

        Args:
            scores: of anchor i of the batch and candidate j.
            index: the pair of each row.
            eta: the step size of zeta; None while zeta is frozen.

        """
        rows = range(len(index))
        terms = [[0.0] * len(index) for _ in rows]
        weights = [[0.0] * len(index) for _ in rows]
        for i in rows:
            pair, margins = index[i], [scores[i][j] - scores[i][i] for j in rows]
            before, after = self.b[pair], max(self.b[pair], *margins)
            self.b[pair] = after
            for j in rows:
                terms[i][j] = math.exp((margins[j] - after - self.zeta[index[j]]) / TAU)
            total = sum(terms[i][j] for j in rows if j != i)
            unit = TAU if self.repaired else 1.0
            if self.s[pair] == 0.0:
                self.s[pair] = total * math.exp((after - before) / unit)
            self.s[pair] = (1 - GAMMA) * self.s[pair] * math.exp((before - after) / unit) + GAMMA * total
            guard = (len(index) - 1) / (PAIRS - 1) * math.exp(-(self.xi + after) / TAU)
            for j in rows:
                if j != i:
                    weights[i][j] = terms[i][j] / max(self.s[pair] + guard, 1e-16)
        if eta is not None:
            self._move_zeta(terms, index, eta)
        return weights

    def _move_zeta(self, terms: list[list[float]], index: list[int], eta: float) -> None:
        normalizers = []
        for pair in index:
            own = math.exp(-(self.zeta[pair] + self.b[pair]) / TAU) / (PAIRS - 1)
            normalizers.append(max(self.s[pair] / (len(index) - 1) + own, 1e-16))
        for j, pair in enumerate(index):
            share = sum(terms[i][j] / normalizers[i] for i in range(len(index))) / len(index)
            slope = 1 - PAIRS / (PAIRS - 1) * share
            if self.z[pair] == 0.0:
                self.z[pair] = slope
            self.z[pair] = (1 - THETA) * self.z[pair] + THETA * slope
        for pair in index:
            self.zeta[pair] -= eta * self.z[pair]

    def end_epoch(self) -> None:
        self.xi = max(0.0, *self.zeta)

    def log_u(self) -> np.ndarray:
        """Return log u as `nuclr-authors` defines it, from s and b."""
        scale = math.log((PAIRS - 1) / (BATCH - 1))
        return np.array([scale + math.log(s) + b / TAU for s, b in zip(self.s, self.b, strict=True)])


def published_eta(epoch: int) -> float | None:
    """Return the published step size of zeta; None in the first epochs, in which zeta is frozen."""
    if epoch < FROZEN:
        return None
    eta = 0.5 * ETA * (1 + math.cos(math.pi * (epoch - FROZEN) / (EPOCHS - 1 - FROZEN)))
    if epoch < int(EPOCHS / 2):
        return eta
    return eta / 10 if epoch < int(EPOCHS * 3 / 4) else eta / 100


def features(hard: bool, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch; if it is not `hard`, every positive has the largest score of its row and column."""
    x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    noise = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    y = noise + 0.5 * x if hard else x + 0.05 * noise
    return normalize(x, dim=1), normalize(y, dim=1)


def compare(hard: bool, repaired: bool) -> dict[str, float]:
    """Train both for a few epochs and return the largest difference of the gradients and of each part of the state."""
    generator = torch.Generator().manual_seed(0)
    objective = AuthorsNUCLR(PAIRS, temperature=TAU, zeta_lr=ETA).double()
    assert (objective.gamma, objective.zeta_init, objective.zeta_lr_ratio_x) == (GAMMA, ZETA_INIT, RATIO)
    sides = {"x": Published(repaired), "y": Published(repaired)}  # by the anchors
    worst = dict.fromkeys(("gradient", "log_u", "zeta", "velocity", "xi"), 0.0)
    for epoch in range(EPOCHS):
        eta = published_eta(epoch)
        objective.zeta_lr = step_size(epoch, PLAN, ETA)
        assert objective.zeta_lr == pytest.approx(eta or 0.0, abs=1e-18)
        order = torch.randperm(PAIRS, generator=generator)
        for first in range(0, PAIRS, BATCH):
            index = order[first : first + BATCH]
            x, y = (side.requires_grad_() for side in features(hard, generator))
            objective(x, y, index).loss.backward()
            scores = (x @ y.T).detach()
            eta_x = None if eta is None else RATIO * eta
            w_x = torch.tensor(sides["x"].step(scores.tolist(), index.tolist(), eta), dtype=torch.float64)
            w_y = torch.tensor(sides["y"].step(scores.T.tolist(), index.tolist(), eta_x), dtype=torch.float64)
            slope = (w_x + w_y.T) / BATCH
            slope -= torch.diag((w_x.sum(dim=1) + w_y.sum(dim=1)) / BATCH)
            for mine, theirs in ((x.grad, slope @ y.detach()), (y.grad, slope.T @ x.detach())):
                worst["gradient"] = max(worst["gradient"], (mine - theirs).abs().max().item())
        objective.end_epoch()
        for side in sides.values():
            side.end_epoch()
        for anchors, candidates in (("x", "y"), ("y", "x")):
            theirs = sides[anchors]
            log_u = objective.get_buffer(f"log_u_{anchors}").numpy()
            velocity = objective.get_buffer(f"zeta_velocity_{candidates}").nan_to_num(0.0).numpy()
            pairs = {
                "log_u": (log_u, theirs.log_u()),
                "zeta": (objective.get_buffer(f"zeta_{candidates}").numpy(), np.array(theirs.zeta)),
                "velocity": (velocity, np.array(theirs.z)),
                "xi": (objective.get_buffer(f"xi_{candidates}").numpy(), np.array(theirs.xi)),
            }
            if eta == 0:
                del pairs["velocity"]  # it has no effect in the last epoch; ours is frozen while the step size is 0
            for name, (mine, published) in pairs.items():
                worst[name] = max(worst[name], float(np.abs(mine - published).max()))
    zeta = np.array(sides["x"].zeta)
    assert np.abs(zeta - ZETA_INIT).max() > 1e-3, "this test needs zeta that have moved"
    assert sides["x"].xi > 0 or not hard, "this test needs a xi that has moved"
    return worst


@pytest.mark.parametrize(("hard", "repaired"), [(False, False), (True, True)])
def test_the_published_update(hard: bool, repaired: bool) -> None:
    """As published if no shift grows, because all positives win; with the missing division, on any features."""
    worst = compare(hard, repaired)
    assert max(worst.values()) < 1e-9, worst


def test_the_published_shift_changes_the_averages_if_it_grows() -> None:
    worst = compare(hard=True, repaired=False)
    assert worst["log_u"] > 0.1 and worst["gradient"] > 1e-3, worst
