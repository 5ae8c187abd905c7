"""Train a small sentence-transformers model: called by test_sentence_transformers.py, or run by torchrun.

Usage: torchrun --nproc_per_node K -m tests.integrations.st_worker MODEL OUT RUNS
RUNS is JSON: name -> keyword arguments of `train`. Process 0 writes weights and state of each run to OUT/NAME.pt.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, TrainerCallback

from nuclr.integrations import sentence_transformers as integration
from nuclr.models import train_tokenizer
from tests import process_group
from tests.integrations.common import result_of

WORDS = ("red", "green", "blue", "old", "new", "small", "large", "round")
THINGS = ("house", "boat", "tree", "river", "bird", "road")
PAIRS = len(WORDS) * len(THINGS)
NUCLR = {"temperature": 0.1, "zeta_lr": 0.02, "zeta_momentum": 0.5}


def pairs() -> Dataset:
    """Return 48 pairs of texts, of which two share an anchor and two a positive."""
    first = [f"a {word} {thing}" for word in WORDS for thing in THINGS]
    second = [f"the {thing} over there is {word}" for word in WORDS for thing in THINGS]
    first[7], second[12] = first[3], second[2]
    return Dataset.from_dict({"anchor": first, "positive": second})


def mined() -> Dataset:
    """Return the pairs with two hard negatives each: other things of the same word, in words of the positives."""
    data = pairs()
    for column, step in (("negative_1", 1), ("negative_2", 3)):
        others = [
            f"the {THINGS[(row + step) % len(THINGS)]} there is {WORDS[row // len(THINGS)]}" for row in range(PAIRS)
        ]
        data = data.add_column(column, others)
    return data


def save_model(folder: Path, dropout: float) -> str:
    """Save a SentenceTransformer with a BERT of two layers and random weights; return its folder."""
    torch.manual_seed(0)
    columns = pairs()
    tokenizer = train_tokenizer([*columns["anchor"], *columns["positive"]], vocabulary=400)
    tokenizer.model_max_length = 32
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    BertModel(config).save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    encoder = Transformer(str(folder / "bert"))
    SentenceTransformer(modules=[encoder, Pooling(32, pooling_mode="mean")]).save_pretrained(str(folder / "model"))
    return str(folder / "model")


def make_trainer(model: str, out: Path, settings: dict[str, Any]) -> Any:
    """Build the trainer; the settings are those of `train`."""
    encoder = SentenceTransformer(model, device="cpu", local_files_only=True)
    if settings.get("double"):
        encoder.double()
    dataset = integration.add_index(mined() if settings.get("mined") else pairs())
    options = {"num_samples": PAIRS} | settings.get("options", NUCLR)
    loss = getattr(integration, settings.get("loss", "NuclrLoss"))(encoder, **options)
    if "widths" in settings:
        loss = MatryoshkaLoss(encoder, loss, settings["widths"], [1.0, 0.5])
    args = SentenceTransformerTrainingArguments(
        output_dir=str(out),
        **{
            "per_device_train_batch_size": 8,
            "learning_rate": 0.1,
            "optim": "sgd",
            "num_train_epochs": 2,
            "lr_scheduler_type": "constant",
            "save_strategy": "no",
            "report_to": "none",
            "logging_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
            "seed": 3,
        }
        | settings.get("args", {}),
    )
    return integration.NuclrTrainer(
        model=encoder,
        args=args,
        train_dataset=dataset,
        eval_dataset=dataset.select(range(20)) if settings.get("evaluate") else None,
        loss=loss,
    )


class Kill(TrainerCallback):
    """End the process without any cleaning up, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(model: str, out: Path, resume: str | None = None, **settings: Any) -> dict[str, torch.Tensor]:
    """Train, and return the weights of the model and the whole state of the objective.

    Settings: `args` of the trainer, `options` of the loss, `loss` by name, `widths` of a MatryoshkaLoss, `evaluate`,
    `mined` for hard negatives, `double` for float64, and `kill`, the step after which the process kills itself.
    """
    trainer = make_trainer(model, out, settings)
    if "kill" in settings:
        trainer.add_callback(Kill(settings["kill"]))
    trainer.train(resume_from_checkpoint=resume)
    if "widths" not in settings:
        return result_of(trainer.model, trainer.loss.objective)
    inner = trainer.loss.loss
    result = result_of(trainer.model, inner.objective)
    for width, objective in inner.narrower.items():
        result |= {f"{width}.{name}": value for name, value in objective.gather_state_dict().items()}
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    for name, settings in json.loads(sys.argv[3]).items():
        result = train(sys.argv[1], folder / name, **settings)
        if int(os.environ.get("RANK", "0")) == 0:
            torch.save(result, folder / f"{name}.pt")
    if dist.is_initialized():
        process_group.leave()
