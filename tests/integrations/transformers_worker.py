"""Train a small CLIPModel with the Trainer, on one process or under torchrun, and save weights and state.

    torchrun --nproc_per_node 2 -m tests.integrations.transformers_worker MODEL OUT CASE...

The model is float64, so that the order of additions does not show in weights that AdamW has divided by small numbers.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CLIPModel, TrainingArguments

from nuclr import distributed
from nuclr.errors import UserError
from nuclr.integrations.transformers import NuclrTrainer
from nuclr.objectives import build
from tests import process_group
from tests.integrations.common import assert_equal, result_of

PAIRS, BATCH = 48, 16

CASES: dict[str, dict[str, Any]] = {
    "nuclr": {},
    "micro_batch": {"micro_batch": 3},
    "accumulated": {"args": {"gradient_accumulation_steps": 3}},
    "learnt": {"objective": {"temperatures": {"learnt": True}}},
    "checkpointing": {"args": {"gradient_checkpointing": True}},  # DDP then does not look for unused parameters
    "clip": {"name": "clip", "objective": {"learn_temperature": True}},
    "sharded": {"objective": {"state": {"sharding": True}}},
    "resumed": {
        "objective": {"temperatures": {"learnt": True}},
        "args": {"save_strategy": "steps", "save_steps": 4},
    },
}


def pairs(n: int = PAIRS) -> list[dict[str, torch.Tensor]]:
    """Return n pairs of noise with something in common, as inputs of the model."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(n):
        words = torch.randint(4, 12, (5,), generator=generator)
        picture = torch.randn(3, 32, 32, generator=generator, dtype=torch.float64) + words[0] / 4
        ids = torch.cat([torch.tensor([2]), words, torch.tensor([3])])
        samples.append({"pixel_values": picture, "input_ids": ids, "attention_mask": torch.ones_like(ids)})
        if number % 3 == 2:
            samples[-1]["pixel_values"] = samples[-2]["pixel_values"]  # the same picture with another caption
    return samples


def identified(n: int = PAIRS) -> Any:
    """Return the pairs with index and ids."""
    return [{**pair, "index": number, "x_id": number - (number % 3 == 2)} for number, pair in enumerate(pairs(n))]


def trainer(
    model: Path,
    out: Path,
    name: str = "nuclr",
    objective: dict[str, Any] | None = None,
    args: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return a trainer for two epochs of the pairs in batches of BATCH over all processes."""
    settings = {
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": BATCH // int(os.environ.get("WORLD_SIZE", "1")),
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "seed": 1,
    }
    arguments = TrainingArguments(str(out), **(settings | (args or {})))
    built = build(name, num_samples=PAIRS, temperature=0.05, **(objective or {}))
    return NuclrTrainer(
        CLIPModel.from_pretrained(model).double(),
        arguments,
        **({"train_dataset": identified()} | options),
        objective=built.double(),
    )


def train(*arguments: Any, resume: Path | None = None, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Train, and return the trainer with weights and state."""
    trained = trainer(*arguments, **options)
    trained.train(resume_from_checkpoint=resume and str(resume))
    return trained, result_of(trained.model, trained.objective)


if __name__ == "__main__":
    model, folder = map(Path, sys.argv[1:3])
    for case in sys.argv[3:]:
        found = train(model, folder / case, **CASES[case])[1]
        if case == "resumed":  # from the middle of the second epoch; exactly what was trained without a break
            assert_equal(train(model, folder / case, resume=folder / case / "checkpoint-4", **CASES[case])[1], found)
        if distributed.rank() == 0:
            save_file(found, folder / f"{case}.safetensors")
    with contextlib.suppress(UserError):
        trainer(model, folder, args={"use_cpu": torch.accelerator.is_available()}).train()
        raise AssertionError("two processes trained without each other")
    process_group.leave()
