"""What people use next to a loss: adapters, prompts, several data sets, accumulation; real packages, small models."""

import numpy as np
import pytest
import torch

pytest.importorskip("sentence_transformers")

from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CoSENTLoss, MultipleNegativesRankingLoss
from transformers import CLIPModel

from nuclr.integrations.sentence_transformers import NuclrLoss, NuclrTrainer, add_index
from nuclr.integrations.transformers import NuclrTrainer as TransformersTrainer
from tests.integrations.clip_data import save_clip
from tests.integrations.common import assert_equal, result_of
from tests.integrations.st_worker import NUCLR, PAIRS, make_trainer, pairs, save_model
from tests.integrations.transformers_worker import trainer as make_transformers_trainer

SAVE = {"save_strategy": "steps", "save_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-2}
LEARNT = NUCLR | {"temperatures": {"learnt": True}}
PROMPTS = {"anchor": "a new ", "positive": "the old "}
LOSSES = ("NuclrLoss", "CachedNuclrLoss")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """The folder of a small BERT with dropout."""
    return save_model(tmp_path_factory.mktemp("model"), dropout=0.2)


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    """The folder of a small CLIPModel."""
    return str(save_clip(tmp_path_factory.mktemp("clip"), ["a b c d e f g h"]))


def trainer_of(folder, out, settings, **changes):
    """Return a trainer as `make_trainer` does, with other arguments."""
    made = make_trainer(folder, out, settings)
    names = ("model", "args", "train_dataset", "loss")
    return NuclrTrainer(**({name: getattr(made, name) for name in names} | changes))


def trained(trainer, resume=None):
    """Train, and return weights and state."""
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return result_of(trainer.model, trainer.loss.objective)


# -- adapters ----------------------------------------------------------------------------------------------------------


def with_lora(model, out, settings):
    """Return a trainer of a model with an adapter."""
    peft = pytest.importorskip("peft")
    encoder = SentenceTransformer(model, device="cpu", local_files_only=True)
    torch.manual_seed(0)
    encoder.add_adapter(peft.LoraConfig(r=2, lora_dropout=0.2, target_modules=["query", "value"]))
    loss = make_trainer(model, out, settings).loss
    loss.model = encoder
    return trainer_of(model, out, settings, model=encoder, loss=loss)


@pytest.mark.parametrize("loss", LOSSES)
def test_lora_trains_the_adapter_alone_resumes_bit_for_bit_and_is_saved(loss, model, tmp_path):
    settings = {"loss": loss, "options": LEARNT, "args": SAVE}
    trainer = with_lora(model, tmp_path / "whole", settings)
    before = result_of(trainer.model, trainer.loss.objective)
    whole = trained(trainer)
    moved = {name for name, value in whole.items() if not torch.equal(value, before[name])}
    weights = {name for name in moved if name.startswith("model.")}
    assert weights and all("lora_" in name for name in weights)
    assert {"objective.log_scale", "objective.zeta_y", "objective.log_u_x"} <= moved
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    assert_equal(trained(with_lora(model, tmp_path / "resumed", settings), checkpoint), whole)
    trainer.save_model(str(tmp_path / "final"))
    loaded = SentenceTransformer(str(tmp_path / "final"), device="cpu", local_files_only=True)
    text = ["a red house"]
    np.testing.assert_allclose(loaded.encode(text), trainer.model.encode(text), atol=1e-6)


def test_lora_in_the_trainer_of_transformers(clip, tmp_path):
    peft = pytest.importorskip("peft")
    results = []
    for options in ({}, {"micro_batch": 3}):
        made = make_transformers_trainer(clip, tmp_path)
        torch.manual_seed(0)
        adapted = peft.get_peft_model(
            CLIPModel.from_pretrained(clip).double(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
        ).double()
        arguments = {"args": made.args, "train_dataset": made.train_dataset, "objective": made.objective}
        trainer = TransformersTrainer(adapted, **arguments, **options)
        before = result_of(adapted, made.objective)
        trainer.train()
        results.append(result_of(adapted, made.objective))
        weights = {name for name, value in results[-1].items() if not torch.equal(value, before[name])}
        assert all("lora_" in name for name in weights if name.startswith("model."))
        assert any("lora_" in name for name in weights) and "objective.zeta_x" in weights
    assert_equal(*results, tolerance=1e-6, state=1)
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    merged = adapted.merge_and_unload()
    assert merged.logit_scale.exp().item() == pytest.approx(1 / made.objective.current_temperature)


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_prompts_are_those_of_texts_with_the_prompt_written_out(model, tmp_path):
    prompted = trained(make_trainer(model, tmp_path, {"args": {"prompts": PROMPTS}}))
    written = add_index(pairs()).map(lambda row: {name: prompt + row[name] for name, prompt in PROMPTS.items()})
    assert_equal(prompted, trained(trainer_of(model, tmp_path, {}, train_dataset=written)))


def test_prompts_that_are_not_pooled_reach_the_cached_loss(tmp_path):
    exact = save_model(tmp_path / "model", dropout=0.0)
    results = []
    for loss in LOSSES:
        settings = {"loss": loss, "double": True, "args": {"prompts": PROMPTS}}
        settings["options"] = NUCLR | ({"mini_batch_size": 3} if loss == "CachedNuclrLoss" else {})
        trainer = make_trainer(exact, tmp_path, settings)
        trainer.model.set_pooling_include_prompt(False)
        results.append(trained(trainer))
    assert_equal(*results, tolerance=1e-9)


# -- several data sets -------------------------------------------------------------------------------------------------


def halves():
    return add_index(DatasetDict({"a": pairs().select(range(24)), "b": pairs().select(range(24, PAIRS))}))


@pytest.mark.parametrize("sampler", ["proportional", "round_robin"])
def test_data_sets_share_a_loss(sampler, model, tmp_path):
    prompts = {"a": {"anchor": "a new "}, "b": {"anchor": "an old "}}
    settings = {"options": LEARNT, "args": SAVE | {"multi_dataset_batch_sampler": sampler, "prompts": prompts}}

    def run(out, resume=None):
        held_out = {"a": halves()["a"], "b": pairs().select(range(8))}  # with and without an index
        trainer = trainer_of(model, out, settings, train_dataset=halves(), eval_dataset=held_out)
        result = trained(trainer, resume)
        assert {"eval_a_loss", "eval_b_loss"} <= trainer.evaluate().keys()
        assert_equal(result_of(trainer.model, trainer.loss.objective), result)
        return result

    whole = run(tmp_path / "whole")
    assert (whole["objective.log_u_x"] > -torch.inf).all()
    assert_equal(run(tmp_path / "resumed", tmp_path / "whole" / "checkpoint-4"), whole)


def test_data_sets_may_have_losses_of_sentence_transformers(model, tmp_path):
    texts = pairs()
    scored = {"sentence1": texts["anchor"][:], "sentence2": texts["positive"][:]}
    scored["score"] = [row / PAIRS for row in range(PAIRS)]
    data = {"pairs": add_index(texts), "plain": texts.select(range(16)), "scored": Dataset.from_dict(scored)}
    encoder = SentenceTransformer(model, device="cpu", local_files_only=True)
    losses = {
        "pairs": NuclrLoss(encoder, num_samples=PAIRS, **NUCLR),
        "plain": MultipleNegativesRankingLoss(encoder),
        "scored": CoSENTLoss(encoder),
    }
    trainer_of(model, tmp_path, {}, model=encoder, train_dataset=data, loss=losses).train()
    assert (losses["pairs"].objective.log_u_x > -torch.inf).all()


# -- accumulation ------------------------------------------------------------------------------------------------------


def test_each_accumulated_batch_updates_its_own_pairs_once(model, tmp_path):
    trainer = make_trainer(model, tmp_path, {"args": {"gradient_accumulation_steps": 2, "max_steps": 2}})
    seen = []

    def look(objective, inputs, output):
        seen.append((trainer.state.global_step, int((objective.log_u_x > -torch.inf).sum())))

    trainer.loss.objective.register_forward_hook(look)
    trainer.train()
    assert seen == [(0, 8), (0, 16), (1, 24), (1, 32)]  # optimizer steps, pairs with state
