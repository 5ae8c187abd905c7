"""The scheduled check of docs/production.md, as a program that a scheduler runs."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from nuclr.popularity import PopularityCorrection

PAGE = Path(__file__).parents[2] / "docs" / "production.md"


@pytest.mark.parametrize(("about_one_part", "status"), [(False, 0), (True, 1)])
def test_the_check_on_a_schedule(tmp_path, about_one_part, status):
    """Its status is 0 for other queries of the log's kind, and 1 once half of them are about one of eight topics."""
    generator = torch.Generator().manual_seed(3)
    centers = torch.randn(8, 16, generator=generator)

    def ask(topic):
        return normalize(centers[topic] + 0.7 * torch.randn(len(topic), 16, generator=generator), dim=1)

    every = torch.arange(400) % 8
    (tmp_path / "hubness").mkdir()
    fix = PopularityCorrection().fit(ask(every), ask(every))
    fix.save(tmp_path / "hubness" / "correction.safetensors")
    queries = ask(torch.where(every % 2 == 0, 0, every) if about_one_part else every)
    np.save(tmp_path / "last_week.npy", queries.numpy())
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert len(done.stdout.splitlines()) == 1 and "bank" in done.stdout
