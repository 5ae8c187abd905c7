"""`--dry-run`: build everything, read one batch, take two steps, estimate the cost of the run, leave nothing behind."""

import math
import resource
import sys
import time
from typing import Any

import torch
from torch import Tensor

from nuclr import distributed
from nuclr.data import epoch_order, steps_per_epoch
from nuclr.data.pairs import SIDES, Side
from nuclr.objectives import ObjectiveOutput
from nuclr.runs import components
from nuclr.runs.features import autocast
from nuclr.runs.launch import pick_device, processes
from nuclr.runs.settings import Settings
from nuclr.training.backward import encode_and_backward
from nuclr.training.batch_inputs import TrainingInputs
from nuclr.training.optimizer import make_optimizer
from nuclr.training.step import apply_objective
from nuclr.training.validation import build_parts

MB = 2**20


def dry_run(settings: Settings) -> dict[str, Any]:
    """Return memory in bytes and time in seconds, measured on the second of two steps; nothing is written."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = pick_device(settings.device)
    with processes(device):
        source, validation, model = build_parts(settings, device)
        model.train()  # as in training: dropout takes memory and time
        pairs = source.pairs
        groups = components.view_groups(settings, source)
        objective = components.make_objective(settings.objective, groups.count if groups else len(pairs)).to(device)
        optimizer = make_optimizer(model, objective, settings.optimizer.lr, settings.optimizer.weight_decay)
        loader = components.make_loader(settings.data, pairs, model, smallest_crop=settings.augment.smallest_crop)
        views: dict[Side, int] = {"x": settings.data.x.views, "y": settings.data.y.views}
        inputs = TrainingInputs(settings.augment, views, pairs, model, settings.seed, groups)
        row = groups.row if groups else None
        order = epoch_order(pairs, settings.seed, 0, settings.data.one_pair_per_x, source.numbers, row)
        steps = steps_per_epoch(order, settings.data.batch_size)
        begin = time.perf_counter()
        b = settings.data.batch_size // distributed.world_size()
        first = order[: settings.data.batch_size]
        batch = next(inputs.load(loader, first, settings.data.batch_size, epoch=0, step=0))
        reading = time.perf_counter() - begin

        def encode(x: Any, y: Any) -> tuple[Tensor, Tensor]:
            with autocast(device, settings.precision):
                return model(x, y)

        def contrast(x: Tensor, y: Tensor) -> ObjectiveOutput:
            return apply_objective(objective, x, y, batch, settings.data.mask)

        step = loss = 0.0
        for _ in range(2):  # the first step includes one-time set-up
            begin = time.perf_counter()
            x, y = inputs.prepare(batch, 0, 0, device)
            optimizer.zero_grad(set_to_none=True)
            out = encode_and_backward(encode, x, y, contrast, len(batch), settings.data.micro_batch)
            optimizer.step()
            loss = out.loss.item()
            step = time.perf_counter() - begin
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        state = sum(table.numel() * table.element_size() for table in objective.buffers())
        return {
            "pairs": len(pairs),
            "views": {getattr(pairs, f"{side}_name"): views[side] for side in SIDES},
            "visits": len(order),
            "bad_samples": len(source.bad),
            "steps": steps * settings.schedule.epochs,
            "micro_batches": math.ceil(b / settings.data.micro_batch) if settings.data.micro_batch else 1,
            "left_over_per_epoch": len(order) - steps * settings.data.batch_size,
            "parameters": sum(p.numel() for p in model.parameters()),
            "loss": loss,
            "bytes_model": weights,
            "bytes_optimizer": 3 * trained,  # gradient and two moments
            "bytes_objective": state,
            "bytes_peak": _peak(device),
            "bytes_checkpoint": weights + 2 * trained + state,
            "seconds_read": reading,
            "seconds_step": step,
            "seconds": steps * settings.schedule.epochs * max(step, reading / settings.data.workers),
            "evaluation_pairs": len(validation.source.numbers) if validation.source else 0,
        }


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def describe(estimate: dict[str, Any]) -> str:
    """Return the estimate as text for a person."""
    minutes = estimate["seconds"] / 60
    several = " and ".join(f"{count} of {name}" for name, count in estimate["views"].items())
    views = f"views: {several} per visit; {estimate['visits']:,} visits per epoch\n"
    micro = f" of {estimate['micro_batches']} micro-batches (data.micro_batch)" if estimate["micro_batches"] > 1 else ""
    return (
        f"{estimate['pairs']:,} pairs ({estimate['bad_samples']} bad), {estimate['parameters']:,} parameters, "
        f"{estimate['steps']:,} steps; {estimate['left_over_per_epoch']} samples left over per epoch\n"
        f"{views if max(estimate['views'].values()) > 1 else ''}"
        f"memory: model {estimate['bytes_model'] / MB:,.0f} MB, "
        f"gradients and AdamW {estimate['bytes_optimizer'] / MB:,.0f} MB, "
        f"objective state {estimate['bytes_objective'] / MB:,.1f} MB, "
        f"peak so far {estimate['bytes_peak'] / MB:,.0f} MB; "
        f"a checkpoint takes {estimate['bytes_checkpoint'] / MB:,.0f} MB on disk\n"
        f"time: about {estimate['seconds_step']:.3f} s per step{micro}, "
        f"{minutes:,.1f} min in total without evaluation; loss of the batch {estimate['loss']:.4f}"
    )
