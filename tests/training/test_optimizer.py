"""Weight decay applies to matrices only; a step is a step of torch's AdamW."""

import torch
from torch import nn

from nuclr.objectives import build
from nuclr.runs.settings import Optimizer
from nuclr.training.build import make_optimizer, parameter_groups


def test_only_trained_matrices_decay():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    objective = build("siglip")
    decaying, others = parameter_groups(model, objective, 0.02)
    assert [p is model[0].weight for p in decaying["params"]] == [True]
    assert decaying["weight_decay"] == 0.02 and others["weight_decay"] == 0
    expected = {id(p) for p in (model[0].bias, *model[1].parameters(), model[2].bias, *objective.parameters())}
    assert {id(p) for p in others["params"]} == expected


def test_one_step_equals_torch_adamw():
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    optimizer = make_optimizer(model, nn.Identity(), Optimizer(lr=0.1, weight_decay=0.02))
    plain = torch.optim.AdamW(
        [{"params": [twin.weight], "weight_decay": 0.02}, {"params": [twin.bias], "weight_decay": 0.0}], lr=0.1
    )
    x = torch.randn(5, 3)
    for module, steps in ((model, optimizer), (twin, plain)):
        module(x).square().sum().backward()
        steps.step()
    torch.testing.assert_close(model.weight, twin.weight)
    torch.testing.assert_close(model.bias, twin.bias)
