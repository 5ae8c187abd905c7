"""Train a small model with open_clip's own `main`, on one process or under torchrun, and save weights and state.

    torchrun --nproc_per_node 2 -m tests.integrations.open_clip_worker FOLDER CASE...

It also runs a script that imports open_clip: ``python -m tests.integrations.open_clip_worker SCRIPT.py ARGUMENTS``.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    import tests.integrations.conftest  # noqa: F401  torchvision needs the operators that it defines

import open_clip
import open_clip_train.main as training
from safetensors.torch import save_file
from torch.utils.data import DataLoader, DistributedSampler

from nuclr import distributed
from nuclr.integrations.open_clip import TrainOneEpoch
from tests import process_group
from tests.integrations.common import assert_equal, result_of

MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "patch_size": 16, "head_width": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
BATCH = 16

CASES: dict[str, dict[str, Any]] = {
    "nuclr": {},
    "learnt": {"options": {"temperatures": {"learnt": True}}},
}


def register_model(folder: Path) -> None:
    """Make the small model known to open_clip under the name "tiny"."""
    if not (folder / "tiny.json").exists():  # the test has written it before it starts two processes
        (folder / "tiny.json").write_text(json.dumps(MODEL))
    open_clip.add_model_config(folder / "tiny.json")


def get_data(args: Any, *others: Any, **options: Any) -> dict[str, Any]:
    """Return open_clip's data, but on one process also in the order of a `DistributedSampler`.

    That order depends on the seed and the epoch only. A global batch then has the same pairs on any number of
    processes, and a resumed run sees the batches of the run that was not interrupted.
    """
    data = original_get_data(args, *others, **options)
    if not args.distributed and args.dataset_type == "csv":
        loader = data["train"].dataloader
        sampler = DistributedSampler(loader.dataset, num_replicas=1, rank=0)
        ordered = DataLoader(loader.dataset, args.batch_size, sampler=sampler, drop_last=True)
        ordered.num_samples, ordered.num_batches = loader.num_samples, len(ordered)
        data["train"] = type(data["train"])(ordered, sampler)
    return data


original_get_data = training.get_data


class ProcessDDP(torch.nn.parallel.DistributedDataParallel):
    """DDP that takes open_clip's `device_ids` on a CPU, where they must be None."""

    def __init__(self, module: torch.nn.Module, device_ids: object = None, **options: Any) -> None:
        del device_ids
        super().__init__(module, **options)


def train(
    folder: Path,
    name: str,
    options: dict[str, Any] | None = None,
    epochs: int = 2,
    arguments: tuple[str, ...] = (),
    task: TrainOneEpoch | None = None,
) -> dict[str, torch.Tensor]:
    """Train on FOLDER/pairs.tsv and return weights and state."""
    size = BATCH // int(os.environ.get("WORLD_SIZE", "1"))
    command = ["--model", "tiny", "--train-data", f"{folder}/pairs.tsv", "--dataset-type", "csv", "--name", name]
    command += ["--logs", f"{folder}/logs", "--batch-size", f"{size}"]
    command += ["--epochs", f"{epochs}", "--workers", "0", "--device", "cpu", "--precision", "fp32", "--warmup", "0"]
    # A large eps makes AdamW insensitive to rounding where gradients are almost zero.
    command += ["--lr", "0.01", "--wd", "0.1", "--eps", "0.01", "--log-every-n-steps", "100"]
    command += ["--aug-cfg", "scale=(1.0, 1.0)"]  # whole pictures, so that random numbers do not matter
    task = task or TrainOneEpoch("nuclr", temperature=0.05, **(options or {}))
    before = training.train_one_epoch, training.get_data
    training.train_one_epoch, training.get_data = task, get_data
    try:
        assert training.main([*command, *arguments]) is None
    finally:
        training.train_one_epoch, training.get_data = before
    checkpoint = torch.load(folder / "logs" / name / "checkpoints" / f"epoch_{epochs}.pt", weights_only=True)
    weights = {f"model.{key.removeprefix('module.')}": value for key, value in checkpoint["state_dict"].items()}
    return weights | result_of(torch.nn.Module(), task.objective)


if __name__ == "__main__":
    if sys.argv[1].endswith(".py"):
        register_model(Path.cwd())
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    folder = Path(sys.argv[1])
    register_model(folder)
    torch.nn.parallel.DistributedDataParallel = ProcessDDP
    for case in sys.argv[2:]:
        found = train(folder, f"two_{case}", **CASES[case])
        torch.distributed.init_process_group = lambda **_: None  # the next run uses the same group
        if case == "learnt":  # resumed after the first epoch: exactly what was trained without a break
            resume = ("--resume", f"{folder}/logs/two_{case}/checkpoints/epoch_1.pt")
            assert_equal(train(folder, f"two_{case}_again", **CASES[case], arguments=resume), found)
        if distributed.rank() == 0:
            save_file(found, folder / f"{case}.safetensors")
    process_group.leave()
