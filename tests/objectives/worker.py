"""Run by the processes of test_distributed.py: train small two-tower models, and pass wrong input on one process."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests import process_group
from tests.objectives.make import make

PAIRS, BATCH, STEPS, WIDTH = 41, 12, 5, 6  # four processes hold 11, 11, 11 and 8 rows of sharded state
NUCLR = {"temperature": 0.1, "zeta_lr": 0.05, "zeta_momentum": 0.1}
AUTHORS = NUCLR | {"zeta_lr_ratio_x": 0.5}
CASES: dict[str, tuple[str, dict]] = {
    "clip": ("clip", {}),
    "clip learnt": ("clip", {"learn_temperature": True}),
    "siglip": ("siglip", {}),
    "dcl": ("dcl", {}),
    "cyclip": ("cyclip", {"learn_temperature": True}),
    "sogclr": ("sogclr", {"temperature": 0.1}),
    "isogclr": ("isogclr", {"temperature": 0.03}),
    "nuclr default": ("nuclr", {}),
    "nuclr": ("nuclr", NUCLR),
    "nuclr without xi": ("nuclr", NUCLR | {"use_xi": False}),
    "nuclr paper": ("nuclr", NUCLR | {"zeta_estimator": "paper", "zeta_init": -0.05}),
    "authors": ("nuclr-authors", AUTHORS),
}
VARIANTS = ("outside", "inside", "adamw", "masked", "groups", "float32")

# The extensions: (objective, options, views of x and y), trained in fewer variants.
INDIVIDUAL = {"individual_temperature": True, "tau_lr": 2e-3, "tau_min": 0.001, "tau_max": 1.0}
MARGIN = {"false_negative_margin": 0.02}
ITEMS = {"num_x": 14, "num_y": 17}
NETWORKS = {"temperature": 0.5, "zeta_lr": 0.05, "popularity": "network", "normalizer": "network"}
EXTENSIONS: dict[str, tuple[str, dict, tuple[int | None, int | None]]] = {
    "clip views": ("clip", {"learn_temperature": True}, (2, 3)),
    "siglip views": ("siglip", {}, (None, 2)),
    "dcl views": ("dcl", {}, (2, None)),
    "cyclip views": ("cyclip", {}, (2, 2)),
    "sogclr views": ("sogclr", {"temperature": 0.1}, (2, 3)),
    "sogclr proximal": ("sogclr", {"temperature": 0.1, "gamma_rule": "proximal"}, (None, None)),
    "sogclr learnt": ("sogclr", {"temperature": 0.1, "learn_temperature": True, "rho": 2.0}, (None, None)),
    "sogclr side y": ("sogclr", {"temperature": 0.1, "sides": "y"}, (None, None)),
    "sogclr normalizer network": ("sogclr", {"temperature": 0.5, "normalizer": "network"}, (None, None)),
    "nuclr individual": ("nuclr", NUCLR | INDIVIDUAL, (None, None)),
    "nuclr individual views": ("nuclr", NUCLR | INDIVIDUAL, (3, 2)),
    "nuclr stored views": ("nuclr", NUCLR | {"y_views": 3}, (2, 3)),
    "nuclr learnt views": ("nuclr", NUCLR | {"learn_temperature": True, "rho": 2.0}, (2, None)),
    "nuclr side x": ("nuclr", NUCLR | {"sides": "x"}, (None, None)),
    "clip margin": ("clip", MARGIN, (None, None)),
    "siglip margin": ("siglip", MARGIN, (None, 2)),
    "dcl margin": ("dcl", MARGIN | {"margin_strategy": "relative"}, (None, None)),
    "sogclr margin": ("sogclr", MARGIN | {"margin_strategy": "relative"} | {"temperature": 0.1}, (2, None)),
    "nuclr margin": ("nuclr", NUCLR | MARGIN, (None, None)),
    "nuclr individual margin": ("nuclr", NUCLR | INDIVIDUAL | MARGIN, (None, 2)),
    "clip hard": ("clip", {"hard": 2, "learn_temperature": True}, (2, None)),
    "siglip hard": ("siglip", MARGIN | {"hard": 1}, (None, None)),
    "dcl hard": ("dcl", {"hard": 2}, (None, 2)),
    "cyclip hard": ("cyclip", {"hard": 1}, (None, None)),
    "sogclr hard": ("sogclr", MARGIN | {"hard": 2, "temperature": 0.1}, (2, None)),
    "nuclr hard": ("nuclr", NUCLR | {"hard": 3, "zeta_init": 0.1}, (None, None)),
    "nuclr individual hard": ("nuclr", NUCLR | INDIVIDUAL | {"hard": 2}, (2, 3)),
    "nuclr learnt hard": ("nuclr", NUCLR | {"hard": 2, "learn_temperature": True, "zeta_init": 0.1}, (None, None)),
    "nuclr networks hard": ("nuclr", NETWORKS | {"hard": 1, "learn_temperature": True}, (None, None)),
    "clip log_q": ("clip", {"log_q": True, "learn_temperature": True, "hard": 1}, (None, None)),
    "sogclr items": ("sogclr", ITEMS | {"log_q": True, "temperature": 0.1}, (None, 2)),
    "nuclr items": ("nuclr", NUCLR | ITEMS | {"log_q": True, "hard": 1}, (None, None)),
    "nuclr individual items": ("nuclr", NUCLR | INDIVIDUAL | {"num_y": 17}, (2, None)),
    "authors xi per epoch": ("nuclr-authors", AUTHORS | {"xi_rule": "max", "xi_update": "epoch"}, (None, None)),
    "authors first gradient": ("nuclr-authors", AUTHORS | {"zeta_velocity_init": "gradient"}, (None, None)),
    "nuclr popularity network": ("nuclr", NETWORKS | {"normalizer": "table"}, (None, None)),
    "nuclr networks": ("nuclr", NETWORKS, (None, None)),
    "nuclr networks views": ("nuclr", NETWORKS | {"learn_temperature": True, "rho": 2.0}, (2, 2)),
}
EXTENSION_VARIANTS = ("outside", "inside", "masked", "float32")
# Sharded state: the same objective as the case it is compared with.
SHARDED = {
    "sogclr sharded": "sogclr",
    "isogclr sharded": "isogclr",
    "nuclr sharded": "nuclr",
    "sogclr side y sharded": "sogclr side y",
    "nuclr individual views sharded": "nuclr individual views",
    "nuclr stored views sharded": "nuclr stored views",
    "sogclr items sharded": "sogclr items",
    "nuclr individual items sharded": "nuclr individual items",
    "authors sharded": "authors",
    "authors first gradient sharded": "authors first gradient",
    "authors xi per epoch sharded": "authors xi per epoch",
    "nuclr popularity network sharded": "nuclr popularity network",
}
ALL_CASES = {case: (*settings, (None, None)) for case, settings in CASES.items()} | EXTENSIONS
ALL_CASES |= {
    case: (ALL_CASES[same][0], ALL_CASES[same][1] | {"state_sharding": True}, ALL_CASES[same][2])
    for case, same in SHARDED.items()
}
RUNS = [(case, variant) for case in ALL_CASES for variant in (VARIANTS if case in CASES else EXTENSION_VARIANTS)]
# DDP broadcasts all buffers when it is constructed, so sharded state must stay outside.
RUNS = [(case, variant) for case, variant in RUNS if not (case in SHARDED and variant == "inside")]
RUNS += [("nuclr networks", "no index")]
# On four processes only what depends on their number: where rows are stored, and which columns belong to an anchor.
RUNS_ON_FOUR = [(case, variant) for case, variant in RUNS if variant not in ("inside", "adamw", "groups")]


class Towers(nn.Module):
    """Two linear towers with unit-norm outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = nn.Linear(5, WIDTH), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor, *of_y: Tensor) -> tuple[Tensor, ...]:
        """Return x, y and, if they are given, hard negatives."""
        return tuple(nn.functional.normalize(side, dim=-1) for side in (self.x(x), *map(self.y, of_y)))


