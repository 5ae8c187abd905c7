"""Random commands with random kills, signals, full disks and two at once: is every folder what it must be afterwards?

    python benchmarks/crash.py [--seconds 60] [--seed 0] [--commands hubness,train,...] [--compare]

All commands work in one folder tree on tiny vectors, in forked processes. Each step starts one command, or two on the
same folder, with settings drawn at random, and disturbs it: SIGKILL, SIGINT or SIGTERM at a random moment or after a
file has changed, or a limit on the size of files, which acts like a full disk. Then the folder is compared with a
model of what must be there:

- mixed: files of two results, or a file that cannot be read, in a folder that looks complete.
- lost: a file of the user is gone or changed, or a finished result was replaced by nothing at all.
- locked out: the same command, undisturbed, does not succeed in its own folder.
- litter: after that, temporary files are left.
- different: a training that was disturbed and resumed does not end like one that never was.
- traceback: a command printed one.

Prints a table and, for each failure, its step; step K depends only on `--seed`, but moments depend on the machine.
Exits with 1 if there was a failure. `--compare` adds `nuclr compare`, which takes about ten seconds per step.
`nuclr export` is among the commands if onnx is installed. Needs Linux.
"""

import argparse
import contextlib
import csv
import importlib.util
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

FAULTS = ("none", "SIGKILL", "SIGINT", "SIGTERM", "full disk", "two at once", "two, one killed")
STATUS = {"SIGKILL": -9, "SIGINT": 130, "SIGTERM": 143}
LONGEST = 600  # seconds of one command, on a machine that does much else
NOTES = "mine\n"
EPOCHS = 6


