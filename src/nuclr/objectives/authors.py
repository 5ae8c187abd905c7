"""NUCLR as the authors' published code computes it (bokun-wang/NUCLR, commit ddaec8d), to repeat their runs.

It differs from `nuclr` in the step of zeta and in xi. With c_j the column sum of `nuclr`,

    n G_j = 1 - n/B (p_jj + sum_{i != j} p_ij)    "reference", the estimator of the published code
    n G_j = 1 - c_j                               "unbiased"
    n G_j = 1 - n/B c_j                           "paper", Algorithm 1 to the letter
    v_j <- beta v_j + (1 - beta) n G_j,    zeta_j <- zeta_j - zeta_lr v_j

In "reference", n/B takes the place of (n-1)/(B-1) and also multiplies the positive's p_jj: its zeta follows p_jj and
does not estimate popularity. A step of "reference" and of "paper" scales with n/B, so zeta_lr depends on the data set
and the batch size, and it is not in units of tau. The velocity starts at the first gradient, zeta of side x moves by a
tenth of the step, and xi follows the largest zeta (not the largest |zeta|), once per epoch.

The defaults are the published values for CC3M; docs/reproduce.md lists what differs from the published code.
Relations: with zeta_estimator="paper", zeta_velocity_init="zero", zeta_lr_ratio_x=1, xi_rule="norm" and
xi_update="step" it has the values, gradients, zeta and xi of `NUCLR` with zeta_estimator="paper", if zeta_lr is that of
`NUCLR` times tau B/n. The velocity is n/B times as large.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nuclr import distributed
from nuclr.objectives.base import Range, check_choice
from nuclr.objectives.nuclr import NUCLR
from nuclr.objectives.state import CANDIDATES, StatePlacement
from nuclr.objectives.stateful import Step


class AuthorsNUCLR(NUCLR):
    """NUCLR with the peculiarities of the published code.

    `NUCLR` and `StatefulObjective` describe the other arguments.

    Args:
        xi_rule: "norm": xi follows the largest |zeta|, as in the paper; "max": the largest zeta.
        xi_update: "step": xi starts at the bound of zeta_init, follows every step and never falls. "epoch": xi starts
            at xi_init, and `end_epoch` sets it to the larger of xi_init and the bound of all zeta.
        zeta_lr_ratio_x: zeta_x uses zeta_lr times this ratio.
        zeta_estimator: "reference", "unbiased" or "paper".
        zeta_velocity_init: the velocity starts at "zero", or at the first "gradient".

    Example:
        >>> objective = AuthorsNUCLR(num_samples=4, zeta_init=0.2)
        >>> objective.xi_y.item()
        0.0
        >>> objective.end_epoch()
        >>> round(objective.xi_y.item(), 4)
        0.2

    """

    estimators = ("reference", "unbiased", "paper")
    stores_views = False
    limits: Mapping[str, Range] = {
        **NUCLR.limits,
        "zeta_lr_ratio_x": Range(high_open=True),
    }

    def __init__(
        self,
        num_samples: int,
        temperature: float = 0.01,
        gamma: float = 0.8,
        zeta_init: float = -0.05,
        xi_init: float = 0.0,
        xi_rule: str = "max",
        xi_update: str = "epoch",
        use_xi: bool = True,
        zeta_lr: float = 5e-6,
        zeta_lr_ratio_x: float = 0.1,
        zeta_momentum: float = 0.1,
        zeta_estimator: str = "reference",
        zeta_velocity_init: str = "gradient",
        normalize: bool = False,
        state: StatePlacement | Mapping[str, Any] = StatePlacement(),
    ) -> None:
        super().__init__(
            num_samples,
            temperature,
            gamma,
            zeta_init,
            xi_init,
            use_xi,
            zeta_lr,
            zeta_momentum,
            zeta_estimator,
            normalize=normalize,
            state=state,
        )
        self.xi_rule = xi_rule
        self.xi_update = xi_update
        self.zeta_lr_ratio_x = zeta_lr_ratio_x
        self.zeta_velocity_init = zeta_velocity_init
        check_choice("xi_rule", xi_rule, ("norm", "max"))
        check_choice("xi_update", xi_update, ("step", "epoch"))
        check_choice("zeta_velocity_init", zeta_velocity_init, ("zero", "gradient"))
        self.check_settings()
        for side in CANDIDATES:
            self.buffer(f"xi_{side}").fill_(self.initial_xi())
            if zeta_momentum > 0 and zeta_velocity_init == "gradient":
                # nan stands for a velocity that has not started
                self.initial["zeta_velocity"] = math.nan
                self.buffer(f"zeta_velocity_{side}").fill_(math.nan)

    def move_zeta(self, step: Step, masses: Tensor) -> Tensor:
        """Return zeta after the step, (2, B), and set the new tables."""
        direction = self.zeta_gradient(step, masses)
        if "zeta_velocity" in step.rows.tables:
            last = step.rows.tables["zeta_velocity"]
            mean = self.zeta_momentum * last + (1 - self.zeta_momentum) * direction
            direction = step.unless_alone(torch.where(last.isnan(), direction, mean), last)
            step.tables["zeta_velocity"] = direction
        moved = step.zeta.sub(direction, alpha=self.zeta_lr)
        if self.zeta_lr_ratio_x != 1:  # row 1 is x, the candidates of side y
            moved[1] = step.zeta[1] - self.zeta_lr * self.zeta_lr_ratio_x * direction[1]
        zeta = step.unless_alone(moved, step.zeta)
        step.tables["zeta"] = zeta
        return zeta

    def zeta_gradient(self, step: Step, masses: Tensor) -> Tensor:
        """Return n G_j, (2, B)."""
        if self.zeta_estimator == "reference":
            sums = torch.exp(step.bias - step.log_total) + masses
        else:
            sums = self.column_sums(step, masses)
        share = 1.0 if self.zeta_estimator == "unbiased" else self.num_samples / step.batch.size
        return torch.rsub(sums, 1, alpha=share)

    def move_xi(self, step: Step, zeta: Tensor) -> None:
        """Let xi follow the new zeta, (2, B), unless it moves once per epoch."""
        if self.xi_update == "step":
            super().move_xi(step, zeta)

    def end_epoch(self) -> None:
        """Set xi from all zeta if `xi_update` is "epoch"; with several processes all of them must call it."""
        if self.xi_update == "step":
            return
        for side in CANDIDATES:
            xi = self.buffer(f"xi_{side}")
            zeta = self.buffer(f"zeta_{side}")
            largest = torch.cat([self.bounded(zeta), zeta.new_tensor([self.xi_init])]).max()
            if self.state.sharding:
                device = self._feature_device or largest.device  # nccl gathers on the accelerator only
                largest = distributed.all_gather(largest.to(device)[None]).max()
            xi.copy_(largest)

    def bounded(self, zeta: Tensor) -> Tensor:
        """Return the values whose largest xi follows."""
        return zeta.abs() if self.xi_rule == "norm" else zeta

    def initial_xi(self) -> float:
        """Return xi before the first step."""
        if self.xi_update == "epoch":
            return self.xi_init
        return max(self.xi_init, abs(self.zeta_init) if self.xi_rule == "norm" else self.zeta_init)