class TrainStep(nn.Module):
    """Towers and objective in one module, to wrap both in DDP."""

    def __init__(self, towers: nn.Module, objective: nn.Module) -> None:
        super().__init__()
        self.towers, self.objective = towers, objective

    def forward(self, x: Tensor, y: Tensor, *rest: Tensor | None, hard: Tensor | None = None, **more: Tensor) -> Tensor:
        if hard is None:
            return self.objective(*self.towers(x, y), *rest, **more).loss
        x, y, negatives = self.towers(x, y, hard)
        return self.objective(x, y, *rest, negatives=negatives, **more).loss


def train(name: str, options: dict, views: tuple[int | None, int | None], variant: str) -> dict[str, Tensor]:
    """Return weights, state (the whole state on process 0 only, if it is sharded) and losses."""
    dtype = torch.float32 if variant == "float32" else torch.float64
    options = dict(options)
    negatives = options.pop("hard", None)
    corrects = options.pop("log_q", False)
    torch.manual_seed(0)
    towers, objective = Towers().to(dtype), make(name, num_samples=PAIRS, **options).to(dtype)
    if "network" in options.values():  # DDP and optimizers need networks whose width is known
        objective.eval()(*(torch.eye(2, WIDTH, dtype=dtype),) * 2)
        objective.train()
    torch.manual_seed(1)
    data_x, data_y = (
        torch.randn(PAIRS, *([] if count is None else [count]), width, dtype=dtype)
        for count, width in zip(views, (5, 7), strict=True)
    )
    data_hard = None if negatives is None else torch.randn(PAIRS, negatives, 7, dtype=dtype)
    log_q = torch.arange(1, PAIRS + 1, dtype=dtype).div(PAIRS).log()
    x_id, y_id = torch.arange(PAIRS) // 3, torch.arange(PAIRS) % 17
    if variant == "inside":
        run: nn.Module = DistributedDataParallel(TrainStep(towers, objective), forward_sync_buffers=False)
        parameters = list(run.parameters())
    else:
        wrapped = DistributedDataParallel(towers)
        run = TrainStep(wrapped, objective)
        parameters = [*towers.parameters(), *objective.parameters()]
    kind = torch.optim.AdamW if variant == "adamw" else torch.optim.SGD
    optimizer = kind(parameters, lr=0.01 if variant == "adamw" else 0.1)
    losses = []
    share = BATCH // dist.get_world_size()
    for step in range(STEPS):
        batch = torch.randperm(PAIRS)[:BATCH]  # the same on every process
        mine = batch[dist.get_rank() * share :][:share]
        ids = {"masked": (x_id, y_id), "groups": (torch.stack([x_id, x_id // 4], dim=1), y_id)}.get(variant, ())
        if "num_y" in options and not ids:
            ids = (x_id, y_id)
        index = None if variant == "no index" else mine
        more = {} if data_hard is None else {"hard": data_hard[mine]}
        more |= {"log_q": log_q[mine]} if corrects else {}
        if ids and negatives is not None:
            more["negative_id"] = (mine[:, None] + torch.arange(1, negatives + 1)) % 23  # some are those of a y
        loss = run(data_x[mine], data_y[mine], index, *(id_[mine] for id_ in ids), **more)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step == 2:
            objective.end_epoch()
    state = objective.gather_state_dict() if options.get("state_sharding") else objective.state_dict()
    return {**towers.state_dict(), **state, "losses": torch.stack(losses)}


def refusals() -> dict[str, str]:
    """Pass wrong input on one process; return the message of this process per case."""
    world, rank = dist.get_world_size(), dist.get_rank()
    last = rank == world - 1
    messages = {}

    def attempt(
        case: str,
        rows: int = 3,
        width: int = WIDTH,
        value: float = 1.0,
        options: dict | None = None,
        **settings: float,
    ) -> None:
        objective = make("nuclr", **{"num_samples": PAIRS} | (options or {}))
        for key, setting in settings.items():
            setattr(objective, key, setting)
        x = nn.functional.normalize(torch.randn(rows, width), dim=1) * value
        index = torch.arange(rows) + (0 if case == "repeated" else rank * rows)
        if case == "out of range" and last:
            index[0] = PAIRS
        y = x.tolist() if case == "wrong type" and last else x
        x.requires_grad_(case == "gradient on one" and last)
        try:
            objective(x, y, index)
            messages[case] = "accepted"
        except (TypeError, ValueError) as error:
            messages[case] = f"{type(error).__name__}: {error}"
        assert objective.log_u_x.isneginf().all()

    attempt("unequal batches", rows=2 if last else 3)
    attempt("unequal widths", width=WIDTH + 1 if last else WIDTH)
    attempt("not finite", value=float("nan") if last else 1.0)
    attempt("not unit norm", value=2.0 if last else 1.0)
    attempt("wrong type")
    attempt("repeated")
    attempt("out of range")
    attempt("bad gamma", gamma=2.0 if last else 0.5)
    attempt("gradient on one")
    attempt("other temperature", options={"temperature": 0.07 if last else 0.05})
    attempt("other number", options={"num_samples": PAIRS + last})
    return messages


def untouched_by_ddp() -> dict[str, float]:
    """Return a value that only the last process stores, in a row that no batch visits: DDP must not overwrite it."""
    last = dist.get_rank() == dist.get_world_size() - 1
    marks = {}
    for where in ("outside", "inside"):
        towers, objective = Towers(), make("nuclr", num_samples=PAIRS)
        if where == "inside":
            run: nn.Module = DistributedDataParallel(TrainStep(towers, objective), forward_sync_buffers=False)
        else:
            run = TrainStep(DistributedDataParallel(towers), objective)
        objective.log_u_x[-1] = 7.0 if last else -1.0
        index = torch.arange(3) + 3 * dist.get_rank()
        for _ in range(2):
            run(torch.randn(3, 5), torch.randn(3, 7), index).backward()
        marks[where] = float(objective.log_u_x[-1])
    return marks


def rows_held() -> dict[int, dict[str, list[int]]]:
    """Return the shapes of the sharded tables of this process, also if there are hardly more pairs than processes."""
    held = {}
    for pairs in (PAIRS, 5):
        objective = make("nuclr", num_samples=pairs, state_sharding=True)
        x = nn.functional.normalize(torch.randn(1, WIDTH), dim=1)
        objective(x, x, torch.tensor([dist.get_rank()]))
        whole = objective.gather_state_dict()
        held[pairs] = {
            "local": [len(objective.log_u_x), len(objective.zeta_y)],
            "gathered": [len(whole["log_u_x"]), len(whole["zeta_y"])] if whole else [],
        }
    return held


def main(folder: str) -> None:
    """Write FOLDER/{rank}.pt with the final weights, state and losses, and the messages of refused input."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runs = RUNS_ON_FOUR if dist.get_world_size() == 4 else RUNS
    out = {(case, variant): train(*ALL_CASES[case], variant) for case, variant in runs}
    several = dist.get_world_size() > 1
    results = {
        "trained": out,
        "messages": refusals() if several else {},
        "marks": untouched_by_ddp() if several else {},
        "rows": rows_held() if several else {},
    }
    torch.save(results, Path(folder) / f"{dist.get_rank()}.pt")
    process_group.leave()
