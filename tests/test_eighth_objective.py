"""CONTRIBUTING's promise: an objective is a file and a row. Every command works with one that nuclr does not know."""

import json
import subprocess
import sys

import pytest
import yaml

from nuclr.objectives import names, unregister
from nuclr.runs import config
from nuclr.studies.engine.tables import read_results
from tests.studies.tiny import write_config

PLUGIN = '''
"""InfoNCE with a margin on the positive score."""

from torch import nn

from nuclr.objectives import AutogradObjective, register


class MarginNCE(AutogradObjective):
    """Cross-entropy of each anchor after `margin` is subtracted from its positive score."""

    def __init__(self, temperature: float = 0.05, margin: float = 0.1, normalize: bool = False) -> None:
        super().__init__(temperature, normalize)
        if not 0 <= margin < 1:
            raise ValueError(f"margin must be in [0, 1), but is {margin}")
        self.margin = margin

    def losses(self, scores):
        sides = []
        for side in (scores.xy, scores.yx):
            logits = side.clone()
            logits[range(len(side)), scores.positives] -= self.margin
            sides.append(nn.functional.cross_entropy(logits / self.temperature, scores.positives, reduction="none") / 2)
        return *sides, {}


register("margin-nce", MarginNCE, label="MarginNCE", color="#7A3B69", tune=("margin", (0.1, 0.2)))
'''


@pytest.fixture
def plugin(tmp_path):
    path = tmp_path / "margin_nce.py"
    path.write_text(PLUGIN)
    yield path
    if "margin-nce" in names():
        unregister("margin-nce")


def test_train_report_and_popularity(tmp_path, plugin, nuclr):
    file, run = write_config(tmp_path), tmp_path / "run"
    options = [f"plugins={plugin}", "objective.name=margin-nce", "objective.margin=0.15", f"out={run}", "report=false"]
    status, _, err = nuclr("train", file, *options)
    assert status == 0, err
    assert "MarginNCE: temperature 0.05" in err, "the start banner shows the label"
    saved = yaml.safe_load((run / "config.yaml").read_text())
    expected = {"name": "margin-nce", "temperature": 0.05, "margin": 0.15, "normalize": False}
    assert saved["objective"] == expected | {"margin_strategy": "absolute"}
    assert json.loads((run / "results.json").read_text())["objective"] == "margin-nce"

    for arguments in (["report"], ["popularity"], ["evaluate"], ["embed", "--out", tmp_path / "f.npz"]):
        status, _, err = nuclr(arguments[0], run, *arguments[1:])
        assert status == 0, err
    assert "MarginNCE" in (run / "report.html").read_text()
    assert json.loads((run / "popularity" / "popularity.json").read_text())["temperature"] == 0.05

    # A new process knows the objective only through the plugin that the run's config.yaml names.
    report = subprocess.run([sys.executable, "-m", "nuclr", "report", run], capture_output=True, text=True)
    assert report.returncode == 0, report.stderr


def test_wrong_options_are_refused_by_its_own_constructor(tmp_path, plugin, nuclr):
    file = write_config(tmp_path)
    for override in ("objective.margin=2", "objective.margni=0.1", "objective.gamma=0.5"):
        status, _, err = nuclr("train", file, f"plugins={plugin}", "objective.name=margin-nce", override)
        assert status == 2 and override.partition("=")[0] in err, err
    assert "objective.margin" in config.all_keys()


@pytest.mark.slow
def test_compare_in_worker_processes(tmp_path, plugin, nuclr):
    """The grid, the label and the color of figures come from the row; workers import the plugin themselves."""
    out = tmp_path / "compare"
    status, printed, err = nuclr(
        "compare", write_config(tmp_path), "methods=clip,margin-nce", "seeds=2", f"plugins={plugin}", "--out", out,
        "--temperatures", "0.05", "--workers", 1,
    )  # fmt: skip
    assert status == 0, err
    protocol = read_results(out / "compare.json").protocol
    assert any("temperature 0.05, margin 0.1; temperature 0.05, margin 0.2" in line for line in protocol)
    assert "MarginNCE" in printed and "MarginNCE" in (out / "report.html").read_text()
    assert "#7a3b69" in (out / "report.html").read_text().lower()
