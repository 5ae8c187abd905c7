"""The Lightning callback: real Trainers on one and two processes, kills, and comparison with hand-written loops."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

lightning = pytest.importorskip("lightning")

from nuclr.errors import UserError  # noqa: E402
from nuclr.integrations.lightning import NuclrCallback  # noqa: E402
from nuclr.objectives import build  # noqa: E402
from tests.integrations import lightning_worker as worker  # noqa: E402

ROOT = Path(__file__).parents[2]
LEARNT = {"learn_temperature": True}
NETWORKS = {"popularity": "network", "normalizer": "network"}
STEPS_PER_EPOCH = worker.PAIRS // worker.BATCH


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where Lightning would put its logs
    yield
    torch.use_deterministic_algorithms(False)


def assert_equal(one, two, tolerance=0.0):
    assert one.keys() == two.keys() and one
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=tolerance, atol=tolerance, equal_nan=True, msg=name)


def by_hand(objective="nuclr", options=None, epochs=3, accumulate=1):
    """Train without Lightning: the loop that the callback must reproduce."""
    lightning.seed_everything(0, verbose=False)
    pairs, _ = worker.pairs(None)
    contrast = build(objective, num_samples=len(pairs), temperature=0.1, **(options or {}))
    module = worker.Module((12, 10))
    optimizer = torch.optim.AdamW([*module.parameters(), *contrast.parameters()], lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    sampler = DistributedSampler(pairs, 1, 0, seed=3)
    loader = DataLoader(pairs, batch_size=worker.BATCH // accumulate, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for number, (x, y, index) in enumerate(loader):
            (contrast(*module(x, y), index).loss / accumulate).backward()
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    return module.state_dict(), contrast.state_dict()


# One process


@pytest.mark.parametrize(
    ("objective", "options"), [("nuclr", {}), ("sogclr", LEARNT), ("nuclr", NETWORKS), ("clip", {})]
)
def test_training_equals_a_loop_by_hand(objective, options):
    result = worker.run(objective, options)
    weights, state = by_hand(objective, options)
    assert_equal(weights, result["weights"])
    if state:
        assert_equal(state, result["state"])
    if options == LEARNT:
        assert result["callback"].objective.current_temperature != pytest.approx(0.1, rel=1e-3)


def test_accumulation_is_a_mean_over_batches_and_adds_no_negatives():
    result = worker.run(batch=worker.BATCH // 2, accumulate_grad_batches=2)
    weights, state = by_hand(accumulate=2)
    assert_equal(weights, result["weights"], 1e-6)
    assert_equal(state, result["state"], 1e-5)
    large = worker.run()
    assert (large["weights"]["x.0.weight"] - weights["x.0.weight"]).abs().max() > 1e-3


def test_micro_batches_equal_the_full_batch():
    full, small = worker.run("sogclr", LEARNT), worker.run("sogclr", LEARNT, micro_batch=5)
    assert_equal(full["weights"], small["weights"], 1e-6)
    assert_equal(full["state"], small["state"], 1e-5)


def test_micro_batches_need_manual_optimization():
    with pytest.raises(UserError, match=r"trainer.nuclr.backward needs manual optimization"):
        worker.run(micro_batch=5, setup=lambda module: setattr(module, "automatic_optimization", True))


def test_validation_and_the_sanity_check_leave_the_state_alone():
    plain = worker.run(validate=False)
    result = worker.run(validate=True, num_sanity_val_steps=2, val_check_interval=2)
    assert_equal(plain["weights"], result["weights"])
    assert_equal(plain["state"], result["state"])
    before = {name: tensor.clone() for name, tensor in result["state"].items()}
    _, held_out = worker.pairs(None)
    loader = DataLoader(held_out, batch_size=20)
    result["trainer"].validate(result["module"], loader, verbose=False)
    assert_equal(before, result["callback"].objective.state_dict())


def test_half_and_double_precision():
    result = worker.run("sogclr", LEARNT, precision="bf16-mixed", epochs=1)
    assert result["state"]["log_u_x"].dtype == torch.float32 and result["state"]["log_u_x"].isfinite().all()
    result = worker.run(precision="bf16-mixed", epochs=1, micro_batch=5)
    assert result["state"]["zeta_x"].dtype == torch.float32 and result["state"]["zeta_x"].isfinite().all()
    result = worker.run(precision="64-true", epochs=1)
    assert result["state"]["zeta_x"].dtype == result["weights"]["x.0.weight"].dtype == torch.float64


# Resume


@pytest.mark.parametrize("step", [2 * STEPS_PER_EPOCH, STEPS_PER_EPOCH + 2], ids=["between epochs", "within an epoch"])
@pytest.mark.parametrize(("objective", "options"), [("nuclr", {"zeta_momentum": 0.9}), ("sogclr", LEARNT)])
def test_resumed_equals_uninterrupted(tmp_path, objective, options, step):
    whole = worker.run(objective, options, folder=tmp_path)
    resumed = worker.run(objective, options, resume=tmp_path / f"{step}.ckpt")
    assert resumed["seen"] == whole["seen"][step:]
    assert_equal(whole["weights"], resumed["weights"])
    assert_equal(whole["state"], resumed["state"])


def test_networks_resume(tmp_path):
    whole = worker.run("nuclr", NETWORKS, folder=tmp_path)
    resumed = worker.run("nuclr", NETWORKS, resume=tmp_path / f"{STEPS_PER_EPOCH + 2}.ckpt")
    assert_equal(whole["weights"], resumed["weights"])
    assert_equal(whole["state"], resumed["state"])


def test_a_killed_run_resumes(tmp_path):
    jobs = tmp_path / "jobs.json"
    jobs.write_text(json.dumps([{"folder": str(tmp_path / "run"), "kill_after": 8, "out": str(tmp_path / "no.pt")}]))
    ended = subprocess.run([sys.executable, worker.__file__, jobs], capture_output=True, text=True, check=False)
    assert ended.returncode == -9, ended.stderr
    last = max((tmp_path / "run").glob("*.ckpt"), key=lambda path: int(path.stem))
    assert last.stem == "8"
    resumed, whole = worker.run(resume=last), worker.run()
    assert_equal(whole["weights"], resumed["weights"])
    assert_equal(whole["state"], resumed["state"])


def test_checkpoints_hold_the_state_once_and_the_module_loads_without_it(tmp_path):
    result = worker.run("sogclr", LEARNT, folder=tmp_path, epochs=1)
    checkpoint = torch.load(tmp_path / f"{STEPS_PER_EPOCH}.ckpt", weights_only=True)
    assert not any("nuclr" in name for name in checkpoint["state_dict"])
    assert not any("nuclr" in name for name, _ in result["module"].named_parameters())
    assert checkpoint[result["callback"].state_key]["objective"] == "SogCLR"
    assert_equal(checkpoint[result["callback"].state_key]["state"], result["state"])
    module = worker.Module.load_from_checkpoint(tmp_path / f"{STEPS_PER_EPOCH}.ckpt", widths=(12, 10))
    assert_equal(result["weights"], module.state_dict())


def test_other_options_on_resume_give_a_warning(tmp_path):
    worker.run("nuclr", folder=tmp_path, epochs=1)
    checkpoint = tmp_path / f"{STEPS_PER_EPOCH}.ckpt"
    with pytest.warns(
        UserWarning, match=r"the checkpoint: saved with gamma=0\.8, but training resumes with gamma=0\.9"
    ):
        worker.run("nuclr", {"gamma": 0.9}, resume=checkpoint, epochs=2)


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    worker.run(folder=tmp_path, epochs=1)
    path = tmp_path / f"{STEPS_PER_EPOCH}.ckpt"
    with pytest.raises(UserError, match="the checkpoint holds the state of NUCLR, but the objective is SogCLR"):
        worker.run("sogclr", resume=path)
    with pytest.raises(UserError, match=r"does not fit the objective: .* build it with num_samples=96"):
        worker.run(options={"num_samples": 50}, resume=path)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint = {key: value for key, value in checkpoint.items() if not key.startswith("NuclrCallback")}
    torch.save(checkpoint, path)
    with pytest.raises(
        UserError, match="the checkpoint has no state of NUCLR: it was saved without this NuclrCallback"
    ):
        worker.run(resume=path)
    worker.run("clip", resume=path, epochs=1)  # has no state


# Two processes

JOBS = {
    "nuclr": {},
    "learnt temperature": {"objective": "sogclr", "options": LEARNT},
    "networks": {"objective": "nuclr", "options": NETWORKS},
    "sharded": {"options": {"state_sharding": True}, "folder": "sharded"},
    "micro-batches": {"micro_batch": 3},
    "double precision": {"precision": "64-true"},
    "clip with a learnt temperature": {"objective": "clip", "options": {"learn_temperature": True}},
}


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """The results of all jobs on two processes, which Lightning starts."""
    folder = tmp_path_factory.mktemp("two")
    jobs = [job | {"devices": 2, "out": str(folder / f"{name}.pt")} for name, job in JOBS.items()]
    for job in jobs:
        if "folder" in job:
            job["folder"] = str(folder / job["folder"])
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, worker.__file__, folder / "jobs.json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.parametrize("name", JOBS)
def test_two_processes_equal_one(on_two, name):
    job = {key: value for key, value in JOBS[name].items() if key not in ("folder", "micro_batch")}
    one, two = worker.run(**job), torch.load(on_two / f"{name}.pt", weights_only=True)
    assert_equal(one["weights"], two["weights"], 1e-10 if name == "double precision" else 1e-6)
    if name != "networks":  # their prototypes are in the order of the global batch
        assert_equal(one["state"], two["state"], 1e-5)
    assert two["metrics"]["val_loss"] == pytest.approx(one["metrics"]["val_loss"], rel=1e-5)


def test_a_sharded_checkpoint_of_two_processes_resumes_on_one(on_two):
    whole = worker.run()
    resumed = worker.run(resume=on_two / "sharded" / f"{2 * STEPS_PER_EPOCH}.ckpt")
    assert_equal(whole["weights"], resumed["weights"], 1e-6)
    assert_equal(whole["state"], resumed["state"], 1e-5)


# Wrong use


def fit(module, *callbacks):
    pairs, held_out = worker.pairs(None)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(pairs, batch_size=16), DataLoader(held_out, batch_size=20))


class Wrong(worker.Module):
    def __init__(self):
        super().__init__((12, 10))


def test_a_batch_without_index():
    class NoIndex(Wrong):
        def training_step(self, batch, _):
            return self.trainer.nuclr(*self(*batch[:2])).loss

    with pytest.raises(ValueError, match="index is None, but training needs the indices of the pairs"):
        fit(NoIndex(), NuclrCallback("nuclr", num_samples=96))


def test_an_index_out_of_range():
    with pytest.raises(ValueError, match=re.escape("index must be in [0, 50), but holds ")):
        fit(Wrong(), NuclrCallback("nuclr", num_samples=50))


def test_an_objective_inside_the_module():
    callback = NuclrCallback("nuclr", num_samples=96)
    module = Wrong()
    module.contrast = callback.objective
    with pytest.raises(UserError, match=r"submodule of the LightningModule \(self.contrast\), so DDP would broadcast"):
        fit(module, callback)


def test_parameters_without_an_optimizer():
    class Groups(Wrong):
        more = False

        def configure_optimizers(self):
            extra = [{"params": self.trainer.nuclr.parameters(), "weight_decay": 0.0}] if self.more else []
            return torch.optim.AdamW([{"params": self.x.parameters()}, {"params": self.y.parameters()}, *extra], 1e-2)

    callback = NuclrCallback("sogclr", num_samples=96, learn_temperature=True, temperature=0.1)
    with pytest.raises(UserError, match=r"in no optimizer \(log_scale\); in configure_optimizers, use self.parameters"):
        fit(Groups(), callback)
    module = Groups()
    module.more = True
    fit(module, callback)
    assert callback.objective.current_temperature != pytest.approx(0.1, rel=1e-3)


def test_two_callbacks():
    first, second = (NuclrCallback("sogclr", num_samples=96) for _ in range(2))
    with pytest.raises(UserError, match="Trainer has an attribute 'nuclr' already"):
        fit(Wrong(), first, second)
    with pytest.raises(UserError, match="Trainer has an attribute 'strategy' already"):
        fit(Wrong(), NuclrCallback("sogclr", num_samples=96, attribute="strategy"))

    class Both(Wrong):
        def training_step(self, batch, _):
            x, y, index = batch
            x, y = self(x, y)
            return self.trainer.nuclr(x, y, index).loss + self.trainer.other(y, x, index).loss

    other = NuclrCallback("clip", learn_temperature=True, attribute="other")
    fit(Both(), NuclrCallback("sogclr", num_samples=96, learn_temperature=True), other)
    assert other.objective.current_temperature != other.objective.temperature


def test_wrong_arguments():
    with pytest.raises(ValueError, match="needs the number of pairs"):
        NuclrCallback("nuclr")
    with pytest.raises(ValueError, match="options temperature need the name of an objective"):
        NuclrCallback(build("clip"), temperature=0.1)
    with pytest.raises(UserError, match="the objective has no Trainer"):
        NuclrCallback("clip")(torch.eye(2), torch.eye(2))


# The example


def test_the_example_differs_from_a_plain_script_in_five_lines(tmp_path):
    example = ROOT / "examples" / "lightning_train.py"
    lines = example.read_text().splitlines()
    changed = [line for line in lines if line.endswith("# added") or "  # was: " in line]
    assert len(changed) <= 5
    assert all("nuclr" not in line.lower() for line in lines[lines.index("import argparse") :] if line not in changed)
    plain = []
    for line in lines:
        if "  # was: " in line:
            plain.append(line[: len(line) - len(line.lstrip())] + line.split("  # was: ")[1])
        elif not line.endswith("# added"):
            plain.append(line)
    (tmp_path / "plain.py").write_text("\n".join(plain))
    for script in (example, tmp_path / "plain.py"):
        command = [sys.executable, script, "--epochs", "3"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert float(ended.stdout.split("recall@1 ")[1].split("%")[0]) > 50
