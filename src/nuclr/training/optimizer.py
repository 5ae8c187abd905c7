"""AdamW with weight decay on matrices and kernels only."""

from torch import nn
from torch.optim import AdamW

from nuclr.errors import UserError


def parameter_groups(model: nn.Module, objective: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return two groups: matrices and kernels of the model; its norms and biases with the objective's parameters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    learnt = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    if not (trained or learnt):
        raise UserError(
            "nothing to train: model.x.frozen and model.y.frozen are true and both heads are none; "
            "unfreeze one side or give it a head"
        )
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2] + learnt, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(
    model: nn.Module,
    objective: nn.Module,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> AdamW:
    """Return the optimizer of a run; the schedule sets its learning rate before each step."""
    return AdamW(parameter_groups(model, objective, weight_decay), lr=lr, betas=betas, eps=eps, fused=True)
