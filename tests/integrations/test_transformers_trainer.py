"""The Trainer of transformers with objectives of this package, on one process and on two."""

import json
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file
from torch.nn.functional import normalize
from transformers import (
    BertConfig,
    BertModel,
    CLIPModel,
    SiglipConfig,
    SiglipModel,
    Trainer,
    TrainingArguments,
)

from nuclr.errors import UserError
from nuclr.integrations import STATE_FILE
from nuclr.integrations.transformers import NuclrTrainer, NuclrTrainerMixin, add_index, embeddings
from nuclr.objectives import build
from tests.integrations.clip_data import save_clip, write_pairs
from tests.integrations.common import EXAMPLES, assert_equal, launch, marked_lines, result_of
from tests.integrations.transformers_worker import CASES, PAIRS, identified, pairs, train, trainer

EXAMPLE = "transformers_trainer.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of a small CLIPModel."""
    return save_clip(tmp_path_factory.mktemp("model"), ["a b c d e f g h"])


@pytest.fixture(scope="module")
def one_process(model, tmp_path_factory):
    """Return a function that trains a case on this process, once."""
    trained = {}

    def run(case):
        if case not in trained:
            trained[case] = train(model, tmp_path_factory.mktemp(case), **CASES[case])[1]
        return trained[case]

    return run


def test_two_processes_train_the_weights_of_one(model, one_process, tmp_path):
    launch("-m", "tests.integrations.transformers_worker", model, tmp_path, *CASES, processes=2)
    for case in CASES:
        assert_equal(load_file(tmp_path / f"{case}.safetensors"), one_process(case), tolerance=1e-6, state=1)
    assert_equal(one_process("micro_batch"), one_process("nuclr"), tolerance=1e-6, state=1)


def test_accumulated_batches_are_averaged(model, one_process, tmp_path):
    """The same steps in a plain loop: the mean over three batches, AdamW with the Trainer's schedule and clipping."""
    made = trainer(model, tmp_path, **CASES["accumulated"])
    order = [made.get_train_dataloader() for _ in range(2)]
    module = CLIPModel.from_pretrained(model).double()
    objective = build("nuclr", num_samples=PAIRS, temperature=0.05).double()
    decay = [p for name, p in module.named_parameters() if name != "logit_scale"]
    optimizer = torch.optim.AdamW(decay, lr=1e-2, weight_decay=0.0)
    for epoch, loader in enumerate(order):
        loader.set_epoch(epoch)
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - epoch / 2)  # linear, one step per epoch
        for batch in loader:
            columns = {name: batch.pop(name) for name in ("index", "x_id")}
            outputs = module(**batch)
            x, y = (normalize(side, dim=1) for side in (outputs.image_embeds, outputs.text_embeds))
            (objective(x, y, **columns).loss / 3).backward()
        torch.nn.utils.clip_grad_norm_(decay, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(one_process("accumulated"), result_of(module, objective), tolerance=1e-9, state=1)


def test_resumed_equals_uninterrupted(model, tmp_path):
    """From a checkpoint in the middle of the second epoch, with a learnt temperature and its moments in AdamW."""
    settings = CASES["resumed"]
    whole, expected = train(model, tmp_path, **settings)
    checkpoint = tmp_path / "checkpoint-4"
    assert (checkpoint / STATE_FILE).is_file() and (tmp_path / "checkpoint-6").is_dir()
    resumed, found = train(model, tmp_path, resume=checkpoint, **settings)
    assert_equal(found, expected)
    assert whole.objective.current_temperature != pytest.approx(0.05, rel=1e-3)
    moments = [run.optimizer.state_dict()["state"].values() for run in (whole, resumed)]
    for one, other in zip(*moments, strict=True):
        assert_equal(one, other)
    (checkpoint / STATE_FILE).unlink()
    with pytest.raises(UserError, match=STATE_FILE):
        train(model, tmp_path, resume=checkpoint, **settings)
    # A saved model has the temperature of the objective.
    whole.save_model(str(tmp_path / "saved"))
    saved = CLIPModel.from_pretrained(tmp_path / "saved")
    assert saved.logit_scale.exp().item() == pytest.approx(1 / whole.objective.current_temperature)


def test_pairs_in_another_order_are_refused(model, tmp_path):
    datasets = pytest.importorskip("datasets")
    samples = pairs()
    captions = datasets.Dataset.from_dict({"row": range(PAIRS), "caption": [f"picture {i}" for i in range(PAIRS)]})

    def make(dataset):
        return trainer(
            model,
            tmp_path,
            args={"remove_unused_columns": False, "save_strategy": "steps", "save_steps": 2, "max_steps": 2},
            train_dataset=dataset,
            data_collator=lambda rows: torch.utils.data.default_collate([samples[row["row"]] for row in rows]),
        )

    make(add_index(captions)).train()
    with pytest.raises(UserError, match=r"4[0-9] of 48"):
        make(add_index(captions.shuffle(seed=0))).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_evaluation_leaves_state_and_training_alone(model, one_process, tmp_path):
    predictions = []

    def metrics(prediction):
        predictions.append(prediction.predictions)
        return {"pairs": len(prediction.predictions[0])}

    arguments = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "logging_strategy": "epoch"}
    held_out = [dict(pair, index=10**9) for pair in pairs(9)]
    evaluated, result = train(model, tmp_path, args=arguments, eval_dataset=held_out, compute_metrics=metrics)
    assert_equal(result, one_process("nuclr"))
    assert any({"loss", "objective_x", "objective_y"} <= entry.keys() for entry in evaluated.state.log_history)
    found = evaluated.evaluate()
    assert_equal(result_of(evaluated.model, evaluated.objective), result)
    assert found["eval_loss"] > 0 and found["eval_pairs"] == 9
    x, y = predictions[-1]
    assert x.shape == y.shape == (9, 8)
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, rtol=1e-6)