def write_data(root: Path) -> None:
    """Write pairs of vectors to train on, and queries and a gallery."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 8)) + 0.5
    y = np.repeat(x, 2, axis=0) + 0.5 * rng.normal(size=(80, 8))
    x, y = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (x, y))
    np.savez(root / "pairs.npz", x=x.astype("f4"), y=y.astype("f4"), y_to_x=np.repeat(np.arange(40), 2))


# -- commands ----------------------------------------------------------------------------------------------------------


@dataclass
class Command:
    """A command of the test.

    Attributes:
        folder: the folder or file that it writes, by name.
        arguments: called with a random generator; what follows `nuclr NAME`.
        state: called with the folder; None if there is no result, else something that depends on the settings. Raises
            if the files do not belong together.
        is_folder: whether it writes a folder.
        has_notes: whether the user has a file of his own in it.

    """

    folder: str
    arguments: Callable[[random.Random, Path], list[str]]
    state: Callable[[Path], Any]
    is_folder: bool = True
    has_notes: bool = True
    seconds: float = 1.0  # of an undisturbed run, measured


def summary(path: Path) -> dict[str, Any] | None:
    """Return the JSON file of a result; None if there is none, or it says only who writes."""
    if not path.is_file():
        return None
    content = json.loads(path.read_text())
    return content if len(content) > 1 else None


def hubness_arguments(chance: random.Random, root: Path) -> list[str]:
    """Return a search with random settings."""
    settings = ["--k", chance.choice("3579"), "--strength", chance.choice(["0.5", "1", "2"])]
    return [str(root / "pairs.npz"), *settings, "--out", str(root / "hubness")]


def hubness_state(folder: Path) -> Any:
    """Return the settings in hubness.json, which all other files must have too."""
    from nuclr.popularity import PopularityCorrection

    content = summary(folder / "hubness.json")
    if content is None:
        return None
    bias = np.load(folder / "bias.npy")
    fix = PopularityCorrection.load(folder / "correction.safetensors")
    assert fix.strength_ == content["strength"], "correction.safetensors and hubness.json differ"
    expected = fix.bias(np.load(folder.parent / "pairs.npz")["y"]).numpy()
    assert np.allclose(bias, expected, atol=1e-5), "bias.npy and correction.safetensors differ"
    table = list(csv.DictReader((folder / "hubness.csv").open(newline="")))
    assert f"n{content['k']}" in table[0], "hubness.csv and hubness.json differ"
    assert np.allclose([float(row["bias"]) for row in table], bias, atol=1e-5), "hubness.csv and bias.npy differ"
    check_page(folder, "hubness.json")
    return content["k"], content["strength"]


def popularity_arguments(chance: random.Random, root: Path) -> list[str]:
    """Return a popularity report with a random temperature."""
    temperature = chance.choice(["0.1", "0.2", "0.5", "1"])
    return [str(root / "pairs.npz"), "--temperature", temperature, "--out", str(root / "popularity")]


def popularity_state(folder: Path) -> Any:
    """Return the temperature in popularity.json; the table must have the same largest popularity."""
    content = summary(folder / "popularity.json")
    if content is None:
        return None
    table = list(csv.DictReader((folder / "popularity.csv").open(newline="")))
    for side, solved in content["sides"].items():
        largest = max(float(row["popularity"]) for row in table if row["side"] == side)
        assert np.isclose(largest, solved["most_popular"][0]["popularity"], rtol=1e-4), "table and summary differ"
    check_page(folder, "popularity.json")
    return content["temperature"]


def check_page(folder: Path, name: str) -> None:
    """Check that the page, if there is one, was written after the summary, and to its end."""
    page = folder / "report.html"
    if page.is_file():
        assert page.stat().st_mtime_ns >= (folder / name).stat().st_mtime_ns, "the page is older than the result"
        assert page.read_text().rstrip().endswith("</html>"), "half a page"


def toy_arguments(chance: random.Random, root: Path) -> list[str]:
    """Return a small toy study with a random seed."""
    return ["--seeds", "2", "--max-n", "100", "--seed", chance.choice("0123"), "--out", str(root / "toy")]


def toy_state(folder: Path) -> Any:
    """Return the seed of the study."""
    content = summary(folder / "toy.json")
    check_page(folder, "toy.json")
    return None if content is None else content["seed"]


def train_settings(root: Path, out: str) -> list[str]:
    """Return a training of some 50 steps that can be resumed."""
    settings = {
        "data.train": root / "pairs.npz",
        "data.val": root / "pairs.npz",
        "data.batch_size": 16,
        "model.width": 4,
        "schedule.epochs": EPOCHS,
        "optimizer.lr": 0.03,
        "checkpoint_every": 2,
        "log.every": 1,
        "threads": 1,
        "device": "cpu",
        "name": "crash",
        "out": root / out,
    }
    return [*(f"{key}={value}" for key, value in settings.items()), "--resume"]


def train_state(folder: Path) -> Any:
    """Return what a finished run ends with: it must not depend on how often it was stopped."""
    if not (folder / "results.json").is_file():
        return None
    results = json.loads((folder / "results.json").read_text())
    results.pop("timing")
    weights = sorted((folder / "model").rglob("*.safetensors"))
    assert (folder / "model" / "config.json").is_file() and weights, "no model in a finished run"
    return (folder / "metrics.jsonl").read_bytes(), results, [path.read_bytes() for path in weights]


def embed_state(path: Path) -> Any:
    """Return the shapes of an embedding file."""
    if not path.is_file():
        return None
    with np.load(path) as content:
        return {name: content[name].shape for name in content.files}


def evaluate_state(path: Path) -> Any:
    """Return the metrics of a run."""
    return summary(path)


def compare_arguments(chance: random.Random, root: Path) -> list[str]:  # noqa: ARG001 (as all others)
    """Return a comparison of two objectives with two seeds."""
    settings = ["schedule.epochs=1", "data.batch_size=16", "model.width=4", "optimizer.lr=0.03", "threads=1"]
    data = [f"data.train={root / 'pairs.npz'}", f"data.val={root / 'pairs.npz'}", "device=cpu"]
    return [
        *data,
        *settings,
        "methods=clip,nuclr",
        "seeds=2",
        "--temperatures",
        "0.05",
        "--workers",
        "1",
        "--out",
        str(root / "compare"),
    ]


def compare_state(folder: Path) -> Any:
    """Return the rows of compare.json, which the Markdown must show."""
    content = summary(folder / "compare.json")
    if content is None:
        return None
    text = (folder / "compare.md").read_text()
    for row in content["blocks"][0]["rows"]:
        assert row["label"] in text, "compare.md and compare.json differ"
    return content["blocks"]


def export_state(folder: Path) -> Any:
    """Return the names of the files of an export."""
    if not folder.is_dir():
        return None
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert "x/model.onnx" in files and "README.md" in files, "half an export"
    return sorted(files)


def to_run(name: str, out: str, *options: str) -> Callable[[random.Random, Path], list[str]]:
    """Return the arguments of a command that reads the finished run."""
    return lambda _, root: [str(root / name), *(["--out", str(root / out)] if out else []), *options]


COMMANDS = {
    "hubness": Command("hubness", hubness_arguments, hubness_state),
    "popularity": Command("popularity", popularity_arguments, popularity_state),
    "toy": Command("toy", toy_arguments, toy_state),
    "train": Command("run", lambda _, root: train_settings(root, "run"), train_state, has_notes=False),
    "embed": Command("features.npz", to_run("reference", "features.npz"), embed_state, False, False),
    "evaluate": Command("metrics.json", to_run("reference", "metrics.json"), evaluate_state, False, False),
    "export": Command("exported", to_run("reference", "exported", "--to", "onnx"), export_state, has_notes=False),
    "report": Command("hubness", to_run("hubness", ""), hubness_state),
    "compare": Command("compare", compare_arguments, compare_state),
}

REFUSES_EXISTING = ("embed", "evaluate", "export")  # commands that do not replace an earlier result


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# -- processes ---------------------------------------------------------------------------------------------------------


def start(name: str, arguments: list[str], log: Path, limit: int | None = None) -> int:
    """Start `nuclr NAME` in a forked process, which writes to `log`, and return its number."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        if limit is not None:
            # The log is not limited: errors must be seen.
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        os.dup2(file, 1)
        os.dup2(file, 2)
        from nuclr.cli import app

        sys.argv = ["nuclr", name, *arguments]
        app.main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(pid: int) -> int:
    """Return the status of a process as a shell shows it, negative for a signal; one that hangs is killed."""
    deadline = time.monotonic() + LONGEST
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 999


