"""The Lightning callback: real Trainers on one and two processes, kills, and comparison with hand-written loops."""

import json
import re

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

lightning = pytest.importorskip("lightning")

from nuclr.errors import UserError  # noqa: E402
from nuclr.integrations.lightning import NuclrCallback  # noqa: E402
from nuclr.objectives import build  # noqa: E402
from tests.integrations import lightning_worker as worker  # noqa: E402
from tests.integrations.common import EXAMPLES, assert_equal, launch, marked_lines, result_of  # noqa: E402

EXAMPLE = "lightning_train.py"
MODULE = ("-m", "tests.integrations.lightning_worker")
LEARNT = {"temperatures": {"learnt": True}}
NETWORKS = {"popularity": "network", "normalizer": "network"}
STEPS_PER_EPOCH = worker.PAIRS // worker.BATCH


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where Lightning would put its logs
    yield
    torch.use_deterministic_algorithms(False)


def by_hand(objective="nuclr", options=None, epochs=3, accumulate=1):
    """Train without Lightning: the loop that the callback must reproduce."""
    lightning.seed_everything(0, verbose=False)
    pairs, _ = worker.pairs()
    contrast = build(objective, num_samples=len(pairs), temperature=0.1, **(options or {}))
    module = worker.Module()
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
    return result_of(module, contrast)


# One process


@pytest.mark.parametrize(
    ("objective", "options"), [("nuclr", {}), ("sogclr", LEARNT), ("nuclr", NETWORKS), ("clip", {})]
)
def test_training_equals_a_loop_by_hand(objective, options):
    result = worker.run(objective, options)
    assert_equal(by_hand(objective, options), result["values"])
    if options == LEARNT:
        assert result["callback"].objective.current_temperature != pytest.approx(0.1, rel=1e-3)


def test_accumulation_is_a_mean_over_batches_and_adds_no_negatives():
    result = worker.run(batch=worker.BATCH // 2, accumulate_grad_batches=2)["values"]
    assert_equal(by_hand(accumulate=2), result, 1e-6)
    large = worker.run()["values"]
    assert (large["model.x.0.weight"] - result["model.x.0.weight"]).abs().max() > 1e-3


def test_micro_batches_equal_the_full_batch_and_need_manual_optimization():
    full, small = worker.run("sogclr", LEARNT), worker.run("sogclr", LEARNT, micro_batch=5)
    assert_equal(full["values"], small["values"], 1e-6)
    mined = [worker.run(micro_batch=size, setup=lambda module: setattr(module, "mined", True)) for size in (None, 5)]
    assert_equal(mined[0]["values"], mined[1]["values"], 1e-6)
    assert (mined[0]["values"]["model.x.0.weight"] - worker.run()["values"]["model.x.0.weight"]).abs().max() > 1e-4
    with pytest.raises(UserError, match="automatic_optimization"):
        worker.run(micro_batch=5, setup=lambda module: setattr(module, "automatic_optimization", True))


def test_validation_and_the_sanity_check_leave_the_state_alone():
    plain = worker.run(validate=False)
    result = worker.run(validate=True, num_sanity_val_steps=2, val_check_interval=2)
    assert_equal(plain["values"], result["values"])
    result["trainer"].validate(result["module"], DataLoader(worker.pairs()[1], batch_size=20), verbose=False)
    assert_equal(result["values"], result_of(result["module"], result["callback"].objective))


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"precision": "bf16-mixed"}, torch.float32),
        ({"precision": "bf16-mixed", "micro_batch": 5}, torch.float32),
        ({"precision": "64-true"}, torch.float64),
    ],
)
def test_half_and_double_precision(options, dtype):
    values = worker.run(epochs=1, **options)["values"]
    assert values["objective.zeta_x"].dtype == values["model.x.0.weight"].dtype == dtype
    assert values["objective.zeta_x"].isfinite().all()


# Resume


@pytest.mark.parametrize("step", [2 * STEPS_PER_EPOCH, STEPS_PER_EPOCH + 2], ids=["between epochs", "within an epoch"])
@pytest.mark.parametrize(
    ("objective", "options"), [("nuclr", {"zeta_momentum": 0.9}), ("sogclr", LEARNT), ("nuclr", NETWORKS)]
)
def test_resumed_equals_uninterrupted(tmp_path, objective, options, step):
    whole = worker.run(objective, options, folder=tmp_path)
    resumed = worker.run(objective, options, resume=tmp_path / f"{step}.ckpt")
    assert resumed["seen"] == whole["seen"][step:]
    assert_equal(whole["values"], resumed["values"])


def test_checkpoints_hold_the_state_once_and_the_module_loads_without_it(tmp_path):
    result = worker.run("sogclr", LEARNT, folder=tmp_path, epochs=1)
    checkpoint = torch.load(tmp_path / f"{STEPS_PER_EPOCH}.ckpt", weights_only=True)
    assert not any("nuclr" in name for name in checkpoint["state_dict"])
    assert not any("nuclr" in name for name, _ in result["module"].named_parameters())
    saved = checkpoint[result["callback"].state_key]["state"]
    module = worker.Module.load_from_checkpoint(tmp_path / f"{STEPS_PER_EPOCH}.ckpt")
    values = {f"model.{name}": value for name, value in module.state_dict().items()}
    assert_equal(result["values"], values | {f"objective.{name}": value for name, value in saved.items()})


