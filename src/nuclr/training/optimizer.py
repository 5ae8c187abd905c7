"""AdamW with weight decay on matrices and kernels only, and a learning rate of its own for the objective's networks."""

from torch import nn
from torch.optim import AdamW

from nuclr.errors import UserError

NETWORK_LR = 1e-3
LR_FACTOR = "lr_factor"  # key of a parameter group: its learning rate relative to that of the model


def parameter_groups(
    model: nn.Module, objective: nn.Module, weight_decay: float, network_factor: float = 1.0
) -> list[dict[str, object]]:
    """Return the parameters with and without weight decay, and those of the objective's networks.

    Args:
        model: the dual encoder. Its matrices and kernels have weight decay, its norms and biases have none.
        objective: its learnt temperature and the like are treated as the model's biases.
        weight_decay: of the first group.
        network_factor: learning rate of the objective's networks, relative to that of the model.

    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    networks = [parameter for name, parameter in objective.named_parameters() if "_networks." in name]
    learnt = [
        parameter
        for name, parameter in objective.named_parameters()
        if parameter.requires_grad and "_networks." not in name
    ]
    if not (trained or learnt):
        raise UserError(
            "nothing to train: model.x.frozen and model.y.frozen are true and both heads are none; "
            "unfreeze one side or give it a head"
        )
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2] + learnt, "weight_decay": 0.0},
        {"params": networks, "weight_decay": 0.0, LR_FACTOR: network_factor},
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
    """Return the optimizer of a run; the schedule sets its learning rate before each step.

    The objective's networks are trained at most at NETWORK_LR: a learning rate that suits the model, such as 0.1 for a
    bag of words, may be far too large for them.
    """
    groups = parameter_groups(model, objective, weight_decay, min(1.0, NETWORK_LR / lr))
    return AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def clipped_parameters(optimizer: AdamW) -> list[nn.Parameter]:
    """Return the parameters whose common gradient norm is limited: all but those of the objective's networks."""
    return [parameter for group in optimizer.param_groups if LR_FACTOR not in group for parameter in group["params"]]
