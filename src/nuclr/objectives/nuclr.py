"""NUCLR: learn how popular every candidate is, and divide the negatives by it.

    p(y|x) = exp(s(x,y)/tau) / Z(x),    Z(x) estimated by  sum_j exp(s(x,y_j)/tau) / q_j,    q_j = sum_i p(y_j|x_i)

over the n observed y_j: multiple importance sampling with the balance heuristic (Wang, Lei, Ying, Yang, "On
Discriminative Probabilistic Modeling for Self-Supervised Representation Learning", ICLR 2025). zeta_j = tau log q_j
solves a convex problem, and each batch takes one step towards its solution. In the notation of `stateful`,
d_i = u_i + exp(-xi/tau), where xi is a bound of zeta that guards the positive pair.

The step of zeta_j, with p_ij the model's probability and p_jj that of the positive,

    n G_j = 1 - a p_jj - b (n-1)/(B-1) sum_{i != j} p_ij
    v_j <- beta v_j + (1 - beta) n G_j,    zeta_j <- zeta_j - zeta_lr v_j

has three forms. "unbiased" (a = b = 1) is the stochastic gradient of the convex problem. "paper" (a = b = n/B) is the
paper's equation to the letter; with it, all zeta drift upwards. "reference" (a = n/B, and n/B instead of
b (n-1)/(B-1)) is what the authors' code computes; its zeta does not estimate popularity, but it trained best. The
steps of "paper" and "reference" scale with n/B, so their zeta_lr depends on the data set and the batch size.

Beyond the paper: Adam instead of momentum, several steps per batch (with u_i held fixed), a temperature per anchor (q_j
belongs to the candidate, so zeta_j is divided by the common `temperature` and not by tau_i), and a network instead of a
table, zeta_j = zeta_init + tau h(y_j), trained by the unbiased gradient of zeta_j.

Relations: with zeta_lr = 0, zeta_init = 0 and xi_init = inf it is SogCLR, and with individual temperatures iSogCLR.
With individual temperatures and tau_lr = 0 it has the gradients and zeta of NUCLR without.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn

from nuclr import distributed
from nuclr.objectives.base import GatheredBatch
from nuclr.objectives.checks import Features, check_choice, check_range, to_features
from nuclr.objectives.networks import PrototypeNetwork
from nuclr.objectives.state import CANDIDATES
from nuclr.objectives.stateful import SOURCES, StatefulObjective, Step, zero_valued

ESTIMATORS = ("reference", "unbiased", "paper")
XI_RULES = ("norm", "max")
XI_UPDATES = ("step", "epoch")
ZETA_OPTIMIZERS = ("sgd", "adam")
VELOCITY_INITS = ("zero", "gradient")
ADAM_EPSILON = 1e-8


class NUCLR(StatefulObjective):
    """SogCLR with each negative divided by its learnt popularity.

    Args:
        num_samples: as in `SogCLR`.
        temperature: as in `SogCLR`.
        gamma: as in `SogCLR`.
        zeta_init: initial zeta of every candidate.
        xi_init: smallest value of the guard xi; inf removes the positive term.
        xi_rule: "norm": xi follows the largest |zeta|, as in the paper; "max": it follows the largest zeta, as in the
            published code.
        use_xi: False uses the pair's own zeta instead of xi.
        zeta_lr: step size of zeta; 0 freezes zeta, its velocity and xi. A network is trained by the optimizer that has
            the objective's parameters; it is frozen by 0 as well, and other values have no effect on it.
        zeta_lr_ratio_x: zeta_x uses zeta_lr times this ratio.
        zeta_momentum: beta, the weight of the old velocity.
        zeta_estimator: "reference", "unbiased" or "paper". A network always uses "unbiased".
        zeta_optimizer: "sgd", or "adam" with beta and `zeta_beta2`, whose steps do not depend on the gradient's scale.
        zeta_beta2: Adam's weight of the old squares.
        zeta_steps: number of steps of zeta per batch.
        zeta_velocity_init: the velocity of "sgd" starts at "zero", or at the first "gradient" as in the published code.
        xi_update: "step": xi starts at the bound of zeta_init, follows every step and never falls. "epoch", as in the
            published code: xi starts at xi_init, and `end_epoch` sets it to the larger of xi_init and the bound of all
            zeta.
        individual_temperature: whether every anchor has a temperature of its own, as in `ISogCLR`.
        rho: as in `SogCLR` and `ISogCLR`.
        tau_lr: as in `ISogCLR`.
        tau_beta: as in `ISogCLR`.
        tau_min: as in `ISogCLR`.
        tau_max: as in `ISogCLR`.
        learn_temperature: as in `SogCLR`.
        gamma_rule: as in `SogCLR`.
        alpha: as in `SogCLR`.
        sides: as in `SogCLR`.
        popularity: "table" stores zeta per pair; "network" predicts it from the candidate's features. With both
            networks, no index is needed.
        normalizer: as in `SogCLR`.
        state_device: as in `SogCLR`.
        state_sharding: as in `SogCLR`.
        normalize: as in `Objective`.

    Example:
        >>> import torch
        >>> objective = NUCLR(num_samples=10, temperature=0.1, normalize=True)
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]], requires_grad=True)
        >>> objective(x, x.detach(), index=[4, 0, 7]).loss.backward()
        >>> objective.log_u_x.isfinite().nonzero().flatten()
        tensor([0, 4, 7])

    """

    def __init__(
        self,
        num_samples: int,
        temperature: float = 0.03,
        gamma: float = 0.8,
        zeta_init: float = 0.0,
        xi_init: float = 0.0,
        xi_rule: str = "norm",
        use_xi: bool = True,
        zeta_lr: float = 1e-3,
        zeta_lr_ratio_x: float = 1.0,
        zeta_momentum: float = 0.0,
        zeta_estimator: str = "reference",
        zeta_optimizer: str = "sgd",
        zeta_beta2: float = 0.999,
        zeta_steps: int = 1,
        zeta_velocity_init: str = "zero",
        xi_update: str = "step",
        individual_temperature: bool = False,
        rho: float = 8.0,
        tau_lr: float = 1e-3,
        tau_beta: float = 0.9,
        tau_min: float = 0.005,
        tau_max: float = 0.05,
        learn_temperature: bool = False,
        gamma_rule: str = "constant",
        alpha: float = 4.0,
        sides: str = "both",
        popularity: str = "table",
        normalizer: str = "table",
        state_device: str | torch.device | None = None,
        state_sharding: bool = False,
        normalize: bool = False,
    ) -> None:
        super().__init__(
            num_samples,
            temperature,
            gamma,
            gamma_rule,
            alpha,
            learn_temperature,
            individual_temperature,
            rho,
            tau_lr,
            tau_beta,
            tau_min,
            tau_max,
            sides,
            normalizer,
            state_device,
            state_sharding,
            normalize,
        )
        self.zeta_init, self.xi_init = zeta_init, xi_init
        self.xi_rule, self.xi_update, self.use_xi = xi_rule, xi_update, use_xi
        self.zeta_lr, self.zeta_lr_ratio_x, self.zeta_momentum = zeta_lr, zeta_lr_ratio_x, zeta_momentum
        self.zeta_estimator, self.zeta_optimizer, self.zeta_beta2 = zeta_estimator, zeta_optimizer, zeta_beta2
        self.zeta_steps, self.zeta_velocity_init, self.popularity = zeta_steps, zeta_velocity_init, popularity
        self.check_settings()
        if not math.isfinite(zeta_init) or math.isnan(xi_init):
            raise ValueError(f"zeta_init must be finite and xi_init a number, but they are {zeta_init} and {xi_init}")
        if popularity == "network" and xi_update == "epoch":
            raise ValueError('xi_update="epoch" needs all zeta in a table; use popularity="table" or xi_update="step"')
        if popularity == "network":
            self.popularity_networks = nn.ModuleDict({CANDIDATES[row]: PrototypeNetwork() for row in self.active})
        else:
            self.add_tables("zeta", zeta_init, CANDIDATES)
            starts_with_gradient = zeta_optimizer == "sgd" and zeta_velocity_init == "gradient"
            self.add_tables("zeta_velocity", math.nan if starts_with_gradient else 0.0, CANDIDATES)
            if zeta_optimizer == "adam":
                self.add_tables("zeta_square", 0.0, CANDIDATES)
                self.add_tables("zeta_updates", 0.0, CANDIDATES)
        for row in self.active:
            xi = torch.tensor(self._initial_xi(), dtype=torch.float32, device=self.state_device)
            self.register_buffer(f"xi_{CANDIDATES[row]}", xi)

    def check_settings(self) -> None:
        """Raise a ValueError if a setting is unknown or out of range."""
        super().check_settings()
        check_choice("xi_rule", self.xi_rule, XI_RULES)
        check_choice("xi_update", self.xi_update, XI_UPDATES)
        check_choice("zeta_estimator", self.zeta_estimator, ESTIMATORS)
        check_choice("zeta_optimizer", self.zeta_optimizer, ZETA_OPTIMIZERS)
        check_choice("zeta_velocity_init", self.zeta_velocity_init, VELOCITY_INITS)
        check_choice("popularity", self.popularity, SOURCES)
        check_range("zeta_lr", self.zeta_lr, 0, math.inf, high_open=True)
        check_range("zeta_lr_ratio_x", self.zeta_lr_ratio_x, 0, math.inf, high_open=True)
        check_range("zeta_momentum", self.zeta_momentum, 0, 1, high_open=True)
        check_range("zeta_beta2", self.zeta_beta2, 0, 1, high_open=True)
        check_range("zeta_steps", self.zeta_steps, 1, math.inf, high_open=True)

    def predict_popularity(self, features: Features, side: str = "y") -> Tensor:
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
        samples = to_features("features", features)
        if samples.ndim != 2:
            raise ValueError(f"features must be (N, d), but are {tuple(samples.shape)}")
        network = cast(PrototypeNetwork, self.popularity_networks[side])
        with torch.no_grad():
            predicted = network(samples.to(network.bias.device))
        return torch.exp(predicted + self.zeta_init / self.current_temperature)

    # -- zeta and xi ---------------------------------------------------------------------------------------------------

    def tables_to_read(self, batch: GatheredBatch) -> list[str]:
        """Return the names of the tables that this step needs: the velocity only if an old value matters."""
        keeps_velocity = self.zeta_momentum > 0 or self.zeta_optimizer == "adam" or batch.ids is not None
        return [name for name in self.initial if name != "zeta_velocity" or keeps_velocity]

    def read_zeta(self, step: Step) -> Tensor:
        """Return zeta of the candidates, (2, B), from the table or the network."""
        if self.popularity == "table":
            return step.rows.tables["zeta"]
        frozen = not self.moves_zeta()  # before its first prototypes, a network's zeta is zeta_init
        step.predicted_popularity = self.predict(self.popularity_networks, CANDIDATES, step, frozen)
        return self.zeta_init + step.temperature * step.predicted_popularity.detach()

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
        weight_on_candidates = distributed.all_gather(step.kernel.masses(-log_weight), dim=1)
        negatives = -(weight_on_candidates * step.log_own).sum()
        # the positive's term, exp(-xi/tau) / d_i xi/tau, which vanishes for xi = inf
        own = self._xi(step) / step.temperature if self.use_xi else -step.log_own
        positive = torch.where(own.isposinf(), 0.0, torch.exp(-own - step.log_d) * own)
        return (negatives + self._for_counted(step, positive, 0.0).sum()) / step.batch.size

    def moves_zeta(self) -> bool:
        """Return whether zeta is not frozen."""
        return self.zeta_lr > 0

    def update_zeta(self, step: Step, masses: Tensor) -> None:
        """Take the steps of zeta and of xi, from the masses at the present zeta."""
        if step.predicted_popularity is None:
            zeta = self._move_zeta(step, masses)
        else:
            zeta = step.zeta
            if step.predicted_popularity.requires_grad:
                slope = self._scaled_gradient(step, zeta, step.log_total, masses, "unbiased")
                slope = self._for_counted(step, slope, 0.0) * (step.temperature / step.batch.size)
                step.terms.append(zero_valued(slope, step.predicted_popularity))
        if self.xi_update == "step":
            largest = step.unless_alone(self._bounded(zeta), -math.inf).amax(dim=1)
            for row in self.active:
                xi = self.buffer(f"xi_{CANDIDATES[row]}")
                torch.maximum(xi, largest[row].to(xi), out=xi)
        means = zeta.mean(dim=1)
        step.metrics |= {f"zeta_{CANDIDATES[row]}": means[row] for row in self.active}

    def end_epoch(self) -> None:
        """Set xi from all zeta if `xi_update` is "epoch"; with several processes all of them must call it.

        Example:
            >>> objective = NUCLR(num_samples=4, zeta_init=0.2, xi_rule="max", xi_update="epoch")
            >>> objective.xi_y.item()
            0.0
            >>> objective.end_epoch()
            >>> round(objective.xi_y.item(), 4)
            0.2

        """
        if self.xi_update == "step":
            return
        self.flush()
        for row in self.active:
            xi, zeta = (self.buffer(f"{name}_{CANDIDATES[row]}") for name in ("xi", "zeta"))
            largest = torch.cat([self._bounded(zeta), zeta.new_tensor([self.xi_init])]).max()
            if self.state_sharding:
                device = self._feature_device or largest.device  # nccl gathers on the accelerator only
                largest = distributed.all_gather(largest.to(device)[None]).max()
            xi.copy_(largest)

    def _bounded(self, zeta: Tensor) -> Tensor:
        """Return the values whose largest xi follows."""
        return zeta.abs() if self.xi_rule == "norm" else zeta

    def _move_zeta(self, step: Step, masses: Tensor) -> Tensor:
        """Return zeta after `zeta_steps` steps, (2, B), and set the new tables."""
        zeta, log_total = step.zeta, step.log_total
        old = {name: rows for name, rows in step.rows.tables.items() if name.startswith("zeta_")}
        for inner in range(self.zeta_steps):
            if inner > 0:
                log_own = zeta / -step.temperature
                log_total = torch.logaddexp(step.log_u, log_own)
                local = step.kernel.masses(self._for_counted(step, log_total, math.inf))
                masses = distributed.all_gather(local, dim=1) * torch.exp(log_own - step.log_own)
            gradient = self._scaled_gradient(step, zeta, log_total, masses, self.zeta_estimator)
            old, direction = self._direction(step, old, gradient)
            moved = zeta.sub(direction, alpha=self.zeta_lr)
            if self.zeta_lr_ratio_x != 1:  # row 1 is x, the candidates of side y
                moved[1] = zeta[1] - self.zeta_lr * self.zeta_lr_ratio_x * direction[1]
            zeta = step.unless_alone(moved, zeta)
        step.tables |= old | {"zeta": zeta}
        return zeta

    def _direction(self, step: Step, old: dict[str, Tensor], gradient: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the tables of the optimizer after one step, and the direction of the step, (2, B)."""
        beta = self.zeta_momentum
        if "zeta_velocity" not in old:
            return {"zeta_velocity": gradient}, gradient
        last = old["zeta_velocity"]
        velocity = torch.where(last.isnan(), gradient, beta * last + (1 - beta) * gradient)
        velocity = step.unless_alone(velocity, last)
        if self.zeta_optimizer == "sgd":
            return {"zeta_velocity": velocity}, velocity
        square = self.zeta_beta2 * old["zeta_square"] + (1 - self.zeta_beta2) * gradient.square()
        square = step.unless_alone(square, old["zeta_square"])
        count = step.unless_alone(old["zeta_updates"] + 1, old["zeta_updates"])
        mean = velocity / (1 - beta**count)
        root = (square / (1 - self.zeta_beta2**count)).sqrt()
        tables = {"zeta_velocity": velocity, "zeta_square": square, "zeta_updates": count}
        return tables, mean / (root + ADAM_EPSILON)

    def _scaled_gradient(self, step: Step, zeta: Tensor, log_total: Tensor, masses: Tensor, estimator: str) -> Tensor:
        """Return n G_j, (2, B)."""
        own = torch.exp(zeta / -step.temperature - log_total)
        if estimator != "reference":
            # an anchor without negatives gives no mass, and its row is not stored
            masses = (self.num_samples - 1) / step.negatives * masses
        share = 1.0 if estimator == "unbiased" else self.num_samples / masses.shape[1]
        return torch.rsub(own + masses, 1, alpha=share)

    def _xi(self, step: Step) -> Tensor:
        """Return xi of both sides, (2, 1), in the dtype of the computation."""
        sides = [self.buffer(f"xi_{CANDIDATES[row]}") for row in self.active]
        return torch.stack(sides if len(sides) == 2 else sides * 2)[:, None].to(step.log_u)

    def _initial_xi(self) -> float:
        if self.xi_update == "epoch":
            return self.xi_init
        return max(self.xi_init, abs(self.zeta_init) if self.xi_rule == "norm" else self.zeta_init)

    def initial_value(self, buffer: str) -> float:
        """Return the value that a buffer has before its first update; nan if it has none."""
        return self._initial_xi() if buffer.startswith("xi_") else super().initial_value(buffer)
