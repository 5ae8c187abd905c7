"""`model.matryoshka`: the objective of each width, the runs, their evaluation, and what is refused."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from nuclr import objectives
from nuclr.arrays import shorten
from nuclr.errors import UserError
from nuclr.evaluation import retrieval_metrics
from nuclr.models import DualEncoder
from nuclr.runs import checkpoint, config
from nuclr.runs.components import matryoshka_widths
from nuclr.runs.matryoshka import Matryoshka
from nuclr.runs.run import Run
from nuclr.training.loop import train
from tests import reference
from tests.objectives.comparison import BATCH, SAMPLES, assert_close, batches, call, state_of
from tests.objectives.extensions import NUCLR
from tests.objectives.make import formula, make
from tests.report.folders import fill_page
from tests.training import runs

WIDTHS = [2, 3, 5]
RUN = {"model.matryoshka": "[4,2]"}
IDS = ([0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 3, 3, 0])


def cut(features: np.ndarray, width: int) -> np.ndarray:
    """Return the first coordinates of each row with unit norm, by loops."""
    rows = [[value / sum(v * v for v in row[:width]) ** 0.5 for value in row[:width]] for row in features]
    return np.array(rows)


def add_pulled_back(total: np.ndarray, features: np.ndarray, gradient: np.ndarray, width: int) -> None:
    """Add the gradient with respect to all coordinates, given that of the cut and scaled ones, by loops."""
    if width == features.shape[1]:  # nothing is cut
        total += gradient
        return
    for i, row in enumerate(features):
        norm = sum(v * v for v in row[:width]) ** 0.5
        along = sum(gradient[i, k] * row[k] / norm for k in range(width))
        for k in range(width):
            total[i, k] += (gradient[i, k] - along * row[k] / norm) / norm


@pytest.mark.parametrize("mask", [(None, None), IDS], ids=["no ids", "ids"])
@pytest.mark.parametrize(
    ("name", "options"), [("sogclr", {"temperature": 0.1}), ("nuclr", NUCLR), ("nuclr", NUCLR | {"zeta_momentum": 0.5})]
)
def test_value_gradients_and_state_equal_float64_loops(name, options, mask) -> None:
    objective = Matryoshka(make(name, num_samples=SAMPLES, **options).double(), WIDTHS)
    each = dict(zip(WIDTHS, (*objective.narrower.values(), objective.full), strict=True))
    settings = formula(name, num_samples=SAMPLES, **options)
    states = {width: reference.initial_state(settings) for width in WIDTHS}
    for x, y, index in batches():
        value = 0.0
        gradient_x, gradient_y = np.zeros(x.shape), np.zeros(y.shape)
        for width in WIDTHS:
            short = cut(x.numpy(), width), cut(y.numpy(), width)
            step = reference.step(settings, *short, index, states[width], x_id=mask[0], y_id=mask[1])
            states[width] = step.state
            value += step.value
            add_pulled_back(gradient_x, x.numpy(), step.grad_x, width)
            add_pulled_back(gradient_y, y.numpy(), step.grad_y, width)
        out, *gradients = call(objective, x, y, index, mask)
        assert_close(out.loss.item(), value, "value")
        assert_close(gradients[0], gradient_x, "gradient of x")
        assert_close(gradients[1], gradient_y, "gradient of y")
        for width, state in states.items():
            actual = state_of(each[width])
            for table, expected in state.items():
                assert_close(actual[table], expected, f"{table} of width {width}")


def test_one_width_is_the_objective_itself_and_a_schedule_reaches_all() -> None:
    plain, one = (make("sogclr", num_samples=SAMPLES).double() for _ in range(2))
    widest = Matryoshka(one, [5])
    both = Matryoshka(make("sogclr", num_samples=SAMPLES).double(), [2, 5])
    for x, y, index in batches():
        for own in (plain, widest.full, both.full):
            own.gamma = 0.3
        assert_close(call(widest, x, y, index)[1], call(plain, x, y, index)[1], "gradient")
        call(both, x, y, index)
    assert both.narrower["2"].gamma == 0.3
    assert len(one.log_u_x[~one.log_u_x.isneginf()]) > BATCH


@pytest.mark.parametrize("temperature", [0.001, 1.0])
@pytest.mark.parametrize("name", objectives.names())
def test_everything_is_finite(name, temperature) -> None:
    objective = Matryoshka(make(name, num_samples=SAMPLES, temperature=temperature), WIDTHS)
    for x, y, index in batches():
        out, *gradients = call(objective, x.float(), y.float(), index)
        assert all(values.isfinite().all() for values in (out.loss, *gradients))


def test_the_state_is_loaded_as_it_was_saved() -> None:
    saved, loaded = (Matryoshka(make("nuclr", num_samples=SAMPLES).double(), WIDTHS) for _ in range(2))
    for x, y, index in batches():
        call(saved, x, y, index)
    state = saved.gather_state_dict()
    assert {name for name in state if "." not in name} == set(saved.full.state_dict())
    loaded.load_state_dict(state)
    runs.assert_identical(loaded.gather_state_dict(), state)
    state.pop("narrower.2.log_u_x")
    with pytest.raises(RuntimeError, match=r"narrower\.2\.log_u_x"):
        loaded.load_state_dict(state)


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("matryoshka")
    train(runs.load(path, **RUN, **{"schedule.epochs": 2, "data.x.name": "image", "data.y.name": "text"}), path / "run")
    return path / "run"


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").open()]


def test_a_run_has_the_metrics_of_each_width(trained) -> None:
    run = Run.open(trained)
    assert run.settings.model.matryoshka == [2, 4, 8]
    features = run.features(run.val)
    for width in (2, 4):
        short = shorten(features.x, width), shorten(features.y, width)
        for name, value in retrieval_metrics(*short, features.links, sides=features.sides).items():
            assert run.results.val[f"width={width}/{name}"] == pytest.approx(value), name
    first = lines(trained)[0]
    assert first["train/loss"] == pytest.approx(sum(first[f"train/width={width}/loss"] for width in (2, 4, 8)))
    best = max(line["val/mean_R@1"] for line in lines(trained) if "val/mean_R@1" in line)
    assert run.results.best == best, "that of all coordinates"


def test_training_improves_short_features(tmp_path) -> None:
    results = {}
    for name, changes in (("plain", {}), ("matryoshka", {"model.matryoshka": "[3]"})):
        train(runs.load(tmp_path, **changes), tmp_path / name)
        run = Run.open(tmp_path / name)
        features = run.features(run.val)
        metrics = retrieval_metrics(shorten(features.x, 3), shorten(features.y, 3), features.links)
        results[name] = metrics["mean_R@5"]
    assert results["matryoshka"] > results["plain"] + 0.05


@pytest.mark.parametrize("name", objectives.names())
def test_every_objective_trains(tmp_path, name) -> None:
    changes = [s for s in runs.vector_settings(tmp_path, **RUN, **{"schedule.epochs": 2}) if "objective." not in s]
    settings = config.load(tmp_path / "empty.yaml", [*changes, f"objective.name={name}"])
    results = train(settings, tmp_path / "run")
    assert results.val["width=4/mean_R@10"] > results.val["width=4/mean_chance@10"]


def test_micro_batches_give_the_same_run(tmp_path) -> None:
    for name, size in (("whole", 0), ("micro", 5)):
        train(runs.load(tmp_path, **RUN, **{"data.micro_batch": size, "schedule.epochs": 2}), tmp_path / name)
    runs.assert_close_outcome(tmp_path / "whole", tmp_path / "micro", queries=20)


def test_popularity_is_solved_per_width(tmp_path) -> None:
    changes = RUN | {"schedule.zeta_refresh": 2, "objective.zeta_lr": 0, "schedule.epochs": 2}
    train(runs.load(tmp_path, **changes), tmp_path / "run")
    state = checkpoint.load(checkpoint.newest_first(tmp_path / "run" / "checkpoints")[0]).objective
    tables = [state[f"{begin}zeta_y"] for begin in ("", "narrower.2.", "narrower.4.")]
    assert all(table.std() > 0 and table.mean().abs() < 1e-6 for table in tables)
    assert not torch.equal(tables[0], tables[1])


@pytest.mark.slow
def test_commands_know_the_widths(trained, nuclr, tmp_path) -> None:
    results = Run.open(trained).results.val
    status, printed, err = nuclr("evaluate", trained, "--correct", "bank=train", "--out", tmp_path / "out.json")
    assert status == 0, err
    plain = json.loads((tmp_path / "out.json").read_text())["retrieval"]["val"]
    assert plain["plain"] == pytest.approx(results)
    assert "recall@1, image to text (width=2)" in printed
    status, printed, err = nuclr("evaluate", trained, "--no-head")
    assert (status, "width=" in printed) == (2, False) and "features" in err, "the towers have other widths"
    status, printed, err = nuclr("report", trained)
    assert status == 0, err
    summary = fill_page("training", trained)[1]["summary"]
    [table] = [block for block in summary if getattr(block, "title", "").startswith("Shorter features")]
    assert [row[0] for row in table.rows] == ["all coordinates", "width=2", "width=4"]
    assert table.rows[1][1] == f"{100 * results['width=2/mean_R@1']:.1f} %"


@pytest.mark.slow
def test_methods_are_compared(nuclr, tmp_path) -> None:
    settings = [s for s in runs.vector_settings(tmp_path, **RUN, **{"schedule.epochs": 1}) if "objective." not in s]
    arguments = ["compare", tmp_path / "empty.yaml", "methods=clip,sogclr", "seeds=2", "--temperatures", "0.03"]
    status, printed, err = nuclr(*arguments, "--out", tmp_path / "out", "--workers", "1", *settings)
    assert status == 0, err
    assert "SogCLR - CLIP" in printed and "width=" not in printed


@pytest.mark.parametrize(
    ("widths", "words"),
    [
        ("[4,0]", "model.matryoshka.1 is 0"),
        ("[4,4]", "model.matryoshka is .4, 4.*once"),
        ("64", "model.matryoshka is 64.*list"),
        ("[4,wide]", "model.matryoshka.1 is 'wide'"),
    ],
)
def test_wrong_widths_are_refused(tmp_path, widths, words) -> None:
    with pytest.raises(UserError, match=words):
        runs.load(tmp_path, **{"model.matryoshka": widths})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.matryoshka": "[4,16]"}, "model.matryoshka.*16.*8"),
        (RUN | {"evaluate.head": "false"}, "model.matryoshka.*evaluate.head"),
    ],
)
def test_widths_that_do_not_fit_the_model_are_refused(tmp_path, changes, words) -> None:
    with pytest.raises(UserError, match=words):
        train(runs.load(tmp_path, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_width_is_refused(tmp_path) -> None:
    model = DualEncoder(nn.Linear(12, 8), nn.Linear(8, 8))
    with pytest.raises(UserError, match=r"model\.matryoshka.*not known.*model\.width"):
        matryoshka_widths(runs.load(tmp_path, **RUN), model)


def test_other_widths_are_refused_on_resume(tmp_path, monkeypatch) -> None:
    runs.train_until(monkeypatch, 5, runs.load(tmp_path, **RUN), tmp_path / "run")
    with pytest.raises(UserError, match=r"model\.matryoshka is \[2, 8\].*\[2, 4, 8\]"):
        train(runs.load(tmp_path, **{"model.matryoshka": "[2]"}), tmp_path / "run", resume=True)
