"""State: round trips, eval(), dtypes and devices; gradients; and the relations between the objectives."""

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.objectives.base import DeferredCheck
from tests.objectives.make import make

N, B, D = 30, 8, 6
STATEFUL = ("sogclr", "isogclr", "nuclr")
MOVING = {"sogclr": {}, "isogclr": {"tau_lr": 1e-3}, "nuclr": {"zeta_lr": 0.05, "zeta_momentum": 0.1}}


def batches(count: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def features() -> Tensor:
        return normalize(torch.randn(B, D, generator=generator, dtype=torch.float64), dim=1).to(dtype)

    return [(features(), features(), torch.randperm(N, generator=generator)[:B]) for _ in range(count)]


def gradients(objective: torch.nn.Module, x: Tensor, y: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    loss = objective(x, y, *rest).loss
    loss.backward()
    return loss.detach(), x.grad, y.grad


@pytest.mark.parametrize("name", STATEFUL)
def test_state_of_another_size_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match="log_u_x"):
        make(name, num_samples=N + 1).load_state_dict(make(name, num_samples=N).state_dict())


@pytest.mark.parametrize("name", ["nuclr", "nuclr-authors"])
def test_the_velocity_is_stored_with_momentum_only(name: str) -> None:
    objective = make(name, num_samples=N)
    tables = {key for key, value in objective.state_dict().items() if len(value.shape)}
    assert tables == {"log_u_x", "log_u_y", "zeta_x", "zeta_y"}, "16 bytes per pair"
    objective.zeta_momentum = 0.1
    with pytest.raises(ValueError, match="zeta_momentum"):
        objective(*batches(1)[0])


@pytest.mark.parametrize("name", STATEFUL)
def test_tables_stay_in_full_precision(name: str) -> None:
    objective = make(name, num_samples=N)
    for moved, expected in (("half", torch.float32), ("bfloat16", torch.float32), ("double", torch.float64)):
        getattr(objective, moved)()
        assert all(value.dtype == expected for value in objective.state_dict().values()), moved
    objective.bfloat16()
    assert objective.log_u_x.dtype == torch.float64
    objective.float()
    assert objective.log_u_x.dtype == torch.float32


@pytest.mark.parametrize("name", STATEFUL)
def test_state_device_keeps_tables_while_the_module_moves(name: str) -> None:
    objective = make(name, num_samples=N, state_device="cpu").to("meta")
    assert all(value.device.type == "cpu" for value in objective.state_dict().values())
    free = make(name, num_samples=N).to("meta")
    assert all(value.device.type == "meta" for value in free.state_dict().values())
    objective.to("cpu")(*batches(1)[0])


def test_autocast_does_not_touch_the_objective() -> None:
    x, y, index = batches(1)[0]
    plain = gradients(make("nuclr", num_samples=N), x, y, index)
    with torch.autocast("cpu", torch.bfloat16):
        cast = gradients(make("nuclr", num_samples=N), x, y, index)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_metrics_are_detached_numbers() -> None:
    for name in ("clip", "siglip", "dcl", "cyclip", "sogclr", "isogclr", "nuclr"):
        x, y, index = batches(1)[0]
        out = make(name, num_samples=N)(x.requires_grad_(), y.requires_grad_(), index)
        for value in out.metrics.values():
            assert value.ndim == 0 and not value.requires_grad and math.isfinite(value)
        total = out.metrics["objective_x"] + out.metrics["objective_y"]
        assert float(total) == pytest.approx(float(out.loss.detach()), abs=1e-6)


@pytest.mark.parametrize("name", STATEFUL)
def test_backward_passes_of_one_forward_pass(name: str) -> None:
    """Several, in batches of upstream gradients, and differentiable with respect to the weight of a loss."""
    x, y, index = batches(1)[0]
    expected = gradients(make(name, num_samples=N), x, y, index)[1]
    x = x.requires_grad_()
    loss = make(name, num_samples=N)(x, y, index).loss
    loss.backward(retain_graph=True)
    x.grad.mul_(7)  # in place, as gradient clipping and optimizers do
    (2 * loss).backward(retain_graph=True)
    torch.testing.assert_close(x.grad, 9 * expected)
    (both,) = torch.autograd.grad(loss, x, torch.tensor([1.0, 3.0]), is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(both, torch.stack([expected, 3 * expected]))
    weight = torch.ones((), requires_grad=True)
    (gradient,) = torch.autograd.grad(weight * loss, x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(gradient.norm(), weight)[0], expected.norm())


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1j])
@pytest.mark.parametrize("name", ["siglip", "clip learnt", *STATEFUL, "nuclr networks"])
def test_a_state_with_wrong_numbers_is_refused_and_changes_nothing(name: str, wrong: complex) -> None:
    options = {"clip learnt": {"learn_temperature": True}}
    options["nuclr networks"] = {"popularity": "network", "normalizer": "network", "temperature": 0.5}
    objective = make(name.split()[0], num_samples=N, **options.get(name, {}))
    gradients(objective, *batches(1)[0])
    before = {key: value.clone() for key, value in objective.state_dict().items()}
    objective.load_state_dict(before)
    for key, value in before.items():
        state = {other: entry + 1 for other, entry in before.items()}
        state[key] = value.to(torch.complex64) if isinstance(wrong, complex) else torch.full_like(value, wrong)
        may_be_nan = key.startswith("normalizer_offset") and wrong != wrong
        if not may_be_nan:
            with pytest.raises(ValueError, match=key):
                objective.load_state_dict(state)
            for other, entry in objective.state_dict().items():
                assert torch.equal(entry, before[other]), other


