"""Weight decay applies to matrices only."""

from torch import nn

from nuclr.objectives import build
from nuclr.training.build import parameter_groups


def test_only_trained_matrices_decay():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    objective = build("siglip")
    decaying, others = parameter_groups(model, objective, 0.02)
    assert [p is model[0].weight for p in decaying["params"]] == [True]
    assert decaying["weight_decay"] == 0.02 and others["weight_decay"] == 0
    expected = {id(p) for p in (model[0].bias, *model[1].parameters(), model[2].bias, *objective.parameters())}
    assert {id(p) for p in others["params"]} == expected
