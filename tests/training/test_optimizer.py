"""Weight decay applies to matrices only."""

from torch import nn

from nuclr.objectives import build
from nuclr.runs.settings import Optimizer
from nuclr.training.build import make_optimizer


def test_only_trained_matrices_decay():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    objective = build("siglip")
    decaying, others = make_optimizer(model, objective, Optimizer(weight_decay=0.02)).param_groups
    assert [p is model[0].weight for p in decaying["params"]] == [True]
    assert decaying["weight_decay"] == 0.02 and others["weight_decay"] == 0
    expected = {id(p) for p in (model[0].bias, *model[1].parameters(), model[2].bias, *objective.parameters())}
    assert {id(p) for p in others["params"]} == expected
