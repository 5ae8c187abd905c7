"""Cells and their names, grids, rows, and values of the command line."""

import dataclasses

import pytest

from nuclr.errors import UserError
from nuclr.objectives import CLIP, names, options, register, unregister
from nuclr.runs.components import make_objective
from nuclr.runs.content import content, content_hash
from nuclr.runs.settings import Data, Settings
from nuclr.studies.compare import plan

BASE = Settings(data=Data(train="train.npz", val="val.npz"))
ALL = list(names())


@pytest.mark.parametrize("tune", [[], ["gamma"], ["gamma", "nuclr.zeta_lr=0.003,0.01"], ["lr_factor=1,3"]])
def test_every_method_is_tuned_over_a_grid_of_the_same_size(tune):
    grids = plan.temperature_grids(ALL, plan.TEMPERATURES, tune)
    rows = plan.method_rows(ALL, grids, plan.own_hyperparameters(ALL, tune, BASE), 0, "clip")
    assert {len(row.grid) for row in rows} == {8}
    names = [cell.settings(BASE).name for row in rows for cell in row.grid]
    assert len(set(names)) == 8 * len(ALL)
    for row in rows:
        for cell in row.grid:
            make_objective(cell.settings(BASE).objective, 4)


def test_gamma_is_tuned_only_if_requested_and_then_for_all_methods_that_have_it():
    assert not any(tuned.key == "objective.gamma" for tuned in plan.own_hyperparameters(ALL, [], BASE).values())
    tuned = plan.own_hyperparameters(ALL, ["gamma"], BASE)
    assert tuned["sogclr"] == tuned["nuclr"] == tuned["isogclr"] == plan.Hyperparameter("objective.gamma", (0.3, 0.8))


@pytest.mark.parametrize("zeta_lr", [5e-6, 3e-3])
def test_the_steps_of_zeta_that_are_tried_are_multiples_of_the_configs(zeta_lr):
    base = plan.change(BASE, "objective.zeta_lr", zeta_lr)
    tuned = plan.own_hyperparameters(["sogclr", "nuclr"], [], base)["nuclr"]
    assert tuned.key == "objective.zeta_lr"
    assert tuned.values == (zeta_lr, pytest.approx(10 * zeta_lr, rel=1e-12))
    named = plan.own_hyperparameters(["nuclr"], ["nuclr.zeta_lr=0.01,0.03"], base)["nuclr"]
    assert named.values == (0.01, 0.03)
    assert tuned.values[1] in (5e-5, 3e-2), "rounding must not give the run another name"


def test_siglip_is_tuned_over_initial_scales_of_its_own():
    grids = plan.temperature_grids(ALL, plan.TEMPERATURES, [])
    assert grids["siglip"] == (0.1, 0.05, 0.2, 0.02)
    assert all(grids[method] == plan.TEMPERATURES for method in ALL if method != "siglip")
    assert plan.temperature_grids(["clip", "siglip"], [0.05, 0.07], [])["siglip"] == (0.1, 0.05)
    named = plan.temperature_grids(ALL, [0.01, 0.03], ["siglip.temperature=0.01,0.03", "gamma"])
    assert set(named.values()) == {(0.01, 0.03)}
    (row,) = plan.method_rows(["siglip"], grids, plan.own_hyperparameters(["siglip"], [], BASE), 0, "siglip")
    assert {cell.changes["objective.temperature"] for cell in row.grid} == set(grids["siglip"])


def test_a_name_depends_on_everything_that_decides_the_result_and_on_nothing_else():
    cell = plan.Cell("nuclr", "nuclr", {"objective.temperature": 0.03})
    name = cell.settings(BASE).name
    elsewhere = dataclasses.replace(BASE, name="other", threads=4, data=dataclasses.replace(BASE.data, root="/x"))
    assert cell.settings(elsewhere).name == name
    longer = plan.change(BASE, "schedule.epochs", 11)
    assert cell.settings(longer).name != name
    assert dataclasses.replace(cell, seed=1).settings(BASE).name != name
    assert content(Settings()) == {}  # a setting added by a later version must not change any name
    explicit = plan.change(BASE, "objective.gamma", options("nuclr")["gamma"])
    assert content_hash(explicit) == content_hash(BASE)


