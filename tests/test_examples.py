"""The examples run as their first lines say."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_own_loop() -> None:
    done = subprocess.run([sys.executable, EXAMPLES / "own_loop.py"], capture_output=True, text=True, check=True)
    assert float(done.stdout.split("recall@1 ")[1].split("%")[0]) > 50
