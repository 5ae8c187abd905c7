"""The SogCLR family: running averages per sample, and a gradient in closed form.

For one side, with B the size of the global batch, c_i the number of negatives of anchor i in it (B - 1 without
masking), and n the size of the data set:

    log phi_i = log((n-1)/c_i) + logsumexp_{j != i} (s_ij - s_ii)/tau_i - zeta_j/tau
    u_i      <- (1 - gamma) u_i + gamma phi_i, in logs; phi_i at the first visit
    w_ij      = exp(log((n-1)/c_i) + (s_ij - s_ii)/tau_i - zeta_j/tau - log d_i)

The model's gradient is that of (1/B) sum_i sum_{j != i} w_ij (s_ij - s_ii) with w held fixed, summed over the sides.
It is linear in the scores, so the forward pass computes it, and backward only scales it. The objectives differ in zeta
and in the normalizer d_i. With several views of a sample, s_ii is the mean S_i over its pairs of views, and exp is
averaged over the pairs of views; see `kernels`. zeta_j belongs to the pair or to each of its views, see `nuclr`.

What all of them can do:

Items. Pairs may share items (`StatePlacement.num_x`, see `state`), and `log_q` corrects for items that occur in many
pairs: log(n q_j), with q_j the share of the pairs that have y_j, is added to zeta_j/tau wherever it stands, at any
temperature. zeta is then the popularity beyond it. If every item occurs once, n q_j = 1.

False negatives. With `false_negative_margin`, j is a negative of anchor i only if s_ij <= s_ii + margin, and all sums
above omit the others, those over the anchors i of a candidate j as well. c_i still counts the others: the batch samples
all n - 1 candidates, so (n-1)/c_i times the sum over the negatives that are left is the unbiased estimate of that sum
over the data set. If all negatives of an anchor are dropped, that estimate is phi_i = 0: u_i becomes (1 - gamma) u_i
(an unseen sample stays unseen), and the pair contributes nothing else and changes nothing else on this side.

Temperatures. One `temperature` for all anchors. Or a learnt one, tau = exp(-log_scale), that minimizes the mean of
tau (log d_i - log(n-1) + rho) (FastCLIP-v3, Wei et al. 2024). Or one per anchor: with w at the old tau_i,

    g_i = clip(log d_i - log(n-1) + rho - sum_{j != i} w_ij (s_ij - s_ii)/tau_i, -5, 5)
    m_i <- (1 - tau_beta) m_i + tau_beta g_i,    tau_i <- clip(tau_i - tau_lr m_i, tau_min, tau_max)

Averages. gamma is a constant, or gamma_i = alpha u_i / (n - 1 + alpha u_i) of the old u_i (`gamma_rule="proximal"`).

Normalizers without a table. With `normalizer="network"`, the stored average is replaced by a prediction: log u_i =
k(x_i) - s_ii/tau_i. The network k minimizes phi_i exp(s_ii/tau_i - k_i) + k_i, whose minimum is at log phi_i +
s_ii/tau_i.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from nuclr import distributed
from nuclr.objectives.base import (
    POSITIVE,
    SHARE,
    GatheredBatch,
    ObjectiveOutput,
    Range,
    as_record,
    check_choice,
)
from nuclr.objectives.hard_negatives import HardNegativesKernel
from nuclr.objectives.kernels import (
    BatchKernel,
    KernelBatch,
    Workspace,
    make_kernel,
    positive_scores,
)
from nuclr.objectives.networks import PrototypeNetwork
from nuclr.objectives.state import ANCHORS, PairTables, StatePlacement, StateRows

SOURCES = ("table", "network")
LEARNT_TAU = (0.001, 1.0)
LOG_LEAST_ODDS = math.log(1e-8)
TAU_GRADIENT_LIMIT = 5.0
QUANTILES = (5, 25, 50, 75, 95)  # in percent
LEAST_GAMMA = 1e-4  # below, weights are not bounded well enough for the fast kernel
NETWORK_GRADIENT_LIMIT = math.exp(4)  # of a network whose prediction of an average is far too small


@dataclass(frozen=True)
class Temperatures:
    """Learnt temperatures: one per anchor (iSogCLR), or one for all (FastCLIP-v3).

    Attributes:
        individual: whether every anchor has a temperature of its own.
        learnt: whether to learn one temperature, in the parameter `log_scale` = -log tau, with tau between 0.001 and 1.
        rho: weight of learnt temperatures; larger values push them down.
        tau_lr: step size of individual temperatures.
        tau_beta: weight of the new gradient in its running mean.
        tau_min: lower bound of an individual temperature after its first step.
        tau_max: upper bound of an individual temperature after its first step.

    """

    individual: bool = False
    learnt: bool = False
    rho: float = 8.0
    tau_lr: float = 1e-3
    tau_beta: float = 0.9
    tau_min: float = 0.005
    tau_max: float = 0.05

    def __post_init__(self) -> None:
        if self.individual and self.learnt:
            raise ValueError("temperatures.individual and temperatures.learnt exclude each other; set one to False")
        Range(high=self.tau_max, low_open=True).check("temperatures.tau_min", self.tau_min)
        Range().check("temperatures.tau_lr", self.tau_lr)
        SHARE.check("temperatures.tau_beta", self.tau_beta)


@dataclass(frozen=True)
class RunningAverage:
    """How the running averages move.

    Attributes:
        gamma_rule: "constant" for the weight gamma, or "proximal" for the weight alpha u' / (1 + alpha u'),
            u' = u/(n-1), of the old average u (SCENT): the averages of easy samples then change slowly.
        alpha: of "proximal"; larger values follow the new batch faster.

    """

    gamma_rule: str = "constant"
    alpha: float = 4.0

    def __post_init__(self) -> None:
        check_choice("average.gamma_rule", self.gamma_rule, ("constant", "proximal"))
        POSITIVE.check("average.alpha", self.alpha)


@dataclass
class Step:
    """The values of one step, in the order in which they are computed. (2, B) tensors have side x in row 0."""

    batch: GatheredBatch
    learns: bool  # whether networks and a learnt temperature get gradients
    rows: StateRows  # state before the step
    temperature: float | Tensor  # tau: one number; a scalar tensor if it is learnt on an accelerator
    tau: float | Tensor  # of the anchors: one number, or (2, B)
    # -- candidates
    zeta: Tensor = field(init=False)  # (2, B) or per view (M, 2, B)
    bias: Tensor = field(init=False)  # -zeta/tau - log(n q), shaped as zeta
    per_view: tuple[bool, bool] = (False, False)  # whether the candidates of side x, of side y have a zeta per view
    own: Tensor | None = None  # (K, M, 2, B), exponents of the pair's own views k, m if zeta is per view
    log_own: Tensor = field(init=False)  # (2, B), log of the positive's term in the partition function
    predicted_popularity: Tensor | None = None  # zeta/tau with gradient, if a network predicts it
    # -- anchors
    predicted_normalizer: Tensor | None = None  # (2, B), k with gradient, if a network predicts it
    positive: Tensor | None = None  # (B,), S_i, if the margin, a network or a table per item needs it
    of_items: Tensor | float = 0.0  # (2, B), S_i/tau_i where a table has the log of an item's whole sum, else 0
    given: Tensor | float = 0.0  # (2, B), log(n q_j) of the candidates, if log_q is given
    kernel: BatchKernel = field(init=False)
    negatives: float | Tensor = field(init=False)  # c_i: one number, or (B,)
    counted: Tensor | None = None  # (B,) or (2, B) bool, anchors that have negatives; None: all have
    log_scale: float | Tensor = field(init=False)  # log((n-1)/c_i)
    log_phi: Tensor = field(init=False)  # (2, B)
    log_u: Tensor = field(init=False)  # (2, B), before and then after the update
    log_d: Tensor = field(init=False)  # (2, B), log of the normalizer of the weights
    # -- results
    tables: dict[str, Tensor] = field(default_factory=dict)  # the state after the step, shaped as in `rows`
    metrics: dict[str, Tensor] = field(default_factory=dict)
    terms: list[Tensor] = field(default_factory=list)  # terms of the loss with value 0, for the gradients of parameters

    @cached_property
    def log_total(self) -> Tensor:
        """log(u_i + the positive's term), (2, B): log of the estimated partition function."""
        return torch.logaddexp(self.log_u, self.log_own)

    def unless_alone(self, then: Tensor, otherwise: float | Tensor) -> Tensor:
        """Return `then`, or `otherwise` for anchors without negatives, which contribute nothing and change nothing."""
        return then if self.counted is None else torch.where(self.counted, then, otherwise)


class StatefulObjective(PairTables):
    """The options and the steps that SogCLR, iSogCLR and NUCLR share.

    `Objective` describes `normalize`.

    Args:
        num_samples: n, the number of pairs; indices are in [0, n).
        temperature: tau; its initial value if temperatures are learnt.
        gamma: weight of the new batch in the running averages, in (0, 1].
        sides: "both", "x" (x are the anchors, y the candidates) or "y".
        normalizer: "table" stores u_i per pair. "network" predicts it from the anchor's features: no table, and with
            one pass over the data the average is still one over many samples. gamma may then be 0, which uses the
            prediction alone.
        state: where the tables are, a `StatePlacement` or a dict of its fields.
        temperatures: learnt temperatures, a `Temperatures` or a dict of its fields.
        average: how the running averages move, a `RunningAverage` or a dict of its fields.

    """

    takes_log_q = True
    limits: Mapping[str, Range] = {**PairTables.limits, "gamma": Range(high=1.0, low_open=True)}
    scheduled: Mapping[str, str] = {"gamma": "weight"}
    summarized: tuple[str, ...] = ("tau",)
    """Tables whose quantiles `summarize` returns."""
    stores_views: bool = False
    """Whether the objective can have a popularity per stored view, see `StatePlacement`."""

    def __init__(
        self,
        num_samples: int,
        temperature: float = 0.03,
        gamma: float = 0.8,
        sides: str = "both",
        normalizer: str = "table",
        normalize: bool = False,
        state: StatePlacement | Mapping[str, Any] = StatePlacement(),
        temperatures: Temperatures | Mapping[str, Any] = Temperatures(),
        average: RunningAverage | Mapping[str, Any] = RunningAverage(),
    ) -> None:
        check_choice("sides", sides, ("both", "x", "y"))
        check_choice("normalizer", normalizer, SOURCES)
        super().__init__(
            num_samples,
            temperature,
            sides,
            as_record("state", state, StatePlacement()),
            normalize,
        )
        if self.state.views != (1, 1) and not self.stores_views:
            raise ValueError(
                "state.x_views and state.y_views must be 1: only nuclr with a table has a popularity per stored view"
            )
        self.gamma = gamma
        self.normalizer = normalizer
        self.temperatures = as_record("temperatures", temperatures, Temperatures())
        self.average = as_record("average", average, RunningAverage())
        self._workspace = Workspace()
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature))) if self.temperatures.learnt else None
        if normalizer == "table":
            self.add_tables("log_u", -math.inf, ANCHORS)
        else:
            self.normalizer_networks = nn.ModuleDict({ANCHORS[row]: PrototypeNetwork() for row in self.active})
            for row in self.active:  # nan before the first batch
                self.register_buffer(f"normalizer_offset_{ANCHORS[row]}", torch.tensor(math.nan))
            self.limits = {**self.limits, "gamma": SHARE}  # a prediction may be used alone; a table must be filled
        if self.temperatures.individual:
            self.add_tables("tau", temperature, ANCHORS)
            self.add_tables("tau_momentum", 0.0, ANCHORS)
        if self.temperatures.learnt:
            self.limits = {**self.limits, "temperature": Range(*LEARNT_TAU)}
        for name in ("temperature", "gamma"):
            self.limits[name].check(name, getattr(self, name))

    @property
    def current_temperature(self) -> float:
        """The fixed or learnt temperature, or the mean tau_i over the samples seen so far if every anchor has one."""
        if self.log_scale is not None:
            return math.exp(-self.log_scale.item())
        if not self.temperatures.individual:
            return super().current_temperature
        seen = []
        for row in self.active:
            tau = self.table("tau", row)
            seen.append(tau[~self.table("log_u", row).isneginf()] if self.normalizer == "table" else tau)
        values = torch.cat(seen)
        return values.double().mean().item() if len(values) else super().current_temperature

    def summarize(self, rows: Tensor) -> dict[str, float]:
        """Return quantiles of the state over rows, such as "zeta_y_q05".

        If the tables are sharded, these are the rows of this process. It waits for the device.

        Args:
            rows: the rows of state that are in use, on the host.

        """
        quantiles: dict[str, float] = {}
        for name in (f"{table}_{side}" for table in self.summarized for side in ANCHORS):
            table = self._buffers.get(name)
            if table is None:
                continue
            held = rows[rows < len(table)].to(table.device)  # process 0 holds the first rows
            ordered = (table if name[-1] in self.by_item else table[held]).flatten().sort().values
            for percent in QUANTILES:
                position = round(percent / 100 * (len(ordered) - 1))
                quantiles[f"{name}_q{percent:02d}"] = float(ordered[position])
        return quantiles

    # -- what subclasses implement -------------------------------------------------------------------------------------

    def read_zeta(self, step: Step) -> Tensor:
        """Return zeta of the candidates, (2, B), or (M, 2, B) after setting `step.per_view`."""
        return step.batch.x.new_zeros(2, step.batch.size)

    def hard_bias(self, step: Step) -> Tensor | float:  # noqa: ARG002
        """Return -zeta/tau of the hard negatives: one number, or (B * k,)."""
        return 0.0

    def log_normalizer(self, step: Step) -> Tensor:
        """Return log d_i, (2, B)."""
        raise NotImplementedError

    def value(self, step: Step) -> Tensor:
        """Return the estimate of the objective per anchor if the temperature is not learnt, (2, B)."""
        raise NotImplementedError

    def moves_zeta(self) -> bool:
        """Return whether `update_zeta` is to be called in training."""
        return False

    def update_zeta(self, step: Step, masses: Tensor) -> None:
        """Update zeta from the masses, the sums of the probabilities that the other anchors give a candidate."""
        raise NotImplementedError

    def zeta_moment(self, step: Step, log_weight: Tensor) -> Tensor | float:  # noqa: ARG002
        """Return tau times the derivative of sum_i log d_i / B with respect to tau through zeta/tau and xi/tau."""
        return 0.0

    # -- one step ------------------------------------------------------------------------------------------------------

    def compute(self, batch: GatheredBatch) -> ObjectiveOutput:
        """Compute the closed form of the module's docstring on both sides; in training, update the state."""
        if batch.hard is not None and 0 not in self.active:
            raise ValueError("negatives are candidates of x, which sides='y' leaves out; use sides='both' or 'x'")
        if self.training and batch.x.dtype == torch.float64 != next(self.buffers()).dtype:
            self.double()
        learns = torch.is_grad_enabled()
        features = [batch.local_x, batch.local_y]
        if batch.local_hard is not None:
            features.append(batch.local_hard)
        needs_gradient = learns and any(side.requires_grad for side in features)
        with torch.no_grad():
            values, gradient, step = self._step(batch, needs_gradient, learns)
        if needs_gradient:
            values = cast(Tensor, _ClosedForm.apply(values, *features, *gradient))  # type: ignore[no-untyped-call]
        loss = values if needs_gradient else values.sum()
        for term in step.terms:
            loss = loss + term
        return ObjectiveOutput(loss, step.metrics)

    def _step(
        self,
        batch: GatheredBatch,
        needs_gradient: bool,
        learns: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...], Step]:
        """Return the value per side, and the gradients of this process's x and y."""
        # -- the state before the step
        rows = self.read(batch)
        temperature = self._temperature()
        tau = rows.tables["tau"] if self.temperatures.individual else temperature
        step = Step(batch, learns, rows, temperature, tau)
        step.zeta = self.read_zeta(step)
        step.bias = step.zeta / -temperature
        if batch.log_q is not None:
            given = batch.log_q + math.log(self.num_samples)
            step.given = torch.stack([given, torch.zeros_like(given)])
            step.bias = step.bias - step.given
        if self.false_negative_margin is not None or self.normalizer == "network" or self.by_item:
            step.positive = positive_scores(batch.x, batch.y, batch.views)
        if self.by_item and step.positive is not None:
            scaled = (step.positive / tau).expand(2, batch.size)
            step.of_items = scaled * scaled.new_tensor([side in self.by_item for side in ANCHORS])[:, None]
        step.log_own = step.bias if step.zeta.ndim == 2 else self._own_views(step)
        step.log_u = self._old_average(step)

        # -- first pass over the scores: the sums over the batch's negatives, and the running averages
        if isinstance(tau, Tensor) and tau.ndim == 0:
            tau = tau.expand_as(step.log_own)
        kernel_batch = KernelBatch(
            batch.x,
            batch.y,
            batch.views,
            step.bias,
            tau,
            batch.ids,
            batch.pairs,
            None if self.false_negative_margin is None else self.margins(cast(Tensor, step.positive)),
        )
        kernel = make_kernel(kernel_batch, self._workspace, bounded=self._is_bounded(step))
        self.check_features(batch, kernel.finite)
        step.negatives = batch.negatives()
        if isinstance(step.negatives, float):
            step.log_scale = math.log((self.num_samples - 1) / step.negatives)
        else:  # finite for an anchor without negatives
            step.log_scale = math.log(self.num_samples - 1) - step.negatives.clamp_min(1).log()
            step.counted = step.negatives > 0
        if batch.hard is not None:
            kernel = HardNegativesKernel(
                kernel,
                kernel_batch,
                batch.hard,
                self.hard_bias(step),
                step.log_scale,
                batch.excluded_hard,
            )
        step.kernel = kernel
        step.log_phi = distributed.all_gather(kernel.log_sums, dim=1) + step.log_scale
        if batch.hard is not None:  # the sum over the data set cannot be estimated from the own ones
            step.log_phi = step.unless_alone(step.log_phi, -math.inf)
        if step.predicted_normalizer is not None and self.training:
            self._fit_normalizer(step, step.predicted_normalizer)
        step.log_u = self._new_average(step)
        if self.normalizer == "table":
            step.tables["log_u"] = step.log_u + step.of_items if self.by_item else step.log_u
        if self.false_negative_margin is not None:
            step.counted = ~step.log_phi.isneginf()

        # -- the value
        step.log_d = self.log_normalizer(step)
        values = self._values(step)

        # -- second pass: the gradient of the features, and the sums from which the other state is updated
        gradient: tuple[Tensor, ...] = ()
        learns_tau = self.log_scale is not None and learns
        moves_tau = self.temperatures.individual and self.training
        moves_zeta = self.moves_zeta() and self.training
        if needs_gradient or learns_tau or moves_tau or moves_zeta:
            log_weight = self._for_counted(step, step.log_scale - step.log_d, -math.inf)
            log_total = self._for_counted(step, step.log_total, math.inf) if moves_zeta else None
            sums = kernel.sums(log_weight, log_total, moments=moves_tau)
            gradient = (sums.x, sums.y) if sums.hard is None else (sums.x, sums.y, sums.hard)
            if learns_tau:
                self._learn_temperature(step, log_weight, sums.x)
            if sums.moments is not None:
                self._move_temperatures(step, distributed.all_gather(sums.moments, dim=1))
            if sums.masses is not None:
                self.update_zeta(step, distributed.all_gather(sums.masses, dim=sums.masses.ndim - 1))
        if self.training and step.tables:
            self.write(rows, step.tables)
        return values, gradient, step

    def _values(self, step: Step) -> Tensor:
        """Return the value of each side in use, and add it to the metrics."""
        if self.temperatures.learnt or self.temperatures.individual:
            values = step.tau * (step.log_d - math.log(self.num_samples - 1) + self.temperatures.rho)
        else:
            values = self.value(step)
        means = step.unless_alone(values, 0.0).mean(dim=1)
        for row in self.active:
            step.metrics[f"objective_{ANCHORS[row]}"] = means[row]
        if self.log_scale is not None:
            step.metrics["scale"] = self.log_scale.detach().exp()
        return means if len(self.active) == 2 else means[self.active[0]]

    def _for_counted(
        self,
        step: Step,
        values: Tensor,
        otherwise: float,
    ) -> Tensor:
        """Return values, with `otherwise` for anchors without negatives and for a side that is not in use.

        Infinite values are replaced by the largest finite number, because 0 times infinity is not a number.
        """
        if math.isinf(otherwise):
            otherwise = math.copysign(torch.finfo(values.dtype).max, otherwise)
        values = step.unless_alone(values, otherwise)
        if len(self.active) == 1:
            values = values.clone()
            values[..., 1 - self.active[0], :] = otherwise
        return values

    def _own_views(self, step: Step) -> Tensor:
        """Set the exponents of the pairs' own views, and return the log of their mean."""
        batch = step.batch
        m_x, m_y = batch.views
        width = batch.x.shape[1]
        scores = batch.x.view(-1, m_x, width) @ batch.y.view(-1, m_y, width).mT
        margins = (scores - scores.mean(dim=(1, 2), keepdim=True)).movedim(0, 2)
        most = max(batch.views)
        own = margins.new_full((most, most, 2, batch.size), math.nan)
        own[:m_x, :m_y, 0] = margins * step.per_view[0]  # views that share a zeta count as the mean score
        own[:m_y, :m_x, 1] = margins.transpose(0, 1) * step.per_view[1]
        step.own = own / step.tau + step.bias
        terms = torch.where(step.own.isnan(), -math.inf, step.own)
        return terms.logsumexp(dim=(0, 1)) - math.log(m_x * m_y)

    # -- running averages ----------------------------------------------------------------------------------------------

    def _old_average(self, step: Step) -> Tensor:
        """Return log u before the step, (2, B): -inf if it is not known."""
        if self.normalizer == "table":
            log_u = step.rows.tables["log_u"]
            return log_u - step.of_items if self.by_item else log_u
        predicted = self.predict(self.normalizer_networks, ANCHORS, step)
        with torch.set_grad_enabled(predicted[self.active[0]].requires_grad):
            step.predicted_normalizer = torch.stack([outputs.mean(dim=1) for outputs in predicted])
        return self._predicted_average(step)

    def _predicted_average(self, step: Step) -> Tensor:
        assert step.predicted_normalizer is not None and step.positive is not None
        offsets = [
            self.buffer(f"normalizer_offset_{side}").to(step.positive)
            if row in self.active
            else step.positive.new_zeros(())
            for row, side in enumerate(ANCHORS)
        ]
        log_u = step.predicted_normalizer.detach() + torch.stack(offsets)[:, None] - step.positive / step.tau
        return torch.where(log_u.isnan(), -math.inf, log_u)

    def _new_average(self, step: Step) -> Tensor:
        """Return log u after the step, (2, B). In eval mode, phi only replaces averages that are not known."""
        if not self.training:
            return torch.where(step.log_u.isneginf(), step.log_phi, step.log_u)
        if self.average.gamma_rule == "proximal":
            log_scale = math.log(self.average.alpha) - math.log(self.num_samples - 1)
            log_u = proximal_log_mean(step.log_u, step.log_phi, log_scale)
        else:
            log_u = running_log_mean(step.log_u, step.log_phi, self.gamma)
        return step.unless_alone(log_u, step.log_u)

    def _is_bounded(self, step: Step) -> bool:
        """Return whether weights are at most a moderate multiple of 1 / the batch's own sum."""
        if not self.training:
            # a known average may be far below that of this batch
            return not step.rows.stored and self.normalizer == "table"
        if self.average.gamma_rule == "constant":
            return self.gamma >= LEAST_GAMMA
        if step.log_u.device.type != "cpu":
            return False
        smallest = step.log_u.masked_fill(step.log_u.isneginf(), math.inf).min().item()
        return smallest + math.log(self.average.alpha) - math.log(self.num_samples - 1) > math.log(LEAST_GAMMA)

    def predict(
        self,
        networks: nn.ModuleDict,
        owners: tuple[str, str],
        step: Step,
        frozen: bool = False,
    ) -> list[Tensor]:
        """Return a network's output for every view of the global batch, (B, m) per side.

        In training, networks whose prototypes are not complete get the batch's, unless they are frozen. Every process
        computes the outputs of all pairs, so that the networks' gradients need no communication.
        """
        batch = step.batch
        outputs = []
        sides = {"x": (batch.x.detach(), batch.y.detach(), batch.views[0])}
        sides["y"] = (batch.y.detach(), batch.x.detach(), batch.views[1])
        with torch.set_grad_enabled(step.learns and self.training):
            for row, side in enumerate(owners):
                features, others, views = sides[side]
                if row not in self.active:
                    outputs.append(features.new_zeros(batch.size, views))
                    continue
                network = cast(PrototypeNetwork, networks[side])
                if self.training and not frozen:
                    network.add_prototypes(others, features, step.temperature)
                outputs.append(network(features).to(features.dtype).view(-1, views))
        return outputs

    def _fit_normalizer(self, step: Step, predicted: Tensor) -> None:
        """Set the offsets of the networks in the first batch, and add the networks' term to the loss."""
        assert step.positive is not None
        target = step.log_phi + step.positive / step.tau
        for row in self.active:
            known = target[row].isfinite()
            mean = torch.where(known, target[row], 0.0).sum() / known.sum()
            offset = self.buffer(f"normalizer_offset_{ANCHORS[row]}")
            offset.copy_(torch.where(offset.isnan(), mean.to(offset), offset))
        step.log_u = self._predicted_average(step)
        slope = (1 - (step.log_phi - step.log_u).exp()).clamp(min=-NETWORK_GRADIENT_LIMIT)
        slope = torch.where(step.log_u.isneginf(), 0.0, slope)
        if predicted.requires_grad:
            step.terms.append(zero_valued(self._for_counted(step, slope, 0.0) / step.batch.size, predicted))

    # -- temperatures --------------------------------------------------------------------------------------------------

    def _temperature(self) -> float | Tensor:
        """Return the objective's temperature, after clamping a learnt one to its range."""
        if self.log_scale is None:
            return float(self.temperature)
        with torch.no_grad():
            self.log_scale.clamp_(-math.log(LEARNT_TAU[1]), -math.log(LEARNT_TAU[0]))
            tau = self.log_scale.neg().exp()
        return tau.item() if tau.device.type == "cpu" else tau

    def _learn_temperature(
        self,
        step: Step,
        log_weight: Tensor,
        grad_x: Tensor,
    ) -> None:
        """Add the term to the loss that gives log_scale its gradient.

        The derivative of mean_i tau (log d_i - log(n-1) + rho) with respect to tau has the terms of d_i, in which
        sum_i sum_j w_ij (s_ij - s_ii) / B, over both sides, is the inner product of x and its gradient.
        """
        assert self.log_scale is not None
        margins = (grad_x * step.batch.local_x).sum()
        margins = distributed.sum_over_processes(margins) / distributed.world_size() / step.temperature
        direct = step.log_d - math.log(self.num_samples - 1) + self.temperatures.rho
        direct = self._for_counted(step, direct, 0.0).sum() / step.batch.size
        gradient = direct - margins + self.zeta_moment(step, log_weight)
        step.terms.append(zero_valued(-step.temperature * gradient, self.log_scale))

    def _move_temperatures(self, step: Step, moments: Tensor) -> None:
        """Update tau_i and its momentum from moments = sum_j w_ij (s_ij - s_ii)/tau_i."""
        assert isinstance(step.tau, Tensor)
        options = self.temperatures
        gradient = step.log_d - math.log(self.num_samples - 1) + options.rho - moments
        gradient = gradient.clamp(-TAU_GRADIENT_LIMIT, TAU_GRADIENT_LIMIT)
        old = step.rows.tables["tau_momentum"]
        momentum = step.unless_alone(old + options.tau_beta * (gradient - old), old)
        tau = (step.tau - options.tau_lr * momentum).clamp(options.tau_min, options.tau_max)
        tau = step.unless_alone(tau, step.tau)
        step.tables |= {"tau": tau, "tau_momentum": momentum}
        step.metrics |= {f"tau_{ANCHORS[row]}": tau[row].mean() for row in self.active}

    def gather_features(self, features: Tensor) -> Tensor:
        """Return the features of all processes, without gradient: each process computes that of its own features."""
        return distributed.all_gather(features)