def wait_for_a_moment(folder: Path, chance: random.Random, seconds: float) -> None:
    """Wait for any moment of a command, or for one right after a file of its folder has changed."""

    def content() -> dict[str, int]:
        found = {}
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                found[entry.name] = entry.stat().st_mtime_ns
        return found

    if chance.random() < 0.3:
        time.sleep(seconds * chance.uniform(0, 1.2))
        return
    before = content()
    changes = chance.randrange(1, 7)
    deadline = time.monotonic() + 2 * seconds
    while changes and time.monotonic() < deadline:
        time.sleep(0.0002)
        now = content()
        changes -= now != before
        before = now
    time.sleep(chance.uniform(0, 0.005))


@dataclass
class Crash:
    """The test of one folder tree.

    Attributes:
        root: the folder.
        names: the commands.
        seed: of all random numbers.

    """

    root: Path
    names: list[str]
    seed: int
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)

    def prepare(self) -> None:
        """Write the data, a reference run, and a first result of every command."""
        write_data(self.root)
        status, err = self.run("train", train_settings(self.root, "reference"))
        assert status == 0, err
        self.reference = train_state(self.root / "reference")
        for name in self.names:
            command = COMMANDS[name]
            begin = time.monotonic()
            status, err = self.run(name, command.arguments(random.Random(0), self.root))
            assert status == 0, f"{name}: {err}"
            command.seconds = time.monotonic() - begin
            if command.has_notes:
                (self.root / command.folder / "notes.txt").write_text(NOTES)
        if "train" in self.names:
            shutil.rmtree(self.root / "run")

    def run(self, name: str, arguments: list[str], **options: Any) -> tuple[int, str]:
        """Run a command to its end; return its status and what it printed."""
        log = self.root.parent / "log"
        status = wait(start(name, arguments, log, **options))
        return status, log.read_text(errors="replace")

    def step(self, number: int) -> None:
        """Disturb one command, and compare its folder with the model."""
        chance = random.Random(f"{self.seed} {number}")
        name = chance.choice(self.names)
        fault = chance.choice(FAULTS)
        command = COMMANDS[name]
        folder = self.root / command.folder
        before = command.state(folder)
        if name == "train" and before is not None:  # finished: begin another one
            shutil.rmtree(folder)
            before = None
        if name in REFUSES_EXISTING:
            remove(folder)
            before = None
        where = f"step {number}, {name}, {fault}"
        self.disturb(name, fault, chance, where)
        now = self.state(name, where)
        if before is not None and now is None and not self.has_marker(folder):
            self.fail("lost", f"{where}: the earlier result is gone")
        self.counts[name, fault] += 1
        if fault == "none" or chance.random() < 0.5:
            self.repeat(name, chance, where)

    def disturb(self, name: str, fault: str, chance: random.Random, where: str) -> None:
        """Run a command, or two at once, with a fault."""
        command = COMMANDS[name]
        several = 2 if fault.startswith("two") else 1
        logs = [self.root.parent / f"log{index}" for index in range(several)]
        limit = int(10 ** chance.uniform(1, 5)) if fault == "full disk" else None
        pids = [start(name, command.arguments(chance, self.root), log, limit) for log in logs]
        killed = {"two, one killed": "SIGKILL"}.get(fault, fault)
        if killed in STATUS:
            wait_for_a_moment(self.root / command.folder, chance, command.seconds)
            os.kill(pids[0], getattr(signal, killed))
        for index, (pid, log) in enumerate(zip(pids, logs, strict=True)):
            status = wait(pid)
            text = log.read_text(errors="replace")
            self.ended[str(status)] += 1
            if "Traceback" in text and not (killed in STATUS and index == 0 and status < 0):
                self.fail("traceback", f"{where}: {text[-600:]}")
            if status == 999:
                self.fail("hang", where)

    def state(self, name: str, where: str) -> Any:
        """Return the state of a folder after checking it."""
        command = COMMANDS[name]
        folder = self.root / command.folder
        try:
            state = command.state(folder)
        except Exception as error:
            self.fail("mixed", f"{where}: {type(error).__name__}: {error}")
            return "damaged"
        if command.has_notes and (folder / "notes.txt").read_text() != NOTES:
            self.fail("lost", f"{where}: notes.txt")
        if name == "train" and state is not None and state != self.reference:
            self.fail("different", where)
        return state

    def has_marker(self, folder: Path) -> bool:
        """Return whether a summary says that a result is being written."""
        return folder.is_dir() and any("written_by" in path.read_text() for path in folder.glob("*.json"))

    def repeat(self, name: str, chance: random.Random, where: str) -> None:
        """Run a command undisturbed: it must succeed, and leave a whole result and no temporary files."""
        command = COMMANDS[name]
        folder = self.root / command.folder
        if name == "report" and command.state(folder) is None:
            return  # nothing to report
        if name in REFUSES_EXISTING:
            remove(folder)
        status, err = self.run(name, command.arguments(chance, self.root))
        if status != 0:
            self.fail("locked out", f"{where}: {err[-400:]}")
        elif self.state(name, f"{where}, repeated") is None:
            self.fail("lost", f"{where}: no result after success")
        # What a killed `hubness` left is removed by the next `hubness`, and not by `report`.
        own = ".report*tmp" if name == "report" else ".*tmp"
        litter = [path.name for path in (*folder.glob(own), *folder.parent.glob(f".{folder.name}.*"))]
        if litter and command.is_folder:
            self.fail("litter", f"{where}: {', '.join(litter)}")

    def fail(self, kind: str, text: str) -> None:
        """Print and keep a failure. A folder that is damaged is not judged again."""
        self.failures.append(kind)
        print(f"{kind}: {text}", flush=True)
        for name in self.names:
            command = COMMANDS[name]
            if kind in ("mixed", "locked out") and command.is_folder and f" {name}" in text.partition(":")[0]:
                shutil.rmtree(self.root / command.folder, ignore_errors=True)
                if command.has_notes:
                    (self.root / command.folder).mkdir()
                    (self.root / command.folder / "notes.txt").write_text(NOTES)


