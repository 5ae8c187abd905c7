"""What is trained, and under which names."""

import dataclasses

import pytest

from nuclr.errors import UserError
from nuclr.objectives import OBJECTIVES
from nuclr.runs.components import make_objective
from nuclr.runs.settings import Data, Settings
from nuclr.studies.compare import plan, studies

BASE = Settings(data=Data(train="train.npz", val="val.npz"))
ALL = list(OBJECTIVES)


@pytest.mark.parametrize("tune", [[], ["gamma"], ["gamma", "nuclr.zeta_lr=0.003,0.01"], ["lr_factor=1,3"]])
def test_every_method_is_tuned_over_a_grid_of_the_same_size(tune):
    rows = studies.method_rows(ALL, plan.TEMPERATURES, plan.knobs(ALL, tune), 0, "clip")
    assert {len(row.grid) for row in rows} == {8}
    names = [cell.settings(BASE).name for row in rows for cell in row.grid]
    assert len(set(names)) == 8 * len(ALL)
    for row in rows:
        for cell in row.grid:
            make_objective(cell.settings(BASE).objective, 4)


def test_gamma_is_no_knob_unless_asked_for_and_then_the_same_for_all_that_have_it():
    assert not any(knob.key == "objective.gamma" for knob in plan.knobs(ALL, []).values())
    tuned = plan.knobs(ALL, ["gamma"])
    assert tuned["sogclr"] == tuned["nuclr"] == tuned["isogclr"] == plan.Knob("objective.gamma", (0.3, 0.8))


def test_a_name_follows_from_what_decides_the_result_and_nothing_else():
    cell = plan.Cell("nuclr", "nuclr", {"objective.temperature": 0.03})
    name = cell.settings(BASE).name
    elsewhere = dataclasses.replace(BASE, name="other", threads=4, data=dataclasses.replace(BASE.data, root="/x"))
    assert cell.settings(elsewhere).name == name
    longer = plan.change(BASE, "schedule.epochs", 11)
    assert cell.settings(longer).name != name
    assert cell.with_seed(1).settings(BASE).name != name
    assert plan.content(Settings()) == {}  # so that a key which a later version adds changes no name


def test_only_what_differs_from_the_base_is_an_ablation():
    methods = studies.method_rows(["sogclr", "nuclr"], [0.03], plan.knobs(["sogclr", "nuclr"], []), 0, "sogclr")
    names = [row.name for row in studies.ablation_rows(methods, plan.change(BASE, "objective.gamma", 0.3))]
    assert {"zeta fixed", "no xi (zeta in its place)", "zeta_init -0.05", "gamma 0.8"} <= set(names)
    assert not {"zeta_init 0", "xi_rule norm", "gamma 0.3", "no freezing"} & set(names)
    frozen = plan.change(BASE, "schedule.zeta_frozen_epochs", 2)
    assert "no freezing" in [row.name for row in studies.ablation_rows(methods, frozen)]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: plan.parse_methods("clip,sigclip"), "'sigclip' is unknown"),
        (lambda: plan.parse_methods("clip,clip"), "twice"),
        (lambda: plan.parse_seeds("0"), "seeds=0"),
        (lambda: plan.parse_seeds("many"), "seeds=many"),
        (lambda: plan.parse_temperatures("0.01,warm"), "'warm' is no number"),
        (lambda: plan.parse_temperatures("0"), "above 0"),
        (lambda: plan.knobs(["clip"], ["gamma"]), "none of clip"),
        (lambda: plan.knobs(ALL, ["gamma=0.1,0.2,0.3"]), "unequal size"),
        (lambda: studies.parse_sizes("16,x", 100), "whole numbers"),
        (lambda: studies.parse_sizes("1000", 100), "2 to 100"),
        (lambda: studies.ablation_rows((), BASE), "NUCLR"),
    ],
)
def test_what_cannot_be_meant_is_refused(call, told):
    with pytest.raises(UserError, match=told):
        call()
