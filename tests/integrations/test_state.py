"""The state file in a trainer's checkpoint folder: a round trip, and a clear line for whatever is wrong with it."""

import json
import warnings

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from nuclr.errors import UserError
from nuclr.integrations import STATE_FILE, load_state, save_state, state
from nuclr.objectives import Objective, build
from tests import forks

PAIRS = 12


def trained(name: str = "nuclr", **options: object) -> Objective:
    """Return an objective after one step on half of its pairs."""
    objective = build(name, num_samples=PAIRS, **options)
    x, y = normalize(torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
    objective(x, y, torch.arange(6) * 2)
    return objective


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("clip", {}),
        ("clip", {"learn_temperature": True}),
        ("sogclr", {}),
        ("isogclr", {}),
        ("nuclr", {"zeta_momentum": 0.9}),
        ("nuclr", {"temperatures": {"learnt": True}}),
    ],
)
def test_round_trip(name, options, tmp_path):
    objective = trained(name, **options)
    for dtype in (torch.float32, torch.float64):
        save_state(objective.to(dtype), tmp_path / "checkpoint-1")
        fresh = build(name, num_samples=PAIRS, **options)
        load_state(fresh, tmp_path / "checkpoint-1")
        assert fresh.state_dict().keys() == objective.state_dict().keys()
        for key, value in objective.state_dict().items():
            assert torch.equal(fresh.state_dict()[key], value), key
    assert "log_u_x" not in fresh.state_dict() or fresh.log_u_x.dtype == torch.float64


def test_an_objective_without_state_needs_no_file(tmp_path):
    load_state(build("clip"), tmp_path)


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "folder": lambda path: [path.unlink(), path.mkdir()],
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "one bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "foreign": lambda path: save_file({"weight": torch.zeros(2)}, path),
    "text": lambda path: path.write_text("not tensors"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_bad_file_is_refused_and_named(damage, tmp_path):
    save_state(trained(), tmp_path)
    damage(tmp_path / STATE_FILE)
    fresh = build("nuclr", num_samples=PAIRS)
    with pytest.raises(UserError, match=f"{STATE_FILE}: ") as raised:
        load_state(fresh, tmp_path)
    assert "\n" not in str(raised.value)
    assert fresh.log_u_x.isneginf().all()


@pytest.mark.parametrize(
    ("changes", "tensors"),
    [({"options": []}, {}), ({"pairs": 3}, {}), ({}, {"log_u_x": torch.tensor(0.0)}), ({}, {"log_u_x": torch.ones(1)})],
    ids=str,
)
def test_a_forged_file_with_a_right_checksum_is_refused(changes, tensors, tmp_path):
    path = tmp_path / STATE_FILE
    save_state(trained(), tmp_path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()[state.FORMAT])
    content = load_file(path) | tensors
    text = json.dumps(header | {"sha256": state._digest(content)} | changes)
    save_file(content, path, {state.FORMAT: text})
    with pytest.raises(UserError, match=f"{STATE_FILE}: "):
        load_state(build("nuclr", num_samples=PAIRS), tmp_path)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (("sogclr", {}), "NUCLR.*SogCLR"),
        (("nuclr", {"num_samples": 40}), "12.*num_samples=40"),
        (("nuclr", {"temperatures": {"individual": True}}), "tau_.*NUCLR"),
    ],
)
def test_the_state_of_another_objective_is_refused(objective, message, tmp_path):
    save_state(trained(), tmp_path)
    name, options = objective
    with pytest.raises(UserError, match=message):
        load_state(build(name, **({"num_samples": PAIRS} | options)), tmp_path)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({}, {"false_negative_margin": 0.1}),
        ({"false_negative_margin": 0.1}, {}),
        ({"temperatures": {"rho": 7.0}}, {}),
        ({}, {"temperatures": {"rho": 7.0}}),
    ],
)
def test_an_option_that_was_or_is_at_its_default_gives_a_warning_too(before, now, tmp_path):
    save_state(trained(**before), tmp_path)
    with pytest.warns(UserWarning, match=next(iter(before | now))) as warned:
        load_state(build("nuclr", num_samples=PAIRS, **now), tmp_path)
    assert "margin_strategy" not in str(warned[0].message)


def test_changed_options_give_a_warning(tmp_path):
    save_state(trained(temperature=0.05, gamma=0.8), tmp_path)
    with pytest.warns(UserWarning, match=r"temperature=0.05.*0.1.*gamma=0.8.*0.9") as warned:
        load_state(build("nuclr", num_samples=PAIRS, temperature=0.1, gamma=0.9), tmp_path)
    assert len(warned) == 1 and "\n" not in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_state(build("nuclr", num_samples=PAIRS, gamma=0.1), tmp_path, resumes=False)
        sharded = build("nuclr", num_samples=PAIRS, temperature=0.05, gamma=0.8, state={"sharding": True})
        load_state(sharded, tmp_path)


def test_the_state_of_pairs_in_another_order_is_refused(tmp_path):
    save_state(trained(), tmp_path, {"0 question": "a", "6 question": "b"})
    fresh = build("nuclr", num_samples=PAIRS)
    for pairs in (None, {"0 question": "a", "6 question": "b"}, {"0 question": "a", "3 question": "c", "6 url": "d"}):
        load_state(fresh, tmp_path, pairs)
    with pytest.raises(UserError, match=r"1 of 2 .* pair 6"):
        load_state(fresh, tmp_path, {"0 question": "a", "6 question": "c"})


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="checkpoint-1"):
        save_state(trained(), tmp_path / "file" / "checkpoint-1")


def on_two(one: str, two: str) -> None:
    """Load sharded state, change it, save it, and fail on one of the processes."""
    dist.init_process_group("gloo")
    objective = build("sogclr", num_samples=11, state={"sharding": True})
    load_state(objective, one)
    first = dist.get_rank() == 0
    assert objective.log_u_x.tolist() == list(range(6) if first else range(6, 11))
    objective.log_u_x += 1
    save_state(objective, two)
    with pytest.raises(UserError) as raised:
        load_state(objective, one if first else f"{two}/missing")
    assert ("process 1 failed" in str(raised.value)) == first
    dist.destroy_process_group()


def test_sharded_state_on_two_processes(tmp_path):
    whole = build("sogclr", num_samples=11)
    whole.log_u_x.copy_(torch.arange(11))
    save_state(whole, tmp_path / "one")
    forks.call(on_two, [tmp_path / "one", tmp_path / "two"], 2)
    load_state(whole, tmp_path / "two")
    assert torch.equal(whole.log_u_x, torch.arange(1.0, 12.0))