@pytest.mark.parametrize("name", STATEFUL)
def test_second_derivatives_with_respect_to_features_are_refused(name: str) -> None:
    """A gradient penalty would add nothing, without a word."""
    x, y, index = batches(1)[0]
    expected = gradients(make(name, num_samples=N), x, y, index)[1]
    x = x.requires_grad_()
    loss = make(name, num_samples=N)(x, y, index).loss
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    torch.testing.assert_close(gradient.detach(), expected)
    for penalized in (gradient.square().sum(), loss + gradient.square().sum()):
        with pytest.raises(NotImplementedError, match="second derivative"):
            penalized.backward(retain_graph=True)
    loss.backward()


def test_gradients_in_eval_mode_if_the_stored_average_is_far_below_the_batch() -> None:
    x = normalize(torch.tensor([[1.0, 0.02 * i] for i in range(B)]), dim=1)
    expected = []
    for dtype in (torch.float32, torch.float64):
        objective = make("sogclr", num_samples=N, temperature=0.0135).eval().to(dtype)
        for table in objective.buffers():
            table.fill_(-20.0)
        expected.append(gradients(objective, x.to(dtype), -x.to(dtype), torch.arange(B))[1].double())
    assert torch.isfinite(expected[1]).all()
    torch.testing.assert_close(expected[0], expected[1], rtol=0, atol=1e-3 * expected[1].abs().max().item())


def test_state_stays_finite_if_zeta_exceeds_xi() -> None:
    x, y, index = batches(1)[0]
    objective = make("nuclr", num_samples=N, temperature=0.01, zeta_lr=1e-3)
    for side, value in (("x", 1.0), ("y", -1.0)):  # too far apart for SharedKernel
        objective.get_buffer(f"zeta_{side}").fill_(value)
    gradients(objective, x, y, index)
    assert all(table[index].isfinite().all() for table in objective.buffers() if table.ndim)


def test_a_copy_has_no_pending_checks() -> None:
    checks = DeferredCheck()
    checks._pending = [(torch.ones(1), iter(()), None)]  # an iterator cannot be copied, as an event cannot
    assert copy.deepcopy(checks)._pending == []


@pytest.mark.parametrize("name", STATEFUL)
def test_losses_of_two_batches_keep_their_own_gradients(name: str) -> None:
    objective, other = make(name, num_samples=N), make(name, num_samples=N)
    inputs = [[t.clone().requires_grad_() for t in batch[:2]] for batch in batches(2)]
    losses = [objective(*pair, batch[2]).loss for pair, batch in zip(inputs, batches(2), strict=True)]
    sum(losses).backward()
    for pair, batch in zip(inputs, batches(2), strict=True):
        _, grad_x, grad_y = gradients(other, *batch)
        assert torch.equal(pair[0].grad, grad_x) and torch.equal(pair[1].grad, grad_y)


@pytest.mark.parametrize("name", STATEFUL)
def test_training_after_inference_mode(name: str) -> None:
    objective = make(name, num_samples=N)
    with torch.inference_mode():
        objective.eval()(*batches(1)[0])
    objective.train()
    copied = copy.deepcopy(objective)
    for expected, actual in zip(gradients(objective, *batches(1)[0]), gradients(copied, *batches(1)[0]), strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize(("rule", "expected"), [("max", 0.2), ("norm", 0.5)])
def test_xi_of_an_epoch_follows_all_zeta_and_may_fall(rule: str, expected: float) -> None:
    options = {"xi_init": 0.1, "zeta_init": 0.3, "xi_rule": rule, "xi_update": "epoch", "zeta_lr": 0.1}
    objective = make("nuclr-authors", num_samples=4, **options)
    x = normalize(torch.randn(2, 3, generator=torch.Generator().manual_seed(0)), dim=1)
    objective(x, x, [0, 1])
    assert objective.xi_x.item() == objective.xi_y.item() == pytest.approx(0.1), "a step leaves xi unchanged"
    for zeta in ([-0.5, 0.2, 0.0, 0.1], [0.0, 0.0, 0.05, 0.0]):
        objective.zeta_y.copy_(torch.tensor(zeta))
        objective.end_epoch()
        assert objective.xi_y.item() == pytest.approx(max(0.1, expected) if 0.2 in zeta else 0.1)
