"""NUCLR: learn how popular every candidate is, and divide the negatives by it.

    p(y|x) = exp(s(x,y)/tau) / Z(x),    Z(x) estimated by  sum_j exp(s(x,y_j)/tau) / q_j,    q_j = sum_i p(y_j|x_i)

over the n observed y_j: multiple importance sampling with the balance heuristic (Wang, Lei, Ying, Yang, "On
Discriminative Probabilistic Modeling for Self-Supervised Representation Learning", ICLR 2025). If the Z in p is
replaced by this estimate, zeta_j = tau log q_j solves a convex problem, and each batch takes one step towards its
solution. In the notation of `stateful`, d_i = u_i + exp(-xi/tau), where xi is a bound of zeta that guards the positive.

The step of zeta_j uses the estimated column sum of the model's probabilities p_ij, with p_jj that of the positive,

    c_j = p_jj + (n-1)/(B-1) sum_{i != j} p_ij,    which is 1 for all j at the solution (Theorem 2),

and is measured in units of tau. It has two forms, with v_j <- zeta_momentum v_j + (1 - zeta_momentum) g_j:

    "unbiased"   g_j = 1 - c_j      zeta_j/tau <- zeta_j/tau + m_j - (the mean of m over the batch),
                                    m_j = max(-1, min(-zeta_lr v_j, 1))
    "paper"      g_j = B/n - c_j    zeta_j/tau <- zeta_j/tau - zeta_lr v_j

"unbiased", the default, follows the stochastic gradient n G_j, which is unbiased if the u_i are exact. One visit moves
zeta_j/tau by less than 2, whatever n, B and tau are. Subtracting the mean of the moves keeps the mean of zeta, which
Theorem 2 leaves free, so that xi does not follow a common drift.

"paper" is Algorithm 1 to the letter: g_j = B G_j, and the paper's step is eta = zeta_lr tau B. Its G_j adds 1/n for j
in the batch, where the unbiased gradient adds 1/B. The difference is the same for all j, a drift along the constant
that Theorem 2 leaves free: zeta_j/tau rises by about zeta_lr (1 - B/n) per visit, xi follows, and u lags behind.

The published code has another estimator, see `authors`. benchmarks/zeta.py compares the forms on fixed features.

Views. The paper's Remark 2 takes m samples y_jl from each p(y|x_j), each with a popularity of its own. Z(x_i) becomes
the sum over j of the mean over l of exp(s(x_i,y_jl)/tau) / q_jl. The convex problem

    min over zeta of  mean_i tau log sum_j mean_kl exp((s(x_ik,y_jl) - S_i - zeta_jl)/tau) + mean_jl zeta_jl

has the derivatives (1 - c_jl)/(n m), where

    c_jl = sum_i mean_k exp((s(x_ik,y_jl) - S_i - zeta_jl)/tau) / Z_i,    which is 1 for all views at the solution,
    Z_i = u_i + mean_l o_il,    o_il = mean_k exp((s(x_ik,y_il) - S_i - zeta_il)/tau).

o_il is the term of the pair's own view l, so p_jj becomes o_jl / Z_j, one per own view. The step is the same, with c_jl
for c_j, and the mean of the moves is over all views of the batch. u_i and d_i have one value per pair, and xi bounds
the zeta of all views. This holds for stored views, which are the same at every visit (`state.y_views`; the table is (n,
m)), and for a network, which sees each view. Random views have no number under which a table could keep them, so they
share the zeta_j of their pair, and their one own term is exp(-zeta_j/tau): an approximation. In the toy problem at tau
= 0.2 its error grows with m, while that of one q per view falls as 1/sqrt(m) (docs/toy.md).

Beyond the paper: a temperature per anchor (q_j belongs to the candidate, so zeta_j is divided by the common
`temperature` and not by tau_i), and a network instead of a table, zeta_j = zeta_init + tau h(y_j), trained by the
unbiased gradient of zeta_j.

Relations: with zeta_lr = 0, zeta_init = 0 and xi_init = inf it is SogCLR, and with individual temperatures iSogCLR.
With individual temperatures and tau_lr = 0 it has the gradients and zeta of NUCLR without. Stored views that are all
equal give the results of one view.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from nuclr import distributed
from nuclr.arrays import Array, as_floating
from nuclr.objectives.base import Range, check_choice
from nuclr.objectives.hard_negatives import HardNegativesKernel
from nuclr.objectives.kernels import stack_views
from nuclr.objectives.networks import PrototypeNetwork
from nuclr.objectives.state import CANDIDATES, StatePlacement
from nuclr.objectives.stateful import SOURCES, RunningAverage, StatefulObjective, Step, Temperatures, zero_valued

LARGEST_MOVE = 1.0  # of zeta/tau at one visit, before the mean is subtracted


class NUCLR(StatefulObjective):
    """SogCLR with each negative divided by its learnt popularity.

    `StatefulObjective` describes the other arguments.

    Args:
        zeta_init: initial zeta of every candidate.
        xi_init: smallest value of the guard xi, which follows the largest |zeta|; inf removes the positive term.
        use_xi: False uses the pair's own zeta instead of xi.
        zeta_lr: step size of zeta in units of tau, which needs no change for another n, B or tau; 0 freezes zeta, its
            velocity and xi. A network is trained by the optimizer that has the objective's parameters; it is frozen by
            0 as well, and other values have no effect on it.
        zeta_momentum: the weight of the old velocity, which is stored per pair and side unless this is 0.
        zeta_estimator: "unbiased", or "paper" for Algorithm 1 to the letter, whose eta is zeta_lr tau B. A network
            always uses "unbiased".
        popularity: "table" stores zeta per pair, or per stored view (`state.x_views`, `state.y_views`); "network"
            predicts it from the features of each view. With both networks, no index is needed.

    Example:
        >>> import torch
        >>> objective = NUCLR(num_samples=10, temperature=0.1, normalize=True)
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]], requires_grad=True)
        >>> objective(x, x.detach(), index=[4, 0, 7]).loss.backward()
        >>> objective.log_u_x.isfinite().nonzero().flatten()
        tensor([0, 4, 7])

    """

    estimators: tuple[str, ...] = ("unbiased", "paper")
    limits: Mapping[str, Range] = {
        **StatefulObjective.limits,
        "zeta_lr": Range(high_open=True),
        "zeta_momentum": Range(high=1.0, high_open=True),
    }
    scheduled: Mapping[str, str] = {**StatefulObjective.scheduled, "zeta_lr": "step size"}
    summarized = ("zeta", *StatefulObjective.summarized)
    stores_views = True

    def __init__(
        self,
        num_samples: int,
        temperature: float = 0.03,
        gamma: float = 0.8,
        zeta_init: float = 0.0,
        xi_init: float = 0.0,
        use_xi: bool = True,
        zeta_lr: float = 0.3,
        zeta_momentum: float = 0.0,
        zeta_estimator: str = "unbiased",
        sides: str = "both",
        popularity: str = "table",
        normalizer: str = "table",
        normalize: bool = False,
        state: StatePlacement | Mapping[str, Any] = StatePlacement(),
        temperatures: Temperatures | Mapping[str, Any] = Temperatures(),
        average: RunningAverage | Mapping[str, Any] = RunningAverage(),
    ) -> None:
        super().__init__(
            num_samples,
            temperature,
            gamma,
            sides,
            normalizer,
            normalize,
            state,
            temperatures,
            average,
        )
        check_choice("popularity", popularity, SOURCES)
        if not math.isfinite(zeta_init) or math.isnan(xi_init):
            raise ValueError(f"zeta_init must be finite and xi_init a number, but they are {zeta_init} and {xi_init}")
        self.zeta_init = zeta_init
        self.xi_init = xi_init
        self.use_xi = use_xi
        self.zeta_lr = zeta_lr
        self.zeta_momentum = zeta_momentum
        self.zeta_estimator = zeta_estimator
        self.popularity = popularity
        check_choice("zeta_estimator", zeta_estimator, self.estimators)
        for name in ("zeta_lr", "zeta_momentum"):
            self.limits[name].check(name, getattr(self, name))
        if popularity == "network":
            if self.state.views != (1, 1):
                raise ValueError("state.x_views and state.y_views must be 1: a network predicts zeta of every view")
            self.popularity_networks = nn.ModuleDict({CANDIDATES[row]: PrototypeNetwork() for row in self.active})
        else:
            self.add_tables("zeta", zeta_init, CANDIDATES, per_view=True)
            if zeta_momentum > 0:
                self.add_tables("zeta_velocity", 0.0, CANDIDATES, per_view=True)
            else:  # there is no table for a later value
                self.limits = {**self.limits, "zeta_momentum": Range(high=0.0)}
            self.table_sides = tuple(CANDIDATES[row] for row in self.active)
        for row in self.active:
            xi = torch.tensor(
                NUCLR.initial_xi(self),
                dtype=torch.float32,
                device=self.state.device,
            )
            self.register_buffer(f"xi_{CANDIDATES[row]}", xi)

    def predict_popularity(self, features: Array, side: str = "y") -> Tensor:
        """Return the popularity of any samples, also new ones, from the network of `popularity="network"`.

        Args:
            features: (N, d) with unit norm, a tensor or a numpy array.
            side: "y" if the samples are candidates for x, "x" if they are candidates for y.

        Returns:
            (N,), q = exp(zeta/tau), without gradient. Only ratios have a meaning; divide by the mean to compare.

        Raises:
            ValueError: if popularity is a table, or the side or the shape is not as described.

        Example:
            >>> objective = NUCLR(num_samples=10, popularity="network")
            >>> objective.predict_popularity(torch.eye(2))
            tensor([1., 1.])

        """
        if self.popularity != "network":
            raise ValueError('predict_popularity needs popularity="network"; a table has no value for new samples')
        if side not in self.popularity_networks:
            raise ValueError(f"side must be one of {', '.join(self.popularity_networks)}, but is {side!r}")
        samples = as_floating("features", features, 2)
        network = cast(PrototypeNetwork, self.popularity_networks[side])
        with torch.no_grad():
            predicted = network(samples.to(network.bias.device))
        return torch.exp(predicted + self.zeta_init / self.current_temperature)

    def set_popularity(
        self,
        side: str,
        rows: Tensor,
        zeta: Tensor,
    ) -> None:
        """Replace zeta of some candidates, and let xi follow. The mean of their zeta, which has no meaning, is kept.

        Args:
            side: "y" or "x", whose candidates these are.
            rows: (r,) rows of state; with m > 1 stored views, row * m + view. A row that occurs several times gets the
                mean of its values.
            zeta: (r,), such as `nuclr.popularity.solve` returns it.

        Example:
            >>> objective = NUCLR(num_samples=3)
            >>> objective.set_popularity("y", torch.tensor([0, 2]), torch.tensor([1.0, 2.0]))
            >>> objective.zeta_y
            tensor([-0.5000,  0.0000,  0.5000])

        """
        table = self.get_buffer(f"zeta_{side}").view(-1)
        distinct, place, copies = rows.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
        if len(distinct) < len(rows):
            rows = distinct
            zeta = zeta.new_zeros(len(rows)).index_add_(0, place.to(zeta.device), zeta) / copies.to(zeta)
        rows = rows.to(table.device)
        new = (zeta - zeta.mean()).to(table) + table[rows].mean()
        table[rows] = new
        xi = self.get_buffer(f"xi_{side}")
        torch.maximum(xi, self.bounded(new).max().to(xi), out=xi)

    # -- zeta and xi ---------------------------------------------------------------------------------------------------

    def read_zeta(self, step: Step) -> Tensor:
        """Return zeta of the candidates, (2, B) or per view (M, 2, B), from the table or the network."""
        if self.popularity == "table":
            step.per_view = (self.state.y_views > 1, self.state.x_views > 1)
            return step.rows.tables["zeta"]
        frozen = not self.moves_zeta()  # before its first prototypes, a network's zeta is zeta_init
        predicted = self.predict(self.popularity_networks, CANDIDATES, step, frozen)
        step.per_view = (step.batch.views[1] > 1, step.batch.views[0] > 1)
        with torch.set_grad_enabled(predicted[self.active[0]].requires_grad):
            stacked = stack_views(*predicted)
            if not any(step.per_view):
                stacked = stacked[0]
            step.predicted_popularity = stacked.nan_to_num(nan=0.0)
        return self.zeta_init + step.temperature * stacked.detach()

    def hard_bias(self, step: Step) -> Tensor | float:
        """Return -zeta/tau of the hard negatives: of the initial zeta, or that which the network predicts."""
        bias = self.zeta_init / -step.temperature
        if self.popularity == "table":
            return bias
        network = cast(PrototypeNetwork, self.popularity_networks["y"])
        hard = cast(Tensor, step.batch.hard)
        predicted: Tensor = network(hard).to(hard.dtype)
        return bias - predicted

    def log_normalizer(self, step: Step) -> Tensor:
        """Return log(u_i + exp(-xi/tau)), with the pair's own zeta instead of xi if `use_xi` is False."""
        if not self.use_xi:
            return step.log_total
        return torch.logaddexp(step.log_u, self._xi(step) / -step.temperature)

    def value(self, step: Step) -> Tensor:
        """Return tau log(u_i + exp(-zeta_i/tau)), from the whole estimated partition function."""
        return step.temperature * step.log_total

    def zeta_moment(self, step: Step, log_weight: Tensor) -> Tensor:
        """Return tau times the derivative of sum_i log d_i / B with respect to tau through zeta/tau and xi/tau."""
        # sum_i sum_j w_ij zeta_j/tau
        masses = step.kernel.masses(-log_weight)
        negatives = -(distributed.all_gather(masses, dim=masses.ndim - 1) * (step.bias + step.given))
        # the positive's term, exp(-xi/tau) / d_i xi/tau, which vanishes for xi = inf
        own = self._xi(step) / step.temperature if self.use_xi else -(step.bias if step.own is None else step.own)
        inverse = own if self.use_xi else own - step.given  # log_q does not depend on tau
        positive = torch.where(own.isposinf(), 0.0, torch.exp(-own - step.log_d) * inverse)
        if step.own is not None:  # the mean over views
            negatives = negatives.nanmean(dim=0)
            positive = positive if self.use_xi else positive.flatten(0, 1).nanmean(dim=0)
        if isinstance(step.kernel, HardNegativesKernel):
            negatives = negatives.sum() - step.kernel.bias_moment(log_weight)
        return (negatives.sum() + self._for_counted(step, positive, 0.0).sum()) / step.batch.size

    def moves_zeta(self) -> bool:
        """Return whether zeta is not frozen."""
        return self.zeta_lr > 0

    def update_zeta(self, step: Step, masses: Tensor) -> None:
        """Take a step of zeta, from the masses at the present zeta, and let xi follow."""
        if step.predicted_popularity is None:
            zeta = self.move_zeta(step, masses)
        else:
            zeta = step.zeta
            if step.predicted_popularity.requires_grad:
                slope = 1 - self.column_sums(step, masses)
                slope = self._for_counted(step, slope, 0.0) * (step.temperature / step.batch.size)
                if zeta.ndim == 3:  # the mean over views
                    slope = slope.nan_to_num(nan=0.0) / (~zeta.isnan()).sum(dim=0)
                step.terms.append(zero_valued(slope, step.predicted_popularity))
        self.move_xi(step, zeta)
        means = zeta.mean(dim=1) if zeta.ndim == 2 else zeta.nanmean(dim=(0, 2))
        for row in self.active:
            step.metrics[f"zeta_{CANDIDATES[row]}"] = means[row]

    def move_zeta(self, step: Step, masses: Tensor) -> Tensor:
        """Return zeta after the step, and set the new tables."""
        target = 1.0 if self.zeta_estimator == "unbiased" else step.batch.size / self.num_samples
        velocity = target - self.column_sums(step, masses)
        if "zeta_velocity" in step.rows.tables:
            last = step.rows.tables["zeta_velocity"]
            velocity = self.zeta_momentum * last + (1 - self.zeta_momentum) * velocity
            velocity = step.tables["zeta_velocity"] = step.unless_alone(velocity, last)
        move = velocity * -self.zeta_lr
        if self.zeta_estimator == "unbiased":
            move = move.clamp(-LARGEST_MOVE, LARGEST_MOVE)
            # the mean over the candidates that move
            counted = step.unless_alone(move, math.nan)
            move = move - counted.nanmean(dim=1 if move.ndim == 2 else (0, 2), keepdim=True)
        zeta = step.unless_alone(step.zeta + step.temperature * move, step.zeta)
        step.tables["zeta"] = zeta
        return zeta

    def column_sums(self, step: Step, masses: Tensor) -> Tensor:
        """Return c_j, the estimated sum of the probabilities that all anchors give candidate j, shaped as zeta."""
        if step.own is None:
            own = torch.exp(step.bias - step.log_total)
        else:
            own = torch.exp(step.own - step.log_total).nanmean(dim=0)
        # an anchor without negatives gives no mass, and its row is not stored
        sums = own + (self.num_samples - 1) / step.negatives * masses
        if step.own is not None:
            for row, per_view in enumerate(step.per_view):
                if not per_view:  # the views of this side share the zeta of their pair
                    views = sums[: step.batch.views[1 - row], row]
                    views.copy_(views.mean(dim=0))
        return sums

    def move_xi(self, step: Step, zeta: Tensor) -> None:
        """Raise xi of both sides to the largest value that bounds the new zeta."""
        bounded = step.unless_alone(self.bounded(zeta), -math.inf)
        if bounded.ndim == 3:
            bounded = torch.where(bounded.isnan(), -math.inf, bounded).amax(dim=0)
        largest = bounded.amax(dim=1)
        for row in self.active:
            xi = self.buffer(f"xi_{CANDIDATES[row]}")
            torch.maximum(xi, largest[row].to(xi), out=xi)

    def bounded(self, zeta: Tensor) -> Tensor:
        """Return the values whose largest xi follows."""
        return zeta.abs()

    def initial_xi(self) -> float:
        """Return xi before the first step."""
        return max(self.xi_init, abs(self.zeta_init))

    def initial_value(self, name: str) -> float:
        """Return the value that an entry of the state has before its first update; nan for a buffer without one."""
        return self.initial_xi() if name.startswith("xi_") else super().initial_value(name)

    def _xi(self, step: Step) -> Tensor:
        """Return xi of both sides, (2, 1), in the dtype of the computation."""
        # a side that is not in use gets the value of the other one
        first = self.buffer(f"xi_{CANDIDATES[self.active[0]]}")
        second = self.buffer(f"xi_{CANDIDATES[self.active[-1]]}")
        return torch.stack([first, second])[:, None].to(step.log_u)
