"""Every page of docs/tutorials runs from its first block to its last, and prints what it shows."""

import os
from pathlib import Path

import pytest

from tests import forks, tutorials
from tests.training import runs

PAGES = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_runs(page, tmp_path):
    found = tutorials.blocks(page)
    assert {block.language for block in found} & {"python", "sh"}
    assert {block.language for block in found if not block.title} <= {"python", "sh", "text"}
    process = forks.Fork(tutorials.run_page, [str(page), str(tmp_path)], dict(os.environ))
    [(status, _, err)] = runs.finish([process])
    assert status == 0, err[-3000:]