def running_log_mean(
    log_u: Tensor,
    log_phi: Tensor,
    gamma: float,
) -> Tensor:
    """Return log((1 - gamma) u + gamma phi) element by element; an unseen sample, log u = -inf, starts at phi.

    Args:
        log_u: log of the old averages, any shape.
        log_phi: log of the new values, the same shape.
        gamma: weight of the new values, in [0, 1].

    Returns:
        Log of the new averages.

    Example:
        >>> running_log_mean(torch.tensor([0.0, -math.inf]), torch.tensor([3.0, 4.0]), gamma=1.0)
        tensor([3., 4.])

    """
    log_old = log_u + (math.log1p(-gamma) if gamma < 1 else -math.inf)
    log_new = log_phi + (math.log(gamma) if gamma > 0 else -math.inf)
    return torch.where(log_u.isneginf(), log_phi, torch.logaddexp(log_old, log_new))


def proximal_log_mean(
    log_u: Tensor,
    log_phi: Tensor,
    log_scale: float,
) -> Tensor:
    """Return the running average whose weight grows with the old average: gamma = a u / (1 + a u).

    This is a proximal step on the dual of log (SCENT, Wei et al. 2026). Averages that are small, of samples that are
    far from all negatives, change slowly. The weight of the new values is at least 1e-8, so that u >= 1e-8 phi and
    gradients stay finite.

    Args:
        log_u: log of the old averages, any shape; -inf for an unseen sample, which starts at phi.
        log_phi: log of the new values, the same shape.
        log_scale: log a.

    Returns:
        Log of the new averages.

    Example:
        >>> proximal_log_mean(torch.tensor([0.0]), torch.tensor([math.log(3.0)]), log_scale=0.0).exp()
        tensor([2.])

    """
    log_odds = (log_u + log_scale).clamp(min=LOG_LEAST_ODDS)
    mixed = torch.logaddexp(log_u + logsigmoid(-log_odds), log_phi + logsigmoid(log_odds))
    return torch.where(log_u.isneginf(), log_phi, mixed)


