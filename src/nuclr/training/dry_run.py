"""`--dry-run`: build everything, read one batch, take two steps, estimate the cost of the run, leave nothing behind."""

import resource
import sys
import time
from typing import Any

import torch

from nuclr.data import epoch_order, steps_per_epoch
from nuclr.data.pairs import SIDES, Side
from nuclr.runs import components
from nuclr.runs.features import autocast
from nuclr.runs.launch import pick_device, processes
from nuclr.runs.settings import Settings
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
        first = order[: settings.data.batch_size]
        batch = next(inputs.load(loader, first, settings.data.batch_size, epoch=0, step=0))
        reading = time.perf_counter() - begin
        step = 0.0
        for _ in range(2):  # the first step includes one-time set-up
            begin = time.perf_counter()
            x, y = inputs.prepare(batch, 0, 0, device)
            with autocast(device, settings.precision):
                features_x, features_y = model(x, y)
            loss = apply_objective(objective, features_x, features_y, batch, settings.data.mask).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            loss.detach().item()
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
            "left_over_per_epoch": len(order) - steps * settings.data.batch_size,
            "parameters": sum(p.numel() for p in model.parameters()),
            "loss": float(loss.detach()),
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
    return (
        f"{estimate['pairs']:,} pairs ({estimate['bad_samples']} bad), {estimate['parameters']:,} parameters, "
        f"{estimate['steps']:,} steps; {estimate['left_over_per_epoch']} samples left over per epoch\n"
        f"{views if max(estimate['views'].values()) > 1 else ''}"
        f"memory: model {estimate['bytes_model'] / MB:,.0f} MB, "
        f"gradients and AdamW {estimate['bytes_optimizer'] / MB:,.0f} MB, "
        f"objective state {estimate['bytes_objective'] / MB:,.1f} MB, "
        f"peak so far {estimate['bytes_peak'] / MB:,.0f} MB; "
        f"a checkpoint takes {estimate['bytes_checkpoint'] / MB:,.0f} MB on disk\n"
        f"time: about {estimate['seconds_step']:.3f} s per step, {minutes:,.1f} min in total without evaluation; "
        f"loss of the batch {estimate['loss']:.4f}"
    )
