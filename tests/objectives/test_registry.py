"""The registry has one record per objective, and `build` refuses unknown names and options."""

import inspect

import pytest

from nuclr.objectives import CLIP, NUCLR, StatefulObjective, build, entry, names, options, register, unregister
from nuclr.objectives.registry import COMMON

ROW = {"label": "New", "color": "#123456", "tune": ("lr_factor", (1.0, 3.0))}


class New(CLIP):
    def __init__(self, temperature: float = 0.2, margin: float = 0.0) -> None:
        super().__init__(temperature)
        self.margin = margin


@pytest.fixture
def new():
    yield register("new", New, **ROW)
    unregister("new")


@pytest.mark.parametrize("name", names())
def test_record(name: str) -> None:
    record = entry(name)
    assert record.needs_num_samples == issubclass(record.cls, StatefulObjective)
    key, values = record.tune
    assert key == "lr_factor" or key in record.flat_options
    assert len(values) == 2, "all methods are tuned over grids of the same size"
    assert set(record.compare_to) <= set(names())
    others = [entry(other) for other in names() if other != name]
    assert all(record.color != other.color and record.label != other.label for other in others)
    for changes in record.ablations.values():
        assert all(change.startswith(("objective.", "schedule.")) for change in changes)


@pytest.mark.parametrize("name", names())
def test_options_are_the_constructors_arguments(name: str) -> None:
    parameters = inspect.signature(entry(name).cls).parameters
    assert list(options(name)) == [*(key for key in parameters if key != "num_samples"), *COMMON]
    assert {"temperature", "normalize"} <= options(name).keys()
    objective = build(name, num_samples=5, **options(name))
    assert repr(objective) == repr(build(name, num_samples=5)), "defaults must not change the objective"


def test_a_new_objective_is_built_by_its_name(new) -> None:
    assert names()[-1] == "new" and entry("new") is new
    assert options("new") == {"temperature": 0.2, "margin": 0.0} | COMMON
    objective = build("new", num_samples=7, margin=0.1)
    assert isinstance(objective, New) and objective.margin == 0.1
    with pytest.raises(ValueError, match=r"'newer'.*'new'"):
        build("newer")


def test_registering_the_same_class_again_replaces_its_record(new) -> None:
    again = register("new", New, **(ROW | {"label": "Newer"}))
    assert entry("new") is again and names().count("new") == 1
    imported_twice = type("New", (CLIP,), {"__module__": New.__module__, "__qualname__": New.__qualname__})
    register("new", imported_twice, **ROW)
    assert entry("new").cls is imported_twice


def test_a_name_belongs_to_one_class() -> None:
    with pytest.raises(ValueError, match=r"'nuclr'.*nuclr\.objectives\.nuclr\.NUCLR"):
        register("nuclr", New, **ROW)
    assert entry("nuclr").cls is NUCLR


class WithoutDefault(CLIP):
    def __init__(self, temperature: float, margin: float) -> None:
        super().__init__(temperature)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cls": WithoutDefault}, "WithoutDefault.*'temperature'"),
        ({"tune": ("margn", (1, 2))}, "'margn'.*'margin'"),
        ({"ablations": {"a": {"objective.gamma": 1}}}, "'gamma'.*temperature"),
    ],
)
def test_a_wrong_record_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register("new", **{"cls": New, **ROW, **changes})
    assert "new" not in names()


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("nuclr", "zeta_rl", "nuclr.*'zeta_rl'.*temperature, gamma.*'zeta_lr'"),
        (
            "clip",
            "gamma",
            "clip.*'gamma'.*temperature, learn_temperature, normalize, false_negative_margin, margin_s",
        ),
        ("isogclr", "rho", "rho.*temperatures.rho"),
        ("nuclr", "tau", "tau.*mean 'temperature'"),
        ("nuclr", "zeta0", "zeta0.*mean 'zeta_init'"),
        ("sogclr", "state_sharding", "state_sharding.*state.sharding"),
    ],
)
def test_an_unknown_option_is_refused(name: str, option: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, num_samples=5, **{option: 1.0})


@pytest.mark.parametrize("call", [entry, options, build, unregister])
def test_an_unknown_name_is_refused(call) -> None:
    with pytest.raises(ValueError, match=r"clip.*'nucler'.*'nuclr'"):
        call("nucler")