def test_ablations_that_equal_the_base_settings_are_left_out():
    compared = ["sogclr", "nuclr"]
    tuned = plan.own_hyperparameters(compared, [], BASE)
    methods = plan.method_rows(compared, plan.temperature_grids(compared, [0.03], []), tuned, 0, "sogclr")
    rows = plan.ablation_rows(methods, plan.change(BASE, "objective.gamma", 0.3))
    labels = {row.name for row in rows}
    assert {"zeta fixed", "no xi (zeta in its place)", "zeta_init -0.05", "gamma 0.8"} <= labels
    assert not {"zeta_init 0", "xi_rule norm", "gamma 0.3", "no freezing"} & labels
    assert {row.name: row.to for row in rows}["sogclr"] == ("nuclr",)
    frozen = plan.change(BASE, "schedule.zeta_frozen_epochs", 2)
    assert "no freezing" in [row.name for row in plan.ablation_rows(methods, frozen)]


class OwnObjective(CLIP):
    """An objective that is not part of the package."""

    def __init__(self, temperature: float = 0.05, sharpness: float = 1.0) -> None:
        super().__init__(temperature)
        self.sharpness = sharpness


def test_a_registered_objective_has_a_grid_comparisons_and_ablations():
    register(
        "own", OwnObjective, label="Own", color="#112233", tune=("sharpness", (1.0, 2.0)), compare_to=("siglip",),
        ablations={"blunt": {"objective.sharpness": 0.5}},
    )  # fmt: skip
    try:
        methods = plan.parse_methods("clip,siglip,own")
        tuned = plan.own_hyperparameters(methods, [], BASE)
        rows = plan.method_rows(methods, plan.temperature_grids(methods, [0.03], []), tuned, 0, "clip")
        own = rows[-1]
        assert (own.label, own.to) == ("Own", ("clip", "siglip"))
        assert [cell.changes["objective.sharpness"] for cell in own.grid] == [1.0, 2.0]
        assert "own" in plan.ablated()
        assert "blunt" in [row.name for row in plan.ablation_rows(rows, BASE)]
    finally:
        unregister("own")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan.parse_methods("clip,sigclip"), "'sigclip' is unknown; did you mean siglip"),
        (lambda: plan.parse_methods("clip,clip"), "twice"),
        (lambda: plan.parse_seeds("0"), "seeds=0"),
        (lambda: plan.parse_seeds("many"), "seeds=many"),
        (lambda: plan.parse_temperatures("0.01,warm"), "'warm' is not a number"),
        (lambda: plan.parse_temperatures("0"), "above 0"),
        (lambda: plan.own_hyperparameters(["clip"], ["gamma"], BASE), "none of clip"),
        (lambda: plan.own_hyperparameters(ALL, ["gamma=0.1,0.2,0.3"], BASE), "different sizes"),
        (
            lambda: plan.own_hyperparameters(["nuclr"], [], plan.change(BASE, "objective.zeta_lr", 0.0)),
            "objective.zeta_lr is 0.*--tune nuclr.zeta_lr=V1,V2",
        ),
        (lambda: plan.temperature_grids(ALL, [0.01, 0.02, 0.03, 0.05, 0.07], []), "different sizes.*siglip 4"),
        (lambda: plan.temperature_grids(ALL, [0.01], ["temperature=0.1"]), "name one of the methods"),
        (lambda: plan.temperature_grids(ALL, [0.01], ["siglip.temperature=0"]), "above 0"),
        (lambda: plan.parse_sizes("16,x", 100), "whole numbers"),
        (lambda: plan.parse_sizes("1000", 100), "2 to 100"),
        (lambda: plan.ablation_rows((), BASE), "nuclr"),
    ],
)
def test_wrong_values_are_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()
