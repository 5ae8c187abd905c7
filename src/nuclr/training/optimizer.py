"""AdamW, with weight decay on the weights that multiply, and on nothing else."""

from torch import nn
from torch.optim import AdamW

from nuclr.errors import UserError


def parameter_groups(model: nn.Module, objective: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: matrices and kernels of the model; then its norms and biases, and what the objective learns."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    learnt = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in wanted if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in wanted if p.ndim < 2] + learnt, "weight_decay": 0.0},
    ]
    if not (wanted or learnt):
        raise UserError("nothing to train: both towers are frozen and have no heads; unfreeze one or give it a head")
    return [group for group in groups if group["params"]]


def make_optimizer(
    model: nn.Module,
    objective: nn.Module,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> AdamW:
    """The optimizer of a run; the schedule sets its learning rate before each step."""
    return AdamW(parameter_groups(model, objective, weight_decay), lr=lr, betas=betas, eps=eps, fused=True)
