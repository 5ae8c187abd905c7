"""`nuclr table` on the command line: listed, printed as commands, killed and resumed, and with wrong input."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nuclr.studies.table import launch
from tests.studies.table import tiny


def test_dry_run_lists_runs_with_state_and_time_and_writes_nothing(nuclr, tmp_path):
    path, out = tiny.write_table(tmp_path), tmp_path / "out"
    ended = nuclr("table", path, "--tests", tmp_path, "--out", out, "--dry-run")
    assert ended.status == 0, ended.err
    assert "CLIP, seed 0: missing, training about 0:0" in ended.out
    assert f"    nuclr train {tmp_path}/tiny.yaml report=false objective.name=clip seed=0" in ended.out
    assert "2 of 2 runs are not done: about 0:0" in ended.out
    assert "time: trial of two steps" in ended.out
    assert not out.exists()

    (tmp_path / "train.npz").unlink()
    (tmp_path / "test.npz").unlink()
    ended = nuclr("table", path, "--tests", tmp_path, "--out", out, "--dry-run", "--only", "ours")
    assert ended.status == 0
    assert "ours, seed 0: missing, training unknown" in ended.out and "CLIP" not in ended.out
    assert "before training: column pairs: " in ended.out


def test_commands_for_a_scheduler_then_collect(nuclr, tmp_path, monkeypatch):
    path, out = tiny.write_table(tmp_path), tmp_path / "out"
    common = ["table", path, "optimizer.lr=0.02", "--tests", tmp_path, "--out", out]
    ended = nuclr(*common, "--commands", "--processes", 2)
    assert ended.status == 0, ended.err
    first, second, last = ended.out.splitlines()
    assert "torchrun --standalone --nproc_per_node 2 -m nuclr train" in first and "ours-seed0" in second
    assert shlex.split(last) == [
        *f"nuclr table {path} optimizer.lr=0.02 --out {out} --tests {tmp_path} --collect".split()
    ]
    collected = nuclr(*shlex.split(last)[1:])
    assert collected.status == 0, collected.err
    assert "2 of 2 runs are not done, such as clip-seed0" in collected.err

    other = json.loads((out / "plan.json").read_text())
    assert other["runs"]["clip-seed0"]["optimizer.lr"] == "0.02"


def test_the_table_is_written_with_its_page(nuclr, tmp_path, monkeypatch):
    path, out = tiny.write_table(tmp_path), tmp_path / "out"
    monkeypatch.setattr(launch, "execute", tiny.run_inline)
    ended = nuclr("table", path, "--tests", tmp_path, "--out", out, "--only", "ours")
    assert ended.status == 0, ended.err
    assert "1 of 2 runs are not done, such as clip-seed0" in ended.err
    for name in ("table.md", "table.tex", "table.csv", "table.json", "report.html"):
        assert "ours" in (out / name).read_text(encoding="utf-8"), name
    changed = nuclr("table", path, "optimizer.lr=0.02", "--tests", tmp_path, "--out", out)
    assert changed.status == 2
    assert "row ours: optimizer.lr is 0.02, but 0.03 in " in changed.err

    found = next((out / "results" / "ours-seed0").glob("*.json"))
    alone = nuclr("table", "--results", f"mine={found}", found, "--out", tmp_path / "alone")
    assert alone.status == 0, alone.err
    rows = json.loads((tmp_path / "alone" / "table.json").read_text())["blocks"][0]["rows"]
    assert [row["label"] for row in rows] == ["mine", "NUCLR"]
    assert rows[0]["cells"] == rows[1]["cells"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "FILE is missing; name a table file"),
        (["none.yaml"], "none.yaml: no such config file"),
        (["{path}", "--results", "a.json"], "--results replaces"),
        (["{path}", "other.yaml"], "'other.yaml' is not an override"),
        (["{path}", "--dry-run", "--commands"], "exclude one another"),
        (["{path}", "--only", "nobody"], "--only nobody: no row that is trained has this label; rows: CLIP, ours"),
        (["{path}", "seed=3"], "seed cannot be an override"),
        (["{path}", "objective.tau=3"], "tiny.yaml: unknown key 'objective.tau'; did you mean"),
        (["{path}", "--tests", "nowhere"], "column pairs: nowhere/test.npz"),
        (["--results", "none*.json"], "--results: no file matches none*.json"),
    ],
)
def test_mistakes_end_with_status_2(nuclr, tmp_path, arguments, message):
    path = tiny.write_table(tmp_path)
    ended = nuclr("table", *(text.format(path=path) for text in arguments), "--out", tmp_path / "out")
    assert ended.status == 2
    assert message in ended.err
    assert len(ended.err.splitlines()) <= 2


def test_a_folder_of_another_command_is_refused(nuclr, tmp_path):
    path = tiny.write_table(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "table.md").write_text("mine")
    ended = nuclr("table", path, "--tests", tmp_path, "--out", tmp_path / "out")
    assert ended.status == 2
    assert "table.md exists and was not written by `nuclr table`" in ended.err


def wait_for(condition, seconds: float = 600) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the commands it starts end as on Linux")
def test_after_sigkill_it_resumes_and_leaves_finished_runs_unchanged(nuclr, tmp_path):
    path, out = tiny.write_table(tmp_path), tmp_path / "out"
    path.write_text(path.read_text().replace("objective.gamma=0.5", "schedule.epochs=80, checkpoint_every=20"))
    arguments = ["table", path, "--tests", tmp_path, "--out", out]
    log = out / "runs" / "ours-seed0" / "metrics.jsonl"
    first = subprocess.Popen([sys.executable, "-m", "nuclr", *map(str, arguments)], stderr=subprocess.PIPE, text=True)
    assert wait_for(lambda: first.poll() is not None or (log.is_file() and log.stat().st_size))
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    stamps = {p: p.stat().st_mtime_ns for p in (out / "runs" / "clip-seed0").rglob("*") if p.is_file()}
    results = list((out / "results" / "clip-seed0").glob("*.json"))
    assert stamps and results
    assert not (out / "runs" / "ours-seed0" / "results.json").exists()

    again = nuclr(*arguments)
    assert again.status == 0, again.err
    assert "1 of 2 runs are already done" in again.err
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps
    assert "resuming from step" in (out / "logs" / "ours-seed0.log").read_text()
    rows = json.loads((out / "table.json").read_text())["blocks"][0]["rows"]
    assert all(set(row["runs"].values()) == {"done"} for row in rows)