def import_everything() -> None:
    """Import what the commands need, so that forked processes start at once."""
    import nuclr.cli.app
    import nuclr.report
    import nuclr.runs.run
    import nuclr.studies.evaluate
    import nuclr.studies.items.hubness_report
    import nuclr.studies.items.popularity_report
    import nuclr.studies.toy.study
    import nuclr.training.loop  # noqa: F401


def main() -> int:
    """Print a table of steps and failures; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", default="")
    parser.add_argument("--compare", action="store_true")
    arguments = parser.parse_args()
    has_onnx = importlib.util.find_spec("onnxscript") is not None
    is_chosen = {"compare": arguments.compare, "export": has_onnx}
    names = [name for name in COMMANDS if is_chosen.get(name, True)]
    names = arguments.commands.split(",") if arguments.commands else names
    torch.set_num_threads(1)
    import_everything()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, "tree")
        root.mkdir()
        crash = Crash(root, names, arguments.seed)
        print(f"seed {arguments.seed}, {', '.join(names)}", flush=True)
        crash.prepare()
        end = time.monotonic() + arguments.seconds
        number = 0
        while time.monotonic() < end:
            crash.step(number)
            number += 1
        chance = random.Random(0)
        for name in names:
            crash.repeat(name, chance, f"at the end, {name}")
    print(f"\n{'':12}" + "".join(f"{fault:>17}" for fault in FAULTS))
    for name in names:
        print(f"{name:12}" + "".join(f"{crash.counts[name, fault]:>17}" for fault in FAULTS))
    print(f"\n{number} steps; ended with {dict(crash.ended)}; failures: {dict(Counter(crash.failures)) or 'none'}")
    return int(bool(crash.failures))


if __name__ == "__main__":
    sys.exit(main())
