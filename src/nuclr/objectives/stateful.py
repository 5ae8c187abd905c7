"""The SogCLR family: running averages per sample, and a gradient in closed form.

For one side, with B the size of the global batch, c_i the number of negatives of anchor i in it (B - 1 without
masking), and n the size of the data set:

    log phi_i = log((n-1)/c_i) + logsumexp_{j != i} (s_ij - s_ii)/tau_i - zeta_j/tau
    u_i      <- (1 - gamma) u_i + gamma phi_i, in logs; phi_i at the first visit
    w_ij      = exp(log((n-1)/c_i) + (s_ij - s_ii)/tau_i - zeta_j/tau - log d_i)

The model's gradient is that of (1/B) sum_i sum_{j != i} w_ij (s_ij - s_ii) with w held fixed, summed over the sides.
It is linear in the scores, so the forward pass computes it, and backward only scales it. The objectives differ in zeta
and in the normalizer d_i. With several views of a sample, s_ii is the mean S_i over its pairs of views, and exp is
averaged over the pairs of views; see `kernels`.

What all of them can do:

Temperatures. One `temperature` for all anchors. Or a learnt one, tau = exp(-log_scale), that minimizes the mean of
tau (log d_i - log(n-1) + rho) (FastCLIP-v3, Wei et al. 2024). Or one per anchor: with w at the old tau_i,

    g_i = clip(log d_i - log(n-1) + rho - sum_{j != i} w_ij (s_ij - s_ii)/tau_i, -5, 5)
    m_i <- (1 - tau_beta) m_i + tau_beta g_i,    tau_i <- clip(tau_i - tau_lr m_i, tau_min, tau_max)

Averages. gamma is a constant, or gamma_i = alpha u_i / (n - 1 + alpha u_i) of the old u_i (`gamma_rule="proximal"`).

Normalizers without a table. With `normalizer="network"`, the stored average is replaced by a prediction: log u_i =
k(x_i) - s_ii/tau_i. The network k minimizes phi_i exp(s_ii/tau_i - k_i) + k_i, whose minimum is at log phi_i +
s_ii/tau_i.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from nuclr import distributed
from nuclr.objectives.averages import proximal_log_mean, running_log_mean
from nuclr.objectives.base import GatheredBatch, ObjectiveOutput
from nuclr.objectives.checks import check_choice, check_positive, check_range
from nuclr.objectives.kernels import (
    BatchKernel,
    KernelBatch,
    Workspace,
    make_kernel,
    pool,
    positive_scores,
)
from nuclr.objectives.networks import PrototypeNetwork
from nuclr.objectives.state import ANCHORS, PairTables, StateRows

GAMMA_RULES = ("constant", "proximal")
SIDES = ("both", "x", "y")
SOURCES = ("table", "network")
LEARNT_TAU = (0.001, 1.0)
TAU_GRADIENT_LIMIT = 5.0
LEAST_GAMMA = 1e-4  # below, weights are not bounded well enough for the fast kernel
NETWORK_GRADIENT_LIMIT = math.exp(4)  # of a network whose prediction of an average is far too small


@dataclass
class Step:
    """The values of one step, in the order in which they are computed. (2, B) tensors have side x in row 0."""

    batch: GatheredBatch
    learns: bool  # whether networks and a learnt temperature get gradients
    rows: StateRows  # state before the step
    temperature: float | Tensor  # tau: one number; a scalar tensor if it is learnt on an accelerator
    tau: float | Tensor  # of the anchors: one number, or (2, B)
    # -- candidates
    zeta: Tensor = field(init=False)  # (2, B)
    log_own: Tensor = field(init=False)  # (2, B), -zeta/tau: log of the positive's term in the partition function
    predicted_popularity: Tensor | None = None  # (2, B), zeta/tau with gradient, if a network predicts it
    # -- anchors
    predicted_normalizer: Tensor | None = None  # (2, B), k with gradient, if a network predicts it
    positive: Tensor | None = None  # (B,), S_i, if a network predicts the normalizer
    kernel: BatchKernel = field(init=False)
    negatives: float | Tensor = field(init=False)  # c_i: one number, or (B,)
    log_scale: float | Tensor = field(init=False)  # log((n-1)/c_i)
    log_phi: Tensor = field(init=False)  # (2, B)
    log_u: Tensor = field(init=False)  # (2, B), before and then after the update
    log_d: Tensor = field(init=False)  # (2, B), log of the normalizer of the weights
    # -- results
    tables: dict[str, Tensor] = field(default_factory=dict)  # the state after the step: name -> (2, B)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    terms: list[Tensor] = field(default_factory=list)  # terms of the loss with value 0, for the gradients of parameters

    @cached_property
    def log_total(self) -> Tensor:
        """log(u_i + exp(-zeta_i/tau)), (2, B): log of the estimated partition function, including the positive."""
        return torch.logaddexp(self.log_u, self.log_own)

    def unless_alone(self, then: Tensor, otherwise: float | Tensor) -> Tensor:
        """Return `then`, or `otherwise` for anchors without negatives, which contribute nothing and change nothing."""
        return then if isinstance(self.negatives, float) else torch.where(self.negatives > 0, then, otherwise)


class StatefulObjective(PairTables):
    """The steps that SogCLR, iSogCLR and NUCLR share.

    Args:
        num_samples: as in `SogCLR`, which also describes the arguments that are not described here.
        temperature: as in `SogCLR`.
        gamma: as in `SogCLR`.
        gamma_rule: as in `SogCLR`.
        alpha: as in `SogCLR`.
        learn_temperature: as in `SogCLR`.
        individual_temperature: whether every anchor has a temperature of its own.
        rho: as in `SogCLR`; also of individual temperatures.
        tau_lr: as in `ISogCLR`.
        tau_beta: as in `ISogCLR`.
        tau_min: as in `ISogCLR`.
        tau_max: as in `ISogCLR`.
        sides: as in `SogCLR`.
        normalizer: as in `SogCLR`.
        state_device: as in `SogCLR`.
        state_sharding: as in `SogCLR`.
        normalize: as in `Objective`.

    """

    def __init__(
        self,
        num_samples: int,
        temperature: float,
        gamma: float,
        gamma_rule: str = "constant",
        alpha: float = 4.0,
        learn_temperature: bool = False,
        individual_temperature: bool = False,
        rho: float = 8.0,
        tau_lr: float = 1e-3,
        tau_beta: float = 0.9,
        tau_min: float = 0.005,
        tau_max: float = 0.05,
        sides: str = "both",
        normalizer: str = "table",
        state_device: str | torch.device | None = None,
        state_sharding: bool = False,
        normalize: bool = False,
    ) -> None:
        check_choice("sides", sides, SIDES)
        check_choice("normalizer", normalizer, SOURCES)
        if learn_temperature and individual_temperature:
            raise ValueError("learn_temperature and individual_temperature exclude each other; set one to False")
        super().__init__(num_samples, temperature, sides, state_device, state_sharding, normalize)
        self.gamma, self.gamma_rule, self.alpha = gamma, gamma_rule, alpha
        self.learn_temperature, self.individual_temperature, self.rho = learn_temperature, individual_temperature, rho
        self.tau_lr, self.tau_beta, self.tau_min, self.tau_max = tau_lr, tau_beta, tau_min, tau_max
        self.normalizer = normalizer
        self._workspace = Workspace()
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature))) if learn_temperature else None
        if normalizer == "table":
            self.add_tables("log_u", -math.inf, ANCHORS)
        else:
            self.normalizer_networks = nn.ModuleDict({ANCHORS[row]: PrototypeNetwork() for row in self.active})
            for row in self.active:  # nan before the first batch
                self.register_buffer(f"normalizer_offset_{ANCHORS[row]}", torch.tensor(math.nan))
        if individual_temperature:
            self.add_tables("tau", temperature, ANCHORS)
            self.add_tables("tau_momentum", 0.0, ANCHORS)
        StatefulObjective.check_settings(self)

    def check_settings(self) -> None:
        """Raise a ValueError if a setting is unknown or out of range."""
        super().check_settings()
        check_choice("gamma_rule", self.gamma_rule, GAMMA_RULES)
        # a network's prediction may be used alone; a table would never be filled
        check_range("gamma", self.gamma, 0, 1, low_open=self.normalizer == "table")
        check_positive("alpha", self.alpha)
        if self.individual_temperature:
            check_positive("tau_min", self.tau_min)
            check_range("tau_min", self.tau_min, 0, self.tau_max)
            check_range("tau_lr", self.tau_lr, 0, math.inf)
            check_range("tau_beta", self.tau_beta, 0, 1)
        if self.learn_temperature:
            check_range("temperature", self.temperature, *LEARNT_TAU)

    @property
    def current_temperature(self) -> float:
        """The fixed or learnt temperature, or the mean tau_i over the samples seen so far if every anchor has one."""
        if self.log_scale is not None:
            return math.exp(-self.log_scale.item())
        if not self.individual_temperature:
            return super().current_temperature
        tables = [self.get_buffer(f"tau_{ANCHORS[row]}") for row in self.active]
        if self.normalizer == "table":
            tables = [
                tau[~self.buffer(f"log_u_{ANCHORS[row]}").isneginf()]
                for row, tau in zip(self.active, tables, strict=True)
            ]
        seen = torch.cat(tables)
        return seen.double().mean().item() if len(seen) else super().current_temperature

    # -- what subclasses implement -------------------------------------------------------------------------------------

    def read_zeta(self, step: Step) -> Tensor:
        """Return zeta of the candidates, (2, B)."""
        return step.batch.x.new_zeros(2, step.batch.size)

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
        """Update zeta from the masses (2, B), the sums of the probabilities that the other anchors give a candidate."""
        raise NotImplementedError

    def zeta_moment(self, step: Step, log_weight: Tensor) -> Tensor | float:  # noqa: ARG002
        """Return tau times the derivative of sum_i log d_i / B with respect to tau through zeta/tau and xi/tau."""
        return 0.0

    def tables_to_read(self, batch: GatheredBatch) -> list[str]:  # noqa: ARG002
        """Return the names of the tables that this step needs."""
        return list(self.initial)

    # -- one step ------------------------------------------------------------------------------------------------------

    def compute(self, batch: GatheredBatch) -> ObjectiveOutput:
        """Compute the closed form of the module's docstring on both sides; in training, update the state."""
        if self.training and batch.x.dtype == torch.float64 and self._is_float32():
            self.double()
        learns = torch.is_grad_enabled()
        needs_gradient = learns and (batch.local_x.requires_grad or batch.local_y.requires_grad)
        with torch.no_grad():
            values, gradient, step = self._step(batch, needs_gradient, learns)
        if needs_gradient:
            loss = cast(Tensor, _ClosedForm.apply(batch.local_x, batch.local_y, values, *gradient))  # type: ignore[no-untyped-call]
        else:
            loss = values.sum()
        for term in step.terms:
            loss = loss + term
        return ObjectiveOutput(loss, step.metrics)

    def _step(
        self, batch: GatheredBatch, needs_gradient: bool, learns: bool
    ) -> tuple[Tensor, tuple[Tensor, ...], Step]:
        """Return the value per side, and the gradients of this process's x and y."""
        # -- the state before the step
        rows = self.read(batch, self.tables_to_read(batch))
        temperature = self._temperature()
        tau = rows.tables["tau"] if self.individual_temperature else temperature
        step = Step(batch, learns, rows, temperature, tau)
        step.zeta = self.read_zeta(step)
        step.log_own = step.zeta / -temperature
        step.log_u = self._old_average(step)

        # -- first pass over the scores: the sums over the batch's negatives, and the running averages
        if isinstance(tau, Tensor) and tau.ndim == 0:
            tau = tau.expand_as(step.zeta)
        kernel_batch = KernelBatch(batch.x, batch.y, batch.views, step.log_own, tau, batch.ids, batch.pairs)
        kernel = step.kernel = make_kernel(kernel_batch, self._workspace, bounded=self._is_bounded(step))
        self.check_features(batch, kernel.finite)
        step.negatives = batch.negatives()
        step.log_scale = log_ratio(self.num_samples - 1, step.negatives)
        step.log_phi = distributed.all_gather(kernel.log_sums, dim=1) + step.log_scale
        if step.predicted_normalizer is not None and self.training:
            self._fit_normalizer(step, step.predicted_normalizer)
        step.log_u = self._new_average(step)
        if self.normalizer == "table":
            step.tables["log_u"] = step.log_u

        # -- the value
        step.log_d = self.log_normalizer(step)
        values = self._values(step)

        # -- second pass: the gradient of the features, and the sums from which the other state is updated
        gradient: tuple[Tensor, ...] = ()
        learns_tau = self.log_scale is not None and learns
        moves_tau = self.individual_temperature and self.training
        moves_zeta = self.moves_zeta() and self.training
        if needs_gradient or learns_tau or moves_tau or moves_zeta:
            log_weight = self._for_counted(step, step.log_scale - step.log_d, -math.inf)
            log_total = self._for_counted(step, step.log_total, math.inf) if moves_zeta else None
            sums = kernel.sums(log_weight, log_total, moments=moves_tau)
            gradient = sums.x, sums.y
            if learns_tau:
                self._learn_temperature(step, log_weight, sums.x)
            if sums.moments is not None:
                self._move_temperatures(step, distributed.all_gather(sums.moments, dim=1))
            if sums.masses is not None:
                self.update_zeta(step, distributed.all_gather(sums.masses, dim=1))
        if self.training and step.tables:
            self.write(rows.location, step.tables)
        return values, gradient, step

    def _values(self, step: Step) -> Tensor:
        """Return the value of each side in use, and add it to the metrics."""
        if self.learn_temperature or self.individual_temperature:
            values = step.tau * (step.log_d - math.log(self.num_samples - 1) + self.rho)
        else:
            values = self.value(step)
        means = step.unless_alone(values, 0.0).mean(dim=1)
        step.metrics |= {f"objective_{ANCHORS[row]}": means[row] for row in self.active}
        if self.log_scale is not None:
            step.metrics["scale"] = self.log_scale.detach().exp()
        return means if len(self.active) == 2 else means[self.active[0]]

    def _for_counted(self, step: Step, values: Tensor, otherwise: float) -> Tensor:
        """Return values (2, B), with `otherwise` for anchors without negatives and for a side that is not in use.

        Infinite values are replaced by the largest finite number, because 0 times infinity is not a number.
        """
        if math.isinf(otherwise):
            otherwise = math.copysign(torch.finfo(values.dtype).max, otherwise)
        values = step.unless_alone(values, otherwise)
        if len(self.active) == 1:
            values = values.clone()
            values[1 - self.active[0]] = otherwise
        return values

    def _is_float32(self) -> bool:
        tensors = [tensor for tensor in (*self._buffers.values(), *self.parameters()) if tensor is not None]
        return bool(tensors) and tensors[0].dtype == torch.float32

    # -- running averages ----------------------------------------------------------------------------------------------

    def _old_average(self, step: Step) -> Tensor:
        """Return log u before the step, (2, B): -inf if it is not known."""
        if self.normalizer == "table":
            return step.rows.tables["log_u"]
        batch = step.batch
        step.predicted_normalizer = self.predict(self.normalizer_networks, ANCHORS, step)
        step.positive = positive_scores(batch.x, batch.y, batch.views)
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
        if self.gamma_rule == "proximal":
            log_scale = math.log(self.alpha) - math.log(self.num_samples - 1)
            log_u = proximal_log_mean(step.log_u, step.log_phi, log_scale)
        else:
            log_u = running_log_mean(step.log_u, step.log_phi, self.gamma)
        return step.unless_alone(log_u, step.log_u)

    def _is_bounded(self, step: Step) -> bool:
        """Return whether weights are at most a moderate multiple of 1 / the batch's own sum."""
        if not self.training:
            # a known average may be far below that of this batch
            return step.rows.location is None and self.normalizer == "table"
        if self.gamma_rule == "constant":
            return self.gamma >= LEAST_GAMMA
        if step.log_u.device.type != "cpu":
            return False
        smallest = step.log_u.masked_fill(step.log_u.isneginf(), math.inf).min().item()
        return smallest + math.log(self.alpha) - math.log(self.num_samples - 1) > math.log(LEAST_GAMMA)

    def predict(self, networks: nn.ModuleDict, owners: tuple[str, str], step: Step, frozen: bool = False) -> Tensor:
        """Return the mean over views of a network's output for every pair of the global batch, (2, B).

        In training, networks whose prototypes are not complete get the batch's, unless they are frozen. Every process
        computes the outputs of all pairs, so that the networks' gradients need no communication.
        """
        batch, outputs = step.batch, []
        sides = {"x": (batch.x.detach(), batch.y.detach(), batch.views[0])}
        sides["y"] = (batch.y.detach(), batch.x.detach(), batch.views[1])
        with torch.set_grad_enabled(step.learns and self.training):
            for row, side in enumerate(owners):
                features, others, views = sides[side]
                if row not in self.active:
                    outputs.append(features.new_zeros(batch.size))
                    continue
                network = cast(PrototypeNetwork, networks[side])
                if self.training and not frozen:
                    network.add_prototypes(others, features, step.temperature)
                outputs.append(pool(network(features).to(features.dtype), views) / views)
            return torch.stack(outputs)

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

    def _learn_temperature(self, step: Step, log_weight: Tensor, grad_x: Tensor) -> None:
        """Add the term to the loss that gives log_scale its gradient.

        The derivative of mean_i tau (log d_i - log(n-1) + rho) with respect to tau has the terms of d_i, in which
        sum_i sum_j w_ij (s_ij - s_ii) / B, over both sides, is the inner product of x and its gradient.
        """
        assert self.log_scale is not None
        margins = (grad_x * step.batch.local_x).sum()
        margins = distributed.sum_over_processes(margins) / distributed.world_size() / step.temperature
        direct = step.log_d - math.log(self.num_samples - 1) + self.rho
        direct = self._for_counted(step, direct, 0.0).sum() / step.batch.size
        gradient = direct - margins + self.zeta_moment(step, log_weight)
        step.terms.append(zero_valued(-step.temperature * gradient, self.log_scale))

    def _move_temperatures(self, step: Step, moments: Tensor) -> None:
        """Update tau_i and its momentum from moments = sum_j w_ij (s_ij - s_ii)/tau_i."""
        assert isinstance(step.tau, Tensor)
        gradient = step.log_d - math.log(self.num_samples - 1) + self.rho - moments
        gradient = gradient.clamp(-TAU_GRADIENT_LIMIT, TAU_GRADIENT_LIMIT)
        old = step.rows.tables["tau_momentum"]
        momentum = step.unless_alone(old + self.tau_beta * (gradient - old), old)
        tau = (step.tau - self.tau_lr * momentum).clamp(self.tau_min, self.tau_max)
        tau = step.unless_alone(tau, step.tau)
        step.tables |= {"tau": tau, "tau_momentum": momentum}
        step.metrics |= {f"tau_{ANCHORS[row]}": tau[row].mean() for row in self.active}

    def gather_features(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of all processes, without gradient: each process computes that of its own features."""
        both = distributed.all_gather(torch.cat([x, y], dim=1))
        return both[:, : x.shape[1]].contiguous(), both[:, x.shape[1] :].contiguous()


def log_ratio(pairs: int, negatives: float | Tensor) -> float | Tensor:
    """Return log(pairs / negatives), which is finite for an anchor without negatives."""
    if isinstance(negatives, float):
        return math.log(pairs / negatives)
    return math.log(pairs) - negatives.clamp_min(1).log()


def zero_valued(slope: Tensor, variable: Tensor) -> Tensor:
    """Return a scalar with value 0 whose gradient with respect to `variable` is `slope`."""
    with torch.enable_grad():
        return (slope * (variable - variable.detach())).sum()


class _ClosedForm(torch.autograd.Function):
    """The sum of values, whose gradients with respect to the features are already known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, values: Tensor, grad_x: Tensor, grad_y: Tensor) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(grad_x, grad_y)
        return values.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_x, grad_y = ctx.saved_tensors
        scale = grads[0]
        if _is_one(scale):  # as in `loss.backward()`; autograd copies if it has to
            return grad_x, grad_y, None, None, None
        return scale * grad_x, scale * grad_y, None, None, None


def _is_one(scale: Tensor) -> bool:
    """Return True if the upstream gradient is the constant 1 and can be read without a device sync."""
    if scale.requires_grad or scale.device.type != "cpu":
        return False
    try:
        return scale.item() == 1
    except RuntimeError:  # a batch of gradients under vmap has several values
        return False
