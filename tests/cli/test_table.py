"""`nuclr table` on the command line: listed, printed as commands, killed and resumed, and with wrong input."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nuclr.studies.engine.tables import read_results
from tests.studies import tiny
from tests.studies.tiny import inline  # noqa: F401


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


def test_dry_run_lists_runs_with_state_and_writes_nothing(nuclr, tmp_path):
    path, out = tiny.write_table(tmp_path), tmp_path / "out"
    ended = nuclr("table", path, "--tests", tmp_path, "--out", out, "--dry-run")
    assert ended.status == 0, ended.err
    assert [line.split(":")[0].split("-")[0] for line in ended.out.splitlines()] == ["clip", "nuclr"]
    (tmp_path / "test.npz").unlink()
    ended = nuclr("table", path, "--tests", tmp_path, "--out", out, "--dry-run")
    assert ended.status == 0
    assert "nuclr-gamma=0.5-seed=0" in ended.out and "test.npz" in ended.out
    assert not out.exists()


def test_commands_for_a_scheduler_then_collect(nuclr, tmp_path):
    """The printed commands train and measure one run each, also with torchrun; --collect then writes the table."""
    path, out = tiny.write_table(tmp_path), tmp_path / "out"
    common = ["table", path, "optimizer.lr=0.02", "--tests", tmp_path, "--out", out]
    ended = nuclr(*common, "--commands", "--processes", 2)
    assert ended.status == 0, ended.err
    assert ended.out.startswith("torchrun --standalone --nproc_per_node 2 -m nuclr table")
    first, second, last = map(shlex.split, nuclr(*common, "--commands").out.splitlines())
    assert (
        first[-1].startswith("clip-seed=0")
        and second[-1].startswith("nuclr-gamma=0.5-seed=0")
        and last[-1] == "--collect"
    )
    assert nuclr(*second[1:]).status == 0
    assert not (out / "table.json").exists()
    collected = nuclr(*last[1:])
    assert collected.status == 0, collected.err
    assert "1 runs are not done" in collected.err and first[-1] in collected.err
    assert read_results(out / "table.json").row("ours").values["Mean"] is not None
    assert len(nuclr(*common, "--commands").out.splitlines()) == 2
    assert nuclr(*common, "--job", "nobody").status == 2


@pytest.mark.slow
def test_two_processes_train_a_run_of_a_table(nuclr, tmp_path):
    path, out = tiny.write_table(tmp_path), tmp_path / "out"
    ended = nuclr("table", path, "--tests", tmp_path, "--out", out, "--commands", "--processes", 2)
    command = shlex.split(ended.out.splitlines()[1].replace("torchrun", "python -m torch.distributed.run", 1))
    done = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = (out / "cells").iterdir()
    assert "processes: 2" in done.stderr and (run / "outcomes.npz").is_file()


@pytest.mark.usefixtures("inline")
def test_the_table_is_written_with_its_page(nuclr, tmp_path):
    path, out = tiny.write_table(tmp_path), tmp_path / "out"
    ended = nuclr("table", path, "--tests", tmp_path, "--out", out)
    assert ended.status == 0, ended.err
    for name in ("table.md", "table.tex", "table.json", "report.html"):
        assert "ours" in (out / name).read_text(encoding="utf-8"), name


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["none.yaml"], "none.yaml"),
        (["{path}", "other.yaml"], "other.yaml"),
        (["{path}", "--dry-run", "--commands"], "--commands"),
        (["{path}", "--processes", "2"], "--processes"),
        (["{path}", "seed=3"], "seed"),
        (["{path}", "objective.tau=3"], "objective.tau"),
        (["{path}", "--tests", "nowhere"], "nowhere/test.npz"),
    ],
)
def test_mistakes_end_with_status_2(nuclr, tmp_path, arguments, named):
    path = tiny.write_table(tmp_path)
    ended = nuclr("table", *(text.format(path=path) for text in arguments), "--out", tmp_path / "out")
    assert ended.status == 2
    assert named in ended.err
    assert len(ended.err.splitlines()) <= 2


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")
def test_after_sigkill_it_resumes_and_leaves_finished_runs_unchanged(nuclr, tmp_path):
    path, out = tiny.write_table(tmp_path), tmp_path / "out"
    path.write_text(path.read_text().replace("objective.gamma: 0.5", "schedule.epochs: 80, checkpoint_every: 20"))
    arguments = ["table", path, "--tests", tmp_path, "--out", out, "--workers", "1"]

    def progress() -> bool:
        return any(log.stat().st_size for log in out.glob("cells/nuclr*/metrics.jsonl"))

    first = subprocess.Popen([sys.executable, "-m", "nuclr", *map(str, arguments)], stderr=subprocess.PIPE, text=True)
    assert wait_for(lambda: first.poll() is not None or progress())
    workers = children(first.pid)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert wait_for(lambda: not any(alive(worker) for worker in workers), 20)
    stamps = {p: p.stat().st_mtime_ns for p in out.glob("cells/clip*/**/*") if p.is_file()}
    assert any(p.name == "outcomes.npz" for p in stamps)
    assert not list(out.glob("cells/nuclr*/results.json"))

    again = nuclr(*arguments)
    assert again.status == 0, again.err
    assert "2 runs with all seeds: 1 are done" in again.err
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps
    assert "resuming from step" in (out / "logs" / "worker-0.log").read_text()
    assert not read_results(out / "table.json").missing
