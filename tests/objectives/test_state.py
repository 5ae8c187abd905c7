"""State: round trips, eval(), dtypes and devices; gradients; and the relations between the objectives."""

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.objectives import build
from nuclr.objectives.checks import DeferredCheck

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


def assert_same_state(one: torch.nn.Module, two: torch.nn.Module) -> None:
    assert one.state_dict().keys() == two.state_dict().keys()
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", STATEFUL)
def test_round_trip_continues_bit_for_bit(name: str, dtype: torch.dtype, tmp_path) -> None:
    data = batches(6, dtype)
    straight = build(name, num_samples=N, **MOVING[name])
    for batch in data[:3]:
        straight(*batch)
    torch.save(straight.state_dict(), tmp_path / "state.pt")
    resumed = build(name, num_samples=N, **MOVING[name])
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for batch in data[3:]:
        for expected, actual in zip(gradients(straight, *batch), gradients(resumed, *batch), strict=True):
            assert torch.equal(expected, actual)
    assert_same_state(straight, resumed)
    assert straight.log_u_x.isneginf().any() or len({int(i) for b in data for i in b[2]}) == N


@pytest.mark.parametrize("name", STATEFUL)
def test_state_of_another_size_is_refused_and_nothing_is_loaded(name: str) -> None:
    small, large = build(name, num_samples=N), build(name, num_samples=N + 1)
    small(*batches(1)[0])
    before = copy.deepcopy(large.state_dict())
    with pytest.raises(RuntimeError, match=r"log_u_x holds 30 pairs, but this objective has num_samples=31"):
        large.load_state_dict(small.state_dict())
    assert all(torch.equal(value, large.state_dict()[key]) for key, value in before.items())


@pytest.mark.parametrize("name", STATEFUL)
def test_only_visited_rows_change(name: str) -> None:
    objective = build(name, num_samples=N, **MOVING[name])
    fresh = copy.deepcopy(objective.state_dict())
    x, y, index = batches(1)[0]
    objective(x, y, index)
    others = torch.ones(N, dtype=torch.bool)
    others[index] = False
    for key, value in objective.state_dict().items():
        if value.ndim:
            assert torch.equal(value[others], fresh[key][others]), key
    assert objective.log_u_x[index].isfinite().all()


@pytest.mark.parametrize("name", STATEFUL)
def test_eval_leaves_state_untouched(name: str) -> None:
    objective = build(name, num_samples=N, **MOVING[name])
    first, second = batches(2)
    objective(*first)
    before = copy.deepcopy(objective)
    objective.eval()
    objective(*second)
    objective(*second[:2], None)
    assert_same_state(objective, before)


@pytest.mark.parametrize("name", STATEFUL)
def test_tables_stay_in_full_precision(name: str) -> None:
    objective = build(name, num_samples=N)
    for moved, expected in (("half", torch.float32), ("bfloat16", torch.float32), ("double", torch.float64)):
        getattr(objective, moved)()
        assert all(value.dtype == expected for value in objective.state_dict().values()), moved
    objective.bfloat16()
    assert objective.log_u_x.dtype == torch.float64
    objective.float()
    assert objective.log_u_x.dtype == torch.float32


@pytest.mark.parametrize("name", STATEFUL)
def test_float64_features_are_float64_throughout(name: str) -> None:
    objective = build(name, num_samples=N)
    out = objective(*batches(1, torch.float64)[0])
    assert out.loss.dtype == torch.float64
    assert all(value.dtype == torch.float64 for value in objective.state_dict().values())


@pytest.mark.parametrize("name", STATEFUL)
def test_state_device_keeps_tables_while_the_module_moves(name: str) -> None:
    objective = build(name, num_samples=N, state_device="cpu").to("meta")
    assert all(value.device.type == "cpu" for value in objective.state_dict().values())
    free = build(name, num_samples=N).to("meta")
    assert all(value.device.type == "meta" for value in free.state_dict().values())
    objective.to("cpu")(*batches(1)[0])


