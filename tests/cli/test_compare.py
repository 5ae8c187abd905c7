"""`nuclr compare` on the command line: killed and resumed, and with wrong input."""

import json
from pathlib import Path

import numpy as np
import pytest

from nuclr.cli.compare import compare
from nuclr.errors import UserError
from nuclr.studies.engine.tables import read_results
from tests.cli.test_evaluate import write_images
from tests.studies import tiny
from tests.training import runs


def arguments(config: Path, out: Path, *more: str, workers: int = 2) -> list[str]:
    base = ["compare", str(config), "methods=clip,sogclr", "seeds=2"]
    return [*base, "--temperatures", "0.03", "--out", str(out), "--workers", str(workers), *more]


@pytest.mark.slow
def test_models_of_views_are_compared_by_nearest_neighbors(nuclr, tmp_path):
    write_images(tmp_path / "classes", red=12, green=10)
    write_images(tmp_path / "other", red=6, green=6)
    settings = runs.view_settings(tmp_path, **{"data.classes": tmp_path / "classes", "schedule.epochs": 1})
    settings = [setting for setting in settings if not setting.startswith("objective.zeta_lr=")]
    options = ["--halves", "--test", f"other={tmp_path / 'other'}"]
    done = nuclr(*arguments(tmp_path / "empty.yaml", tmp_path / "out", *options, workers=1), *settings)
    assert done.status == 0, done.err
    assert "other k-nearest neighbors" in done.out and "SogCLR - CLIP" in done.out and "recall" not in done.out.lower()
    result = read_results(tmp_path / "out" / "compare.json")
    assert "knn_acc1" in {column.metric for column in result.blocks[0].columns}
    assert not any("pairs" in line or "Recall" in line for line in result.protocol)
    for row in result.rows:
        for run in row.runs:
            folder = tmp_path / "out" / "cells" / run
            trained = json.loads((folder / "results.json").read_text())["val"]["knn_acc1"]
            hits = np.load(folder / "outcomes.npz")
            assert hits["val/top"][:, 0].mean() == pytest.approx(trained)
            halves = np.concatenate([hits[f"{half}/top"][:, 0] for half in ("val_a", "val_b")])
            assert len(halves) == 11 and halves.sum() == pytest.approx(hits["val/top"][:, 0].sum())
        assert row.corrected == () and len(row.epochs) == 1
    settings = [setting for setting in settings if not setting.startswith("data.classes=")]
    refused = nuclr(*arguments(tmp_path / "empty.yaml", tmp_path / "without"), *settings)
    assert refused.status == 2 and "data.classes" in refused.err


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (["methods=clip,sigclip"], {}, "sigclip"),
        (["seeds=0"], {}, "seeds=0"),
        ([], {"test": ["nowhere.npz"]}, "nowhere.npz"),
        ([], {"test": ["test.npz", "test=val.npz"]}, "test=val.npz"),
        (["optimizer.clip=1"], {}, "optimizer.clip"),
        (["objective.temperature=0.1"], {}, "--temperatures"),
        (["objective.bias=-3"], {}, "--tune siglip.bias"),
        (["methods=nuclr", "objective.zeta_lr=0"], {}, "--tune nuclr.zeta_lr"),
        (["objective.name=clip"], {}, "methods="),
        (["data.val="], {}, "data.val"),
        ([], {"tune": ["sogclr.gamma=0.3,7"]}, "gamma"),
        ([], {"ablations": True, "batch_sizes": "16"}, "--batch-sizes"),
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
    assert out.startswith("20 runs: 16 to tune") and "\nCLIP: temperature 0.01, " in out
    assert not (tmp_path / "out").exists()
