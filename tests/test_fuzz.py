"""A short run of the fuzzer with a fixed seed; `python benchmarks/fuzz.py` runs 4,000 cases per reader."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FUZZ = ROOT / "benchmarks" / "fuzz.py"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_damaged_files_give_a_result_or_a_clear_error(tmp_path):
    # A real hang never ends, so patience is far longer than in the benchmark: tests share their machine.
    command = [sys.executable, str(FUZZ), "--cases", "25", "--seed", "1", "--patience", "300"]
    command += ["--out", str(tmp_path / "fuzz.json"), "--store", str(tmp_path / "store")]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    reproducers = "\n\n".join(path.read_text() for path in sorted((tmp_path / "store").rglob("outcome.txt"))[:3])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}\n{reproducers}"
    readers = json.loads((tmp_path / "fuzz.json").read_text())["readers"]
    assert len(readers) == 27
    for name, counts in readers.items():
        assert counts["cases"] == 25, name
        assert counts.get("clean", 0) > 0, f"{name}: no damaged file is read, so the fuzzer does not reach the reader"
        assert counts["peak_mib"] < 1024, name


# Memory is measured by resident pages, and the kernel may page out idle ones of a large process meanwhile. So the cases
# run in a small process, and the one that takes memory takes three times the limit.
EVERY_KIND = """
import json, os, sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import fuzz
from nuclr.errors import UserError

fuzz.MEMORY = 2**27  # small, because a slow machine takes seconds to allocate gigabytes
folder = Path(sys.argv[2])


def read(files, case):
    if case == 1:
        raise KeyError("a traceback")
    if case == 2:
        os.abort()
    if case == 3:
        os.read(os.open(files / "pipe.jpg", os.O_RDWR), 1)
    if case == 4:
        bytearray(3 * 2**27)
    if case == 5:
        raise UserError("a clear line")


fuzz.READERS["fake"] = fuzz.Reader(lambda _: [{"a.txt": b"1\\n2\\n"}], read, ("*",))
# On a slow machine any case may take seconds. Only the case that hangs is therefore run with little patience.
counts = Counter()
for cases, patience in ((range(3), 600.0), (range(3, 4), 2.0), (range(4, 7), 600.0)):
    counts += fuzz.fuzz("fake", cases, 0, patience, folder / "store", folder / "work").counts
(folder / "counts.json").write_text(json.dumps(counts))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_the_fuzzer_notices_every_kind_of_failure(tmp_path):
    command = [sys.executable, "-c", EVERY_KIND, str(FUZZ.parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert counts == {"clean": 2, "error": 1, "traceback": 1, "crash": 1, "hang": 1, "memory": 1}
    assert sorted(int(path.name) for path in (tmp_path / "store" / "fake").iterdir()) == [1, 2, 3, 4]
    assert "KeyError: 'a traceback'" in (tmp_path / "store" / "fake" / "1" / "outcome.txt").read_text()
