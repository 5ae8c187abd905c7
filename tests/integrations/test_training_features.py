"""What people use around a loss: adapters, prompts, several data sets, accumulation; real packages, small models."""

import copy

import pytest
import torch

pytest.importorskip("sentence_transformers")

from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CoSENTLoss, MultipleNegativesRankingLoss

from nuclr.integrations.sentence_transformers import NuclrLoss, NuclrTrainer, add_index
from tests.integrations.common import assert_equal, result_of
from tests.integrations.st_worker import NUCLR, PAIRS, make_trainer, pairs, save_model

SAVE = {"save_strategy": "steps", "save_steps": 4}
LEARNT = NUCLR | {"temperatures": {"learnt": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A small BERT with dropout."""
    return save_model(tmp_path_factory.mktemp("model"), dropout=0.2)


def adapted(model: str, settings: dict, out):
    """Build a trainer whose model has a LoRA adapter."""
    peft = pytest.importorskip("peft")
    trainer = make_trainer(model, out, settings)
    torch.manual_seed(0)
    trainer.model.add_adapter(peft.LoraConfig(r=2, lora_dropout=0.2, target_modules=["query", "value"]))
    return NuclrTrainer(model=trainer.model, args=trainer.args, train_dataset=trainer.train_dataset, loss=trainer.loss)


@pytest.mark.parametrize("loss", ["NuclrLoss", "CachedNuclrLoss"])
def test_lora_trains_the_adapter_alone_and_resumes_bit_for_bit(loss, model, tmp_path):
    settings = {"loss": loss, "options": LEARNT, "args": SAVE | {"optim": "adamw_torch", "learning_rate": 1e-2}}
    whole = adapted(model, settings, tmp_path / "whole")
    before = copy.deepcopy(whole.model.state_dict())
    whole.train()
    moved = {name for name, value in whole.model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved and all("lora_" in name for name in moved)
    result = result_of(whole.model, whole.loss.objective)
    assert result["objective.log_scale"] != build_scale(whole)
    resumed = adapted(model, settings, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert_equal(result_of(resumed.model, resumed.loss.objective), result)


def build_scale(trainer):
    return -torch.tensor(trainer.loss.objective.temperature).log()


def test_lora_saved(model, tmp_path):
    trainer = adapted(model, {"args": {"max_steps": 3}}, tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    again = SentenceTransformer(str(tmp_path / "final"), device="cpu", local_files_only=True)
    import numpy as np

    np.testing.assert_allclose(again.encode(["a red house"]), trainer.model.encode(["a red house"]), atol=1e-6)


def test_prompts(model, tmp_path):
    prompts = {"anchor": "a new ", "positive": "the old "}
    trainer = make_trainer(model, tmp_path / "a", {"args": {"prompts": prompts, "max_steps": 4}})
    trainer.train()
    plain = make_trainer(model, tmp_path / "b", {"args": {"max_steps": 4}})
    written = plain.train_dataset.map(lambda row: {name: prompts[name] + row[name] for name in prompts})
    plain = NuclrTrainer(model=plain.model, args=plain.args, train_dataset=written, loss=plain.loss)
    plain.train()
    assert_equal(result_of(trainer.model, trainer.loss.objective), result_of(plain.model, plain.loss.objective))


@pytest.mark.parametrize("loss", ["NuclrLoss", "CachedNuclrLoss"])
def test_prompts_not_pooled(loss, model, tmp_path):
    prompts = {"anchor": "a new ", "positive": "the old "}
    trainer = make_trainer(model, tmp_path / "a", {"loss": loss, "args": {"prompts": prompts, "max_steps": 4}})
    trainer.model.set_pooling_include_prompt(False)
    trainer.train()


@pytest.mark.parametrize("sampler", ["proportional", "round_robin"])
def test_data_sets_with_one_loss(sampler, model, tmp_path):
    data = add_index(DatasetDict({"a": pairs().select(range(24)), "b": pairs().select(range(24, 48))}))
    made = make_trainer(model, tmp_path, {"args": SAVE | {"multi_dataset_batch_sampler": sampler}})

    def run(out, resume=None):
        trainer = make_trainer(
            model, tmp_path / out, {"args": SAVE | {"multi_dataset_batch_sampler": sampler}, "options": LEARNT}
        )
        trainer = NuclrTrainer(
            model=trainer.model,
            args=trainer.args,
            train_dataset=data,
            loss=trainer.loss,
            eval_dataset={"a": data["a"], "b": pairs().select(range(8))},
        )
        trainer.train(resume_from_checkpoint=resume)
        before = result_of(trainer.model, trainer.loss.objective)
        trainer.evaluate()
        assert_equal(result_of(trainer.model, trainer.loss.objective), before)
        return before

    whole = run("whole")
    assert (whole["objective.log_u_x"] > -torch.inf).all()
    assert_equal(run("resumed", str(tmp_path / "whole" / "checkpoint-4")), whole)


def test_data_sets_with_losses_of_other_kinds(model, tmp_path):
    base = make_trainer(model, tmp_path, {"args": SAVE})
    encoder = base.model
    scored = Dataset.from_dict(
        {
            "sentence1": pairs()["anchor"][:],
            "sentence2": pairs()["positive"][:],
            "score": [i / PAIRS for i in range(PAIRS)],
        }
    )
    data = {"pairs": add_index(pairs()), "plain": pairs().select(range(16)), "scored": scored}
    losses = {
        "pairs": NuclrLoss(encoder, num_samples=PAIRS, **NUCLR),
        "plain": MultipleNegativesRankingLoss(encoder),
        "scored": CoSENTLoss(encoder),
    }
    trainer = NuclrTrainer(model=encoder, args=base.args, train_dataset=data, loss=losses)
    trainer.train()
    assert (losses["pairs"].objective.log_u_x > -torch.inf).all()


def test_prompts_per_dataset(model, tmp_path):
    data = add_index(DatasetDict({"a": pairs().select(range(24)), "b": pairs().select(range(24, 48))}))
    base = make_trainer(model, tmp_path, {"args": {"prompts": {"a": {"anchor": "a new "}, "b": {"anchor": "an old "}}}})
    trainer = NuclrTrainer(model=base.model, args=base.args, train_dataset=data, loss=base.loss)
    trainer.train()


def test_accumulate(model, tmp_path):
    trainer = make_trainer(model, tmp_path, {"args": {"gradient_accumulation_steps": 2, "max_steps": 1}})
    seen = []
    trainer.loss.objective.register_forward_hook(
        lambda module, inputs, out: seen.append((module.log_u_x > -torch.inf).sum().item())
    )
    trainer.train()
    print(seen, trainer.state.global_step)
    assert seen == [8, 16]