def test_a_checkpoint_without_state_is_refused(tmp_path):
    worker.run(folder=tmp_path, epochs=1)
    path = tmp_path / f"{STEPS_PER_EPOCH}.ckpt"
    with pytest.raises(UserError, match=r"NUCLR.*SogCLR"):
        worker.run("sogclr", resume=path)
    checkpoint = torch.load(path, weights_only=True)
    torch.save({key: value for key, value in checkpoint.items() if not key.startswith("NuclrCallback")}, path)
    with pytest.raises(UserError, match=r"NUCLR.*NuclrCallback"):
        worker.run(resume=path)
    worker.run("clip", resume=path, epochs=1)  # has no state


# Two processes

JOBS = {
    "nuclr": {},
    "learnt temperature": {"objective": "sogclr", "options": LEARNT},
    "networks": {"objective": "nuclr", "options": NETWORKS},
    "sharded": {"options": {"state": {"sharding": True}}, "folder": "sharded"},
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
    launch(*MODULE, folder / "jobs.json", cwd=folder)
    return folder


@pytest.mark.parametrize("name", JOBS)
def test_two_processes_equal_one(on_two, name):
    job = {key: value for key, value in JOBS[name].items() if key not in ("folder", "micro_batch")}
    one, two = worker.run(**job), torch.load(on_two / f"{name}.pt", weights_only=True)
    results = [one["values"], two["values"]]
    if name == "networks":  # their prototypes are in the order of the global batch
        results = [{key: value for key, value in values.items() if "model." in key} for values in results]
    assert_equal(*results, 1e-10 if name == "double precision" else 1e-6)
    torch.testing.assert_close(two["loss"], one["loss"], rtol=1e-5, atol=0)


def test_a_sharded_checkpoint_of_two_processes_resumes_on_one(on_two):
    resumed = worker.run(resume=on_two / "sharded" / f"{2 * STEPS_PER_EPOCH}.ckpt")
    assert_equal(worker.run()["values"], resumed["values"], 1e-6)


# Wrong use


def fit(module, *callbacks):
    pairs, held_out = worker.pairs()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(pairs, batch_size=16), DataLoader(held_out, batch_size=20))


def test_a_batch_without_index_and_an_index_out_of_range():
    class NoIndex(worker.Module):
        def training_step(self, batch, _):
            return self.trainer.nuclr(*self(*batch[:2])).loss

    with pytest.raises(ValueError, match="index"):
        fit(NoIndex(), NuclrCallback("nuclr", num_samples=96))
    with pytest.raises(ValueError, match=re.escape("[0, 50)")):
        fit(worker.Module(), NuclrCallback("nuclr", num_samples=50))
    with pytest.raises(UserError, match="Trainer"):
        NuclrCallback("clip")(torch.eye(2), torch.eye(2))


def test_an_objective_inside_the_module():
    callback = NuclrCallback("nuclr", num_samples=96)
    module = worker.Module()
    module.contrast = callback.objective
    with pytest.raises(UserError, match=r"self\.contrast"):
        fit(module, callback)


def test_parameters_without_an_optimizer():
    class Groups(worker.Module):
        more = False

        def configure_optimizers(self):
            extra = [{"params": self.trainer.nuclr.parameters(), "weight_decay": 0.0}] if self.more else []
            return torch.optim.AdamW([{"params": self.x.parameters()}, {"params": self.y.parameters()}, *extra], 1e-2)

    callback = NuclrCallback("sogclr", num_samples=96, temperatures={"learnt": True}, temperature=0.1)
    with pytest.raises(UserError, match=r"log_scale.*configure_optimizers"):
        fit(Groups(), callback)
    module = Groups()
    module.more = True
    fit(module, callback)
    assert callback.objective.current_temperature != pytest.approx(0.1, rel=1e-3)


def test_two_callbacks():
    first, second = (NuclrCallback("sogclr", num_samples=96) for _ in range(2))
    with pytest.raises(UserError, match="'nuclr'"):
        fit(worker.Module(), first, second)

    class Both(worker.Module):
        def training_step(self, batch, _):
            x, y, index = batch
            x, y = self(x, y)
            return self.trainer.nuclr(x, y, index).loss + self.trainer.other(y, x, index).loss

    other = NuclrCallback("clip", learn_temperature=True, attribute="other")
    fit(Both(), NuclrCallback("sogclr", num_samples=96, temperatures={"learnt": True}), other)
    assert other.objective.current_temperature != other.objective.temperature


# The example


def test_the_example_runs_and_differs_from_a_plain_script_in_five_lines(tmp_path):
    printed = launch(EXAMPLES / EXAMPLE, "--epochs", 3, cwd=tmp_path)
    assert float(printed.split("recall@1 ")[1].split("%")[0]) > 50
    assert 0 < marked_lines(EXAMPLE, "# added", "  # was: ") <= 5
