"""Train a small CLIPModel with the Trainer, on one process or under torchrun, and save weights and state.

    torchrun --nproc_per_node 2 -m tests.integrations.transformers_worker MODEL OUT CASE...

The model is float64, so that the order of additions does not show in weights that AdamW has divided by small numbers.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CLIPModel, TrainingArguments

from nuclr import distributed
from nuclr.errors import UserError
from nuclr.integrations.transformers import NuclrTrainer, add_index
from nuclr.objectives import build
from tests import process_group

PAIRS, BATCH = 48, 16

CASES: dict[str, dict[str, Any]] = {
    "nuclr": {},
    "micro_batch": {"micro_batch": 3},
    "accumulated": {"args": {"gradient_accumulation_steps": 3}},
    "learnt": {"objective": {"learn_temperature": True}},
    "checkpointing": {"args": {"gradient_checkpointing": True}},  # DDP then does not look for unused parameters
    "clip": {"name": "clip", "objective": {"learn_temperature": True}},
    "sharded": {"objective": {"state_sharding": True}},
    "resumed": {"objective": {"learn_temperature": True}, "args": {"save_strategy": "steps", "save_steps": 4}},
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
    with_ids = [{**pair, "picture": number - (number % 3 == 2)} for number, pair in enumerate(pairs(n))]
    return add_index(with_ids, x_id="picture")


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


def result(trained: Any) -> dict[str, torch.Tensor]:
    """Return weights and state; the state on process 0 only."""
    weights = {f"model.{name}": tensor for name, tensor in trained.model.state_dict().items()}
    state = {f"objective.{name}": tensor for name, tensor in trained.objective.gather_state_dict().items()}
    return {name: tensor.detach().clone() for name, tensor in (weights | state).items()}


if __name__ == "__main__":
    for case in sys.argv[3:]:
        out = Path(sys.argv[2], case)
        trained = trainer(Path(sys.argv[1]), out, **CASES[case])
        trained.train()
        found = result(trained)
        if case == "resumed":  # from the middle of the second epoch; exactly what was trained without a break
            trained = trainer(Path(sys.argv[1]), out, **CASES[case])
            trained.train(resume_from_checkpoint=str(out / "checkpoint-4"))
            again = result(trained)
            assert again.keys() == found.keys() and all(torch.equal(again[name], found[name]) for name in found)
        if distributed.rank() == 0:
            save_file(found, Path(sys.argv[2], f"{case}.safetensors"))
    try:
        trainer(Path(sys.argv[1]), Path(sys.argv[2]), args={"use_cpu": torch.accelerator.is_available()}).train()
    except UserError as error:
        assert "torch.distributed has 2 processes, but the Trainer uses 1" in str(error), error
    else:
        raise AssertionError("two processes trained without each other")
    del trained
    process_group.leave()