def test_settings_can_change_between_steps() -> None:
    objective = build("nuclr", num_samples=N, zeta_lr=0.0)
    first, second, third = batches(3)
    objective(*first)
    assert not objective.zeta_x.any() and not objective.zeta_velocity_x.any() and objective.xi_x == 0
    objective.zeta_lr, objective.gamma, objective.temperature = 0.1, 1.0, 0.2
    objective(*second)
    assert objective.zeta_x[second[2]].all() and objective.xi_x > 0
    objective.gamma = 0.0
    with pytest.raises(ValueError, match="gamma"):
        objective(*third)


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nuclr_without_zeta_and_positive_term_is_sogclr(dtype: torch.dtype, ids: bool) -> None:
    nuclr = build("nuclr", num_samples=N, zeta_lr=0, zeta_init=0, xi_init=math.inf)
    sogclr = build("sogclr", num_samples=N)
    for x, y, index in batches(5, dtype):
        extra = (index // 4, index % 7) if ids else ()
        one, two = gradients(nuclr, x, y, index, *extra), gradients(sogclr, x, y, index, *extra)
        assert torch.equal(one[1], two[1]) and torch.equal(one[2], two[2])
    assert torch.equal(nuclr.log_u_x, sogclr.log_u_x) and torch.equal(nuclr.log_u_y, sogclr.log_u_y)


def test_other_relations() -> None:
    x, y, index = batches(1, torch.float64)[0]
    clip = gradients(build("clip", temperature=0.1), x, y)
    for name, options in (("dcl", {"tau_plus": 0.0}), ("cyclip", {"cross": 0.0, "within": 0.0})):
        for expected, actual in zip(clip, gradients(build(name, temperature=0.1, **options), x, y), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    sogclr = gradients(build("sogclr", num_samples=N), x, y, index)
    isogclr = gradients(build("isogclr", num_samples=N, tau_lr=0.0), x, y, index)
    for expected, actual in zip(sogclr[1:], isogclr[1:], strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-7)  # tau is kept in a float32 table


def test_autocast_does_not_touch_the_objective() -> None:
    x, y, index = batches(1)[0]
    plain = gradients(build("nuclr", num_samples=N), x, y, index)
    with torch.autocast("cpu", torch.bfloat16):
        cast = gradients(build("nuclr", num_samples=N), x, y, index)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_metrics_are_detached_numbers() -> None:
    for name in ("clip", "siglip", "dcl", "cyclip", "sogclr", "isogclr", "nuclr"):
        x, y, index = batches(1)[0]
        out = build(name, num_samples=N)(x.requires_grad_(), y.requires_grad_(), index)
        assert {"objective_x", "objective_y"} <= out.metrics.keys()
        assert all(
            value.ndim == 0 and not value.requires_grad and math.isfinite(value) for value in out.metrics.values()
        )
        assert float(out.metrics["objective_x"] + out.metrics["objective_y"]) == pytest.approx(
            float(out.loss.detach()), abs=1e-6
        )


def loss_and_its_gradient(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, a loss of x, and the gradient that an equal objective computed."""
    x, y, index = batches(1)[0]
    expected = gradients(build(name, num_samples=N), x, y, index)[1]
    x = x.requires_grad_()
    return x, build(name, num_samples=N)(x, y, index).loss, expected


@pytest.mark.parametrize("name", STATEFUL)
def test_several_backward_passes_of_one_forward_pass(name: str) -> None:
    x, loss, expected = loss_and_its_gradient(name)
    loss.backward(retain_graph=True)
    x.grad.mul_(7)  # in place, as gradient clipping and optimizers do
    (2 * loss).backward(retain_graph=True)
    torch.testing.assert_close(x.grad, 9 * expected)
    torch.testing.assert_close(torch.autograd.grad(loss + x.sum() * 0, x)[0], expected)


@pytest.mark.parametrize("name", STATEFUL)
def test_the_gradient_can_be_differentiated_with_respect_to_a_loss_weight(name: str) -> None:
    x, loss, expected = loss_and_its_gradient(name)
    weight = torch.ones((), requires_grad=True)
    (gradient,) = torch.autograd.grad(weight * loss, x, create_graph=True)
    gradient.norm().backward()
    torch.testing.assert_close(weight.grad, expected.norm())


@pytest.mark.parametrize("name", STATEFUL)
def test_batched_gradients(name: str) -> None:
    x, loss, expected = loss_and_its_gradient(name)
    (both,) = torch.autograd.grad(loss, x, torch.tensor([1.0, 3.0]), is_grads_batched=True)
    torch.testing.assert_close(both, torch.stack([expected, 3 * expected]))


def test_gradients_in_eval_mode_if_the_stored_average_is_far_below_the_batch() -> None:
    x = normalize(torch.tensor([[1.0, 0.02 * i] for i in range(B)]), dim=1)
    expected = []
    for dtype in (torch.float32, torch.float64):
        objective = build("sogclr", num_samples=N, temperature=0.0135).eval().to(dtype)
        for table in objective.buffers():
            table.fill_(-20.0)
        expected.append(gradients(objective, x.to(dtype), -x.to(dtype), torch.arange(B))[1].double())
    assert torch.isfinite(expected[1]).all()
    torch.testing.assert_close(expected[0], expected[1], rtol=0, atol=1e-3 * expected[1].abs().max().item())


def test_state_stays_finite_if_zeta_exceeds_xi() -> None:
    x, y, index = batches(1)[0]
    objective = build("nuclr", num_samples=N, temperature=0.01, zeta_lr=1e-3)
    for side, value in (("x", 1.0), ("y", -1.0)):  # too far apart for SharedKernel
        objective.get_buffer(f"zeta_{side}").fill_(value)
    gradients(objective, x, y, index)
    assert all(table[index].isfinite().all() for table in objective.buffers() if table.ndim)


def test_a_copy_has_no_pending_checks() -> None:
    checks = DeferredCheck()
    checks._pending = [(torch.ones(1), iter(()), [])]  # an iterator cannot be copied, as an event cannot
    assert copy.deepcopy(checks)._pending == []


@pytest.mark.parametrize("name", STATEFUL)
def test_losses_of_two_batches_keep_their_own_gradients(name: str) -> None:
    objective, other = build(name, num_samples=N), build(name, num_samples=N)
    inputs = [[t.clone().requires_grad_() for t in batch[:2]] for batch in batches(2)]
    losses = [objective(*pair, batch[2]).loss for pair, batch in zip(inputs, batches(2), strict=True)]
    sum(losses).backward()
    for pair, batch in zip(inputs, batches(2), strict=True):
        _, grad_x, grad_y = gradients(other, *batch)
        assert torch.equal(pair[0].grad, grad_x) and torch.equal(pair[1].grad, grad_y)


@pytest.mark.parametrize("name", STATEFUL)
def test_training_after_inference_mode(name: str) -> None:
    objective = build(name, num_samples=N)
    with torch.inference_mode():
        objective.eval()(*batches(1)[0])
    objective.train()
    copied = copy.deepcopy(objective)
    for expected, actual in zip(gradients(objective, *batches(1)[0]), gradients(copied, *batches(1)[0]), strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize(("rule", "expected"), [("max", 0.2), ("norm", 0.5)])
def test_xi_of_an_epoch_follows_all_zeta_and_may_fall(rule: str, expected: float) -> None:
    objective = build("nuclr", num_samples=4, xi_init=0.1, zeta_init=0.3, xi_rule=rule, xi_update="epoch", zeta_lr=0.1)
    x = normalize(torch.randn(2, 3, generator=torch.Generator().manual_seed(0)), dim=1)
    objective(x, x, [0, 1])
    assert objective.xi_x.item() == objective.xi_y.item() == pytest.approx(0.1), "a step leaves xi unchanged"
    for zeta in ([-0.5, 0.2, 0.0, 0.1], [0.0, 0.0, 0.05, 0.0]):
        objective.zeta_y.copy_(torch.tensor(zeta))
        objective.end_epoch()
        assert objective.xi_y.item() == pytest.approx(max(0.1, expected) if 0.2 in zeta else 0.1)
