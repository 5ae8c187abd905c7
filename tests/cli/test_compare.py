"""`nuclr compare` on the command line: killed and resumed, and with wrong input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nuclr.cli.compare import compare
from nuclr.errors import UserError
from tests.cli.test_evaluate_sides import write_classes
from tests.studies.compare import tiny
from tests.training import runs


def arguments(config: Path, out: Path, *more: str, workers: int = 2) -> list[str]:
    base = ["compare", str(config), "methods=clip,sogclr", "seeds=2"]
    return [*base, "--temperatures", "0.03", "--out", str(out), "--workers", str(workers), *more]


def finished(out: Path) -> dict[str, tuple[int, int]]:
    files = {str(path): path.stat() for path in out.glob("cells/*/*.*")}
    done = {path.parent for path in out.glob("cells/*/outcomes.npz")}
    return {path: (s.st_ino, s.st_mtime_ns) for path, s in files.items() if Path(path).parent in done}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(condition, seconds: float = 120) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")
def test_after_sigkill_it_resumes_and_leaves_finished_cells_unchanged(nuclr, tmp_path):
    config, out = tiny.write_config(tmp_path), tmp_path / "out"
    longer = ["schedule.epochs=30", "checkpoint_every=20"]
    command = [sys.executable, "-m", "nuclr", *arguments(config, out, *longer)]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert wait_for(lambda: finished(out) or first.poll() is not None)
    workers = children(first.pid)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert wait_for(lambda: not any(alive(worker) for worker in workers), 20)
    before = finished(out)
    assert before
    assert not (out / "compare.json").exists()

    again = nuclr(*arguments(config, out, *longer))
    assert again.status == 0, again.err
    assert "SogCLR - CLIP" in again.out
    after = finished(out)
    assert {path: after[path] for path in before} == before
    assert len(list(out.glob("cells/*/outcomes.npz"))) == 6
    assert not list(out.glob("cells/*/checkpoints"))

    other = nuclr(*arguments(config, out, *longer, "optimizer.lr=0.1"))
    assert other.status == 2
    assert "optimizer.lr is 0.1, but 0.03 in the comparison in" in other.err


@pytest.mark.slow
def test_models_of_views_are_compared_by_nearest_neighbors(nuclr, tmp_path):
    write_classes(tmp_path / "classes", red=12, green=10)
    write_classes(tmp_path / "other", red=6, green=6)
    settings = runs.view_settings(tmp_path, **{"data.classes": tmp_path / "classes", "schedule.epochs": 1})
    settings.remove("objective.zeta_lr=0.01")
    options = ["--halves", "--test", f"other={tmp_path / 'other'}"]
    done = nuclr(*arguments(tmp_path / "empty.yaml", tmp_path / "out", *options, workers=1), *settings)
    assert done.status == 0, done.err
    assert "other top-1" in done.out and "SogCLR - CLIP" in done.out and "recall" not in done.out.lower()
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert {one["name"]: one["kind"] for one in content["sets"]} == dict.fromkeys(("halves", "val", "other"), "classes")
    assert not any("pairs" in line or "Recall" in line for line in content["protocol"])
    for row in content["rows"].values():
        for seed, run in enumerate(row["runs"]["val_a"]):
            folder = tmp_path / "out" / "cells" / run
            trained = json.loads((folder / "results.json").read_text())["val"]["knn_acc1"]
            hits = np.load(folder / "outcomes.npz")
            assert hits["val/top"][:, 0].mean() == pytest.approx(trained)
            halves = np.concatenate([hits[f"{half}/top"][:, 0] for half in ("val_a", "val_b")])
            assert len(halves) == 11 and halves.sum() == pytest.approx(hits["val/top"][:, 0].sum())
            if row["runs"]["val_a"] == row["runs"]["val_b"]:
                assert row["metrics"]["val"]["acc@1"]["per_seed"][seed] == pytest.approx(100 * trained)
        assert row["corrected"] == {} and len(row["curve"]["epochs"]) == 1
    page = (tmp_path / "out" / "report.html").read_text()
    assert "accuracy" in page

    settings = [setting for setting in settings if not setting.startswith("data.classes=")]
    refused = nuclr(*arguments(tmp_path / "empty.yaml", tmp_path / "without"), *settings)
    assert refused.status == 2 and "data.classes is missing" in refused.err


PLUGIN = """
from nuclr.objectives import SogCLR, register

