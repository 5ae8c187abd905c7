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


def test_wrong_output_and_commands_that_fail_are_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    shown = "```text\nrecall@1   {}\n...\n```\n"
    code = '```python title="hello.py"\nprint("recall@1  12.5 %")\n```\n```sh\npython hello.py  # run it\n```\n'
    page.write_text(code + shown.format("99.0 %"))
    tutorials.run_page(str(page), str(tmp_path))
    page.write_text(code + shown.format("points"))
    with pytest.raises(AssertionError, match=r"page\.md:8.*recall@# points"):
        tutorials.run_page(str(page), str(tmp_path))
    page.write_text("```sh\nnuclr hubness missing.npy\n```\n")
    with pytest.raises(AssertionError, match=r"nuclr hubness missing\.npy.*2"):
        tutorials.run_page(str(page), str(tmp_path))
