"""Which runs the demo plans."""

from pathlib import Path

import pytest

from nuclr.runs import config
from nuclr.studies.demo import study


def test_methods_share_everything_but_their_objective():
    settings = config.load(overrides=["seed=5"])
    runs = study.planned_runs(settings, Path("demo"))
    assert {method for method, _ in runs} == {"clip", "sogclr", "nuclr"}
    assert {seed for _, seed in runs} == {5, 6, 7}
    for (method, seed), (own, _) in runs.items():
        assert (own.objective.name, own.seed) == (method, seed)
        assert (own.data, own.model, own.optimizer, own.schedule) == (
            settings.data,
            settings.model,
            settings.optimizer,
            settings.schedule,
        )
    assert runs["nuclr", 5][1] == Path("demo")
    others = [path for key, (_, path) in runs.items() if key != ("nuclr", 5)]
    assert len(set(others)) == 8 and {path.parent for path in others} == {Path("demo/seeds")}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (["schedule.epochs=3"], True),
        (["objective.name=clip"], False),
        (["data.val=null"], False),
        (["data.train=pairs.csv"], False),
    ],
)
def test_which_settings_are_the_demo(overrides, expected):
    assert study.is_demo(config.load(overrides=overrides)) is expected


def test_several_processes_train_one_run(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not study.is_demo(config.load())
