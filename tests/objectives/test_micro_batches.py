"""Micro-batches give the loss, gradients and state of the full batch, dropout included, on one process and on two."""

import random
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from nuclr.objectives import backward_in_micro_batches, build
from tests import forks
from tests.objectives.micro_batch_worker import BATCH, CASES, DROPOUT, LENGTH, WIDTH, Towers, in_one_graph, main, train

on_two_processes = pytest.mark.xdist_group("micro-batches on two processes")


def assert_close(results: dict, expected: dict, tolerance: float) -> None:
    """Compare relative to the largest entry if that is above 1: log u is about 10, where float32 has steps of 1e-6."""
    assert results.keys() == expected.keys()
    for name, value in results.items():
        size = max(1.0, float(expected[name].nan_to_num(neginf=0.0).abs().max()))
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=tolerance * size, msg=lambda m, n=name: f"{n}: {m}"
        )


def gradients(*modules: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return copies of all gradients, and set them to None."""
    found = {}
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            found[f"{number}.{name}"] = parameter.grad
            parameter.grad = None
    return found


def make(rows: int = 20, dropout: float = DROPOUT) -> tuple[Towers, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Towers(dropout).double(), *torch.randn(2, rows, LENGTH, WIDTH, dtype=torch.float64)


# The same as the full batch


@pytest.mark.parametrize("case", CASES)
def test_five_steps_with_dropout_equal_the_full_batch(case):
    micro, full = (train(case, step, DROPOUT) for step in (backward_in_micro_batches, in_one_graph))
    assert_close(micro, full, 1e-6)
    steps = (backward_in_micro_batches, in_one_graph)
    assert_close(*(train(case, step, DROPOUT, dtype=torch.float64) for step in steps), 1e-12)
    assert not torch.equal(full["losses"], train(case, in_one_graph, 0.0)["losses"]), "dropout changes the loss"


@pytest.mark.parametrize("case", CASES)
def test_five_steps_without_dropout_equal_one_forward_pass(case):
    assert_close(train(case, backward_in_micro_batches, 0.0), train(case, in_one_graph, 0.0, chunk=BATCH), 1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 10, 19, 20, 21])
def test_gradients_for_every_size_of_chunk(chunk):
    model, x, y = make()
    objective = build("clip", learn_temperature=True).double()
    torch.manual_seed(1)
    full = in_one_graph(model, (x, y), objective, chunk)
    expected, after = gradients(model, objective), torch.get_rng_state()
    torch.manual_seed(1)
    micro = backward_in_micro_batches(model, (x, y), objective, chunk)
    assert_close(gradients(model, objective), expected, 1e-14)
    assert micro.loss == full.loss and not micro.loss.requires_grad and micro.metrics.keys() == full.metrics.keys()
    assert torch.equal(torch.get_rng_state(), after)


def test_each_chunk_is_encoded_twice_and_a_single_one_once():
    model, x, y = make()
    calls = []

    def encode(x, y):
        calls.append((len(x), torch.is_grad_enabled()))
        return model(x, y)

    backward_in_micro_batches(encode, (x, y), build("clip"), 8)
    assert calls == [(8, False), (8, False), (4, False), (8, True), (8, True), (4, True)]
    calls.clear()
    backward_in_micro_batches(encode, (x, y), build("clip"), 20)
    assert calls == [(20, True)]
    calls.clear()
    backward_in_micro_batches(encode, (x, y), build("clip"), 6, pairs=10)  # of two rows each
    assert [rows for rows, _ in calls] == [12, 8, 12, 8]


def test_a_frozen_tower_and_frozen_towers():
    model, x, y = make(dropout=0.0)
    objective = build("clip", learn_temperature=True).double()
    model.x.requires_grad_(False)
    in_one_graph(model, (x, y), objective, 20)
    expected = gradients(model.y, objective)
    backward_in_micro_batches(model, (x, y), objective, 8)
    assert all(parameter.grad is None for parameter in model.x.parameters())
    assert_close(gradients(model.y, objective), expected, 1e-14)

    model.requires_grad_(False)
    backward_in_micro_batches(model, (x, y), objective, 8)
    assert_close(gradients(objective), {"0.log_scale": expected["1.log_scale"]}, 1e-14)


def test_features_with_views_and_a_loss_that_is_a_tensor():
    """Side y has two views per pair: in a dimension of their own, or as rows next to each other."""
    model, x, _ = make(12, dropout=0.0)
    views = torch.randn(12, 2, LENGTH, WIDTH, dtype=torch.float64)
    objective = build("clip").double()

    def loss(x, y):
        assert x.shape == (12, WIDTH) and y.shape == (12, 2, WIDTH)  # both sides of the whole batch
        return sum(objective(x, view).loss for view in y.unbind(1))

    def encode(x, y):
        return model.x(x), model.y(y.flatten(0, 1)).unflatten(0, (len(x), 2))

    full = loss(*encode(x, views))
    full.backward()
    expected = gradients(model)
    value = backward_in_micro_batches(encode, (x, views), loss, 5)
    assert value == full and not value.requires_grad
    assert_close(gradients(model), expected, 1e-14)
    backward_in_micro_batches(model, (x, views.flatten(0, 1)), lambda x, y: loss(x, y.unflatten(0, (-1, 2))), 5)
    assert_close(gradients(model), expected, 1e-14)


# Inputs


Packed = namedtuple("Packed", ["tokens", "mask"])


class Tokens(UserDict):
    """A dict with attributes, such as the BatchEncoding of a tokenizer."""

    @property
    def ids(self):
        return self["ids"]


def test_inputs_in_dicts_tuples_lists_and_arrays():
    rows = torch.arange(6.0).unsqueeze(1)
    weight = nn.Parameter(torch.ones(1))
    seen = []

    def encode(tokens, packed, texts, nothing, *, array):
        assert isinstance(tokens, Tokens) and isinstance(packed, Packed) and nothing is None
        assert len(array) == len(texts) == len(tokens.ids) == len(packed.tokens[0])
        seen.extend(texts)
        return tokens.ids * weight, torch.from_numpy(array) + packed.mask * packed.tokens[0]

    inputs = {
        "tokens": Tokens(ids=rows, none=None),
        "packed": Packed((rows, [1] * 6), rows),
        "texts": list("abcdef"),
        "nothing": None,
        "array": np.ones((6, 1), dtype=np.float32),
    }

    def objective(x, y):
        torch.testing.assert_close(x, rows)
        torch.testing.assert_close(y, 1 + rows**2)
        return (x * y).sum()

    backward_in_micro_batches(lambda **chunk: encode(**chunk), inputs, objective, 4)
    assert seen == list("abcdef") * 2
    assert weight.grad.item() == (rows * (1 + rows**2)).sum()
    assert len(inputs["tokens"].ids) == 6, "the user's inputs are not changed"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"micro_batch": 0}, ValueError, "micro_batch.*0"),
        ({"inputs": torch.ones(4, 2)}, TypeError, "inputs.*Tensor"),
        ({"inputs": (None,)}, ValueError, "inputs"),
        ({"inputs": ([], [])}, ValueError, r"inputs.*\[0, 0\]"),
        ({"inputs": (torch.ones(4, 2), {"ids": torch.ones(3, 2)})}, ValueError, r"inputs.*\[4, 3\]"),
        ({"pairs": 3}, ValueError, r"inputs.*3.*\[4, 4\]"),
        ({"inputs": (torch.ones(4, 2), 0.5)}, TypeError, "inputs.*float"),
        ({"inputs": (torch.ones(4, 2), torch.ones(()))}, TypeError, "inputs.*Tensor"),
        ({"encode": lambda *_: None}, TypeError, "encode.*NoneType"),
        ({"encode": lambda *_: (torch.ones(2), 1.0)}, TypeError, "encode.*float"),
        ({"encode": lambda *_: torch.ones(())}, TypeError, "encode.*Tensor"),
    ],
)
def test_wrong_input(arguments, error, message):
    correct = {
        "encode": lambda x, y: (normalize(x, dim=1), normalize(y, dim=1)),
        "inputs": (torch.randn(4, 2), torch.randn(4, 2)),
        "objective": build("clip"),
        "micro_batch": 2,
    }
    with pytest.raises(error, match=message):
        backward_in_micro_batches(**correct | arguments)


# Batch norm


class WithBatchNorm(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, **options))

    def forward(self, x, y):
        return normalize(self.tower(x), dim=1), normalize(self.tower(y), dim=1)


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: lambda x, y: model(x, y)])
def test_batch_norm_in_training_mode_is_refused(wrap):
    model = WithBatchNorm()
    x, y = torch.randn(2, 8, 3)
    with pytest.raises(ValueError, match=r"tower\.1 of WithBatchNorm"):
        backward_in_micro_batches(wrap(model), (x, y), build("clip"), 4)
    assert model.tower[1].num_batches_tracked == 0
    backward_in_micro_batches(wrap(model), (x, y), build("clip"), 8)  # one chunk is the full batch
    model.tower[1].eval()
    backward_in_micro_batches(wrap(model), (x, y), build("clip"), 4)
    assert model.tower[1].num_batches_tracked == 2
    assert not nn.modules.module._global_forward_pre_hooks
    with pytest.raises(ValueError, match=r"tower\.1 of WithBatchNorm"):
        backward_in_micro_batches(WithBatchNorm(track_running_stats=False).eval(), (x, y), build("clip"), 4)


# Scaled losses and autocast


@pytest.mark.parametrize("chunk", [8, 20])
@pytest.mark.parametrize("scale", [1 / 4, lambda loss: loss / 4])
def test_scale_is_a_factor_or_a_function_of_the_loss(scale, chunk):
    model, x, y = make(dropout=0.0)
    objective = build("clip", learn_temperature=True).double()
    plain = backward_in_micro_batches(model, (x, y), objective, 8)
    expected = gradients(model, objective)
    for _ in range(4):  # gradients are accumulated
        out = backward_in_micro_batches(model, (x, y), objective, chunk, scale=scale)
    assert out.loss.item() == pytest.approx(plain.loss.item(), abs=1e-12)
    assert_close(gradients(model, objective), expected, 1e-13)


def test_autocast():
    model, x, y = make()
    model, x, y = model.float(), x.float(), y.float()
    objective = build("clip", learn_temperature=True)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)

    def encode(x, y):
        with autocast:
            x, y = model(x, y)
        return x.float(), y.float()

    torch.manual_seed(1)
    in_one_graph(encode, (x, y), objective, 8)  # the objective and the backward pass in float32
    expected = gradients(model, objective)
    torch.manual_seed(1)
    with autocast:
        backward_in_micro_batches(lambda *xy: [side.float() for side in model(*xy)], (x, y), objective, 8)
        assert torch.is_autocast_enabled("cpu")
    results = gradients(model, objective)
    assert torch.equal(results["1.log_scale"], expected["1.log_scale"])
    assert_close(results, expected, 1e-3)  # sums over chunks are in bfloat16, in another order


def test_the_backward_pass_is_not_cast():
    weight = nn.Parameter(torch.randn(16, 16))
    x = torch.randn(8, 16)

    def in_float32(features):
        with torch.autocast("cpu", enabled=False):
            return (features @ weight).sin().sum()

    expected = torch.autograd.grad(in_float32(x), weight)[0]
    for chunk in (4, 8):
        weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            backward_in_micro_batches(lambda x: x, (x,), in_float32, chunk)
        assert torch.equal(weight.grad, expected)


# Random numbers


def test_random_numbers_of_numpy_and_python_are_repeated():
    weight, seen = nn.Parameter(torch.ones(1)), []

    def encode(x):
        factor = torch.tensor([np.random.rand(), random.random()])
        seen.append(factor)
        return x * weight * factor

    np.random.seed(0)
    random.seed(0)
    backward_in_micro_batches(encode, (torch.ones(6, 2),), lambda x: x.square().sum(), 2)
    first, second = torch.stack(seen).chunk(2)
    assert torch.equal(first, second) and len(first.unique()) == 6
    torch.testing.assert_close(weight.grad, 4 * first.square().sum()[None])


# Two processes


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("two")
    forks.call(main, [folder], 2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.slow
@on_two_processes
@pytest.mark.parametrize("case", CASES)
def test_five_steps_on_two_processes_equal_the_full_batch(case, two):
    for result in two:
        assert_close(result["trained"][case, "micro-batches"], result["trained"][case, "one graph"], 1e-6)
    first, second = (result["trained"][case, "micro-batches"] for result in two)
    assert_close(first, second, 0)


@pytest.mark.slow
@on_two_processes
@pytest.mark.parametrize("case", CASES)
def test_five_steps_on_two_processes_equal_one_process_with_one_forward_pass(case, two):
    one = train(case, in_one_graph, 0.0, chunk=BATCH)
    for result in two:  # the objective itself rounds differently on two processes, see test_distributed.py
        assert_close(result["trained"][case, "without dropout"], one, 5e-6)


@pytest.mark.slow
@on_two_processes
def test_only_the_last_chunk_synchronizes(two):
    for result in two:
        assert result["synchronizations"] == [1, 0, 1, 0]


@pytest.mark.slow
@on_two_processes
def test_all_processes_refuse_together(two):
    for result in two:
        assert "process 0: 2, process 1: 4" in result["messages"]["chunks"]
        assert "number of pairs" in result["messages"]["pairs"]
    assert "process 1: 0" in two[0]["messages"]["inputs"]
    assert "micro_batch" in two[1]["messages"]["inputs"]