def test_columns_reach_the_objective_through_a_collator_that_drops_them(model, tmp_path):
    datasets = pytest.importorskip("datasets")
    table = {"tokens": [[2, 5, 6, 3]] * 8, "caption": list("ababcdef"), "unused": list(range(8))}
    data = add_index(datasets.Dataset.from_dict(table), y_id="caption")
    assert data["index"][:] == list(range(8)) and data["y_id"][0] == data["y_id"][2] != data["y_id"][1]

    def collate(samples):
        assert not any("index" in sample or "unused" in sample for sample in samples)
        pictures = torch.randn(len(samples), 3, 32, 32, dtype=torch.float64)
        tokens = torch.tensor([sample["input_ids"] for sample in samples])
        return {"pixel_values": pictures, "input_ids": tokens, "return_loss": True}

    data = data.rename_column("tokens", "input_ids")
    run = trainer(model, tmp_path, train_dataset=data, data_collator=collate, args={"per_device_train_batch_size": 8})
    batch = next(iter(run.get_train_dataloader()))
    assert sorted(batch) == ["index", "input_ids", "pixel_values", "return_loss", "y_id"]
    assert batch["index"].sort().values.tolist() == list(range(8)) and batch["y_id"].dtype == torch.int64
    run.train()
    assert run.objective.log_u_x[:8].isfinite().all() and not run.objective.log_u_x[8:].isfinite().any()


def test_siglip_models_and_a_function_that_encodes(model, tmp_path):
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = SiglipConfig(
        text_config=tower | {"vocab_size": 20}, vision_config=tower | {"image_size": 32, "patch_size": 16}
    )
    siglip = SiglipModel(config).double()
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=16, max_steps=2, use_cpu=True, report_to=[], save_strategy="no"
    )
    run = NuclrTrainer(siglip, args, train_dataset=identified(), objective="sogclr")
    bias = siglip.logit_bias.item()
    run.train()
    assert run.objective.num_samples == PAIRS and siglip.logit_bias.item() == bias

    def encode(module, inputs):
        outputs = module(**inputs)
        return outputs.vision_model_output.pooler_output, outputs.text_model_output.pooler_output

    assert trainer(model, tmp_path, encode=encode).train().training_loss > 0


def test_a_function_that_encodes_hard_negatives_too(model, tmp_path):
    def encode(module, inputs):
        x, y = embeddings(module, inputs)
        return x, y, torch.stack([y.flip(dims=[1]), y.roll(1, dims=1)], dim=1)

    _, full = train(model, tmp_path / "full", encode=encode)
    _, small = train(model, tmp_path / "small", encode=encode, micro_batch=3)
    assert_equal(full, small, tolerance=1e-6, state=1)
    _, without = train(model, tmp_path / "without", encode=embeddings)
    assert not torch.allclose(without["objective.log_u_x"], full["objective.log_u_x"])


