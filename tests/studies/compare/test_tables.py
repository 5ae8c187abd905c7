"""Tables of known numbers."""

import csv

import numpy as np
import pytest

from nuclr.studies.compare import tables
from nuclr.studies.compare.statistics import interval
from tests.report import folders


def content(low: float, high: float) -> dict:
    """Return a comparison of two methods whose difference has this interval."""
    comparison = folders.comparison()
    (difference,) = comparison["differences"]
    difference |= interval((low + high) / 2, np.array([low, high])) | {"low": low, "high": high}
    return comparison


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.5, 2.0, ["+1.25", "[+0.50, +2.00]", "better"]),
        (-2.0, -0.5, ["-1.25", "[-2.00, -0.50]", "worse"]),
        (-0.5, 2.0, ["+0.75", "[-0.50, +2.00]", "no significant difference"]),
        (-2.0, 0.5, ["-0.75", "[-2.00, +0.50]", "no significant difference"]),
    ],
)
def test_the_verdict_follows_from_the_interval(low, high, expected):
    comparison = content(low, high)
    for page in (tables.markdown(comparison), tables.terminal(comparison)):
        (line,) = (line for line in page.splitlines() if line.startswith("| NUCLR - SogCLR"))
        assert [cell.strip() for cell in line.strip("|").split("|")] == ["NUCLR - SogCLR", "val", *expected]


def test_csv_has_the_values_of_every_seed():
    lines = list(csv.DictReader(tables.comma_separated(content(0.5, 2.0)).splitlines()))
    (line,) = (one for one in lines if (one["row"], one["metric"]) == ("nuclr", "mean_R@1"))
    assert (line["set"], line["mean"], line["std"]) == ("val", "21.2500", "0.5000")
    assert (line["seed_0"], line["seed_1"]) == ("20.7500", "21.7500")
    assert "corrected_train_mean_R@1" in {one["metric"] for one in lines}


def test_names_that_a_spreadsheet_would_run_are_escaped():
    comparison = content(0.5, 2.0)
    comparison["rows"]["=1+1"] = comparison["rows"].pop("nuclr")
    lines = list(csv.DictReader(tables.comma_separated(comparison).splitlines()))
    assert {line["row"] for line in lines} == {"'=1+1", "sogclr"}
    assert all(np.isfinite(float(line["mean"])) for line in lines)


def test_the_terminal_names_what_limits_the_comparison():
    comparison = content(0.5, 2.0)
    assert "Settings were tuned on the same held-out data" in tables.terminal(comparison)
    assert "hardly above chance" not in tables.terminal(comparison)
    assert "hardly above chance" in tables.terminal(comparison | {"chance": 60.0})
    comparison["sets"][0]["main"] = False
    assert "Settings were tuned" not in tables.terminal(comparison)