def zero_valued(slope: Tensor, variable: Tensor) -> Tensor:
    """Return a scalar with value 0 whose gradient with respect to `variable` is `slope`."""
    with torch.enable_grad():
        return (slope * (variable - variable.detach())).sum()


class _ClosedForm(torch.autograd.Function):
    """The sum of values, whose gradients with respect to the features are already known."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        *features_and_gradients: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*features_and_gradients)
        return values.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        half = len(ctx.saved_tensors) // 2
        features = ctx.saved_tensors[:half]
        gradients = ctx.saved_tensors[half:]
        constant = (None,) * half
        scale = grads[0]
        if torch.is_grad_enabled():  # create_graph=True: the derivative with respect to the scale is known
            gradients = [_FirstDerivative.apply(gradient, *features) for gradient in gradients]  # type: ignore[no-untyped-call]
        elif not scale.requires_grad and scale.device.type == "cpu":  # it can be read without a device sync
            # a batch of gradients under vmap has several values
            with contextlib.suppress(RuntimeError):
                if scale.item() == 1:  # as in `loss.backward()`; autograd copies if it has to
                    return None, *gradients, *constant
        return None, *(scale * gradient for gradient in gradients), *constant


class _FirstDerivative(torch.autograd.Function):
    """A gradient that depends on the features in a way that is not known; without it, its derivative would be 0."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *features: Tensor) -> Tensor:  # noqa: ARG004
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(
            "SogCLR, iSogCLR and NUCLR have no second derivatives with respect to the features: leave their loss out "
            "of what you differentiate twice, such as a gradient penalty, or use clip"
        )