def test_the_mixin_works_with_a_trainer_of_the_users(model, tmp_path):
    class Ours(Trainer):
        def compute_loss(self, *args, **kwargs):
            raise AssertionError

    class Both(NuclrTrainerMixin, Ours):
        pass

    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=16, max_steps=1, use_cpu=True, report_to=[])
    given = {"args": args, "train_dataset": identified(), "objective": "nuclr"}
    Both(CLIPModel.from_pretrained(model).double(), **given).train()
    with pytest.raises(UserError, match="compute_loss_func"):
        Both(CLIPModel.from_pretrained(model), **given, compute_loss_func=lambda *_: 0)


# -- wrong input ------------------------------------------------------------------------------------------------------


def test_a_missing_index_and_one_out_of_range(model, tmp_path):
    with pytest.raises(UserError, match=r"'index'.*add_index"):
        trainer(model, tmp_path, train_dataset=pairs()).train()
    trainer(model, tmp_path, name="clip", train_dataset=pairs(), args={"max_steps": 1}).train()  # needs none
    data = [dict(pair, index=number + 1) for number, pair in enumerate(pairs())]
    with pytest.raises(ValueError, match=r"index .*\[0, 48\).* 48"):
        trainer(model, tmp_path, train_dataset=data).train()


def test_a_model_without_two_embeddings(tmp_path):
    config = BertConfig(vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, use_cpu=True, report_to=[])
    data = [{"input_ids": torch.tensor([2, 5, 3]), "index": number} for number in range(8)]
    run = NuclrTrainer(BertModel(config), args, train_dataset=data, objective="nuclr")
    with pytest.raises(UserError, match=r"BertModel.* last_hidden_state, pooler_output; .*encode="):
        run.train()


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("micro_batch", [None, 4])
def test_a_last_batch_of_one_pair_contributes_nothing(model, tmp_path, micro_batch, hard):
    def encode(module, inputs):
        x, y = embeddings(module, inputs)
        return (x, y, y.flip(dims=[1])[:, None]) if hard else (x, y)

    settings = {"train_dataset": identified(33), "micro_batch": micro_batch, "args": {"num_train_epochs": 1}}
    run, result = train(model, tmp_path, encode=encode, **settings)
    assert run.objective.log_u_x.isfinite().sum() == 32
    assert all(value.isfinite().all() for name, value in result.items() if name.startswith("model."))


def test_data_sets_that_cannot_have_an_index():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"index": [0, 1], "caption": ["a", "b"]})
    with pytest.raises(ValueError, match="'index'"):
        add_index(table)
    with pytest.raises(UserError, match=r"x_id='image'.* caption"):
        add_index(table.remove_columns("index"), x_id="image")
    with pytest.raises(UserError, match="IterableDataset"):
        add_index(table.to_iterable_dataset())
    with pytest.raises(UserError, match="'index'"):
        add_index([{"caption": "a"}])


def test_an_optimizer_of_the_users_gets_the_parameters_of_the_objective(model, tmp_path):
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    run, _ = train(model, tmp_path, **CASES["learnt"], optimizers=(optimizer, None))
    assert run.objective.current_temperature != pytest.approx(0.05, rel=1e-6)


# -- example ----------------------------------------------------------------------------------------------------------


def test_the_example_trains_resumes_and_differs_in_five_lines_from_a_plain_script(tmp_path):
    listed = write_pairs(tmp_path, 96)
    captions = [json.loads(line)["caption"] for line in listed.read_text().splitlines()]
    folder, out = save_clip(tmp_path / "clip", captions, width=32), tmp_path / "out"
    launch(EXAMPLES / EXAMPLE, folder, listed, out, cwd=tmp_path)
    assert load_file(out / "checkpoint-9" / STATE_FILE)["log_u_x"].isfinite().all()
    weights = load_file(out / "model.safetensors")
    shutil.rmtree(out / "checkpoint-9")  # as if it had been killed
    (out / "model.safetensors").unlink()
    launch(EXAMPLES / EXAMPLE, folder, listed, out, cwd=tmp_path)
    assert_equal(load_file(out / "model.safetensors"), weights)
    assert marked_lines(EXAMPLE, "# nuclr") <= 5