class Own(SogCLR):
    def __init__(self, num_samples: int, temperature: float = 0.05, gamma: float = 0.8, offset: float = 0.0) -> None:
        super().__init__(num_samples, temperature + offset, gamma)

register(
    "own", Own, label="Own objective", color="#112233", tune=("offset", (0.0, 0.01)), compare_to=("sogclr",)
)
"""


@pytest.mark.slow
def test_workers_load_the_plugins_of_the_settings(tmp_path):
    """An objective of one file outside the package is tuned, trained in workers, compared and drawn."""
    config, out = tiny.write_config(tmp_path), tmp_path / "out"
    (tmp_path / "own.py").write_text(PLUGIN)
    arguments = [sys.executable, "-m", "nuclr", "compare", str(config), f"plugins={tmp_path / 'own.py'}"]
    arguments += ["methods=sogclr,own", "seeds=1", "schedule.epochs=1", "--temperatures", "0.03", "--out", str(out)]
    done = subprocess.run([*arguments, "--workers", "1"], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert "Own objective - SogCLR" in done.stdout
    content = json.loads((out / "compare.json").read_text())
    assert [tried["changes"]["objective.offset"] for tried in content["rows"]["own"]["tuning"]["tried"]] == [0.0, 0.01]
    assert (out / "curves_own_sogclr.png").is_file()


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (["methods=clip,sigclip"], {}, "'sigclip' is unknown"),
        (["seeds=0"], {}, "seeds=0"),
        ([], {"temperatures": "0.01,warm"}, "'warm' is not a number"),
        ([], {"test": ["nowhere.npz"]}, "nowhere.npz"),
        ([], {"test": ["test.npz", "test=val.npz"]}, "same name"),
        (["optimizer.clip=1"], {}, "unfair"),
        (["objective.temperature=0.1"], {}, "--temperatures"),
        (["objective.bias=-3"], {}, "--tune siglip.bias"),
        (["methods=nuclr", "objective.zeta_lr=0"], {}, "--tune nuclr.zeta_lr"),
        (["objective.zeta_lr=0.1"], {"tune": ["nuclr.zeta_lr=0.01,0.03"]}, "--tune nuclr.zeta_lr"),
        (["methods=clip", "objective.gamma=0.5"], {}, "none of clip"),
        (["objective.name=clip"], {}, "methods="),
        (["data.val="], {}, "data.val is missing"),
        (["methods=sogclr,nuclr"], {"baseline": "clip"}, "not among the methods"),
        ([], {"tune": ["sogclr.gamma=0.3,7"]}, "gamma"),
        ([], {"ablations": True, "batch_sizes": "16"}, "two studies"),
        (["methods=clip"], {"ablations": True}, "nuclr"),
        (["model.pretrained=nowhere"], {}, "nowhere"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_trained(tmp_path, overrides, options, message):
    config = tiny.write_config(tmp_path)
    with pytest.raises(UserError, match=message):
        compare(None, [str(config), *overrides], out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_lists_the_grid_and_trains_nothing(nuclr, tmp_path):
    config = tiny.write_config(tmp_path)
    status, out, err = nuclr("compare", config, "methods=clip,nuclr", "seeds=3", "--out", tmp_path / "out", "--dry-run")
    assert status == 0, err
    first, *listed, _ = out.splitlines()
    grid = sum(line.count(";") + 1 for line in listed)
    assert first.startswith(f"{grid + 4} runs in total: {grid} to tune 2 methods with seed 0, then 4 to train")
    assert listed[0].startswith("CLIP: temperature 0.01, ") and not (tmp_path / "out").exists()
