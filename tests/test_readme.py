"""The code of the README runs, on small data."""

import os
from pathlib import Path

import pytest

from tests import forks, tutorials
from tests.training import runs

README = Path(__file__).parents[1] / "README.md"
# tests/integrations runs the following, with the packages that they need.
TRAINER, EXPORT = "nuclr.integrations", "nuclr export"
SET_UP = '''
import csv
import numpy
import torch
from torch.nn.functional import normalize

torch.manual_seed(0)
past_queries, gallery, queries = (normalize(torch.randn(n, 8), dim=1).numpy() for n in (60, 40, 5))
numpy.save("queries.npy", past_queries)
numpy.save("gallery.npy", gallery)
numpy.save("test.npy", past_queries)
numpy.save("log.npy", normalize(torch.randn(50, 8), dim=1).numpy())
numpy.savetxt("items.txt", range(40), "item %d")
numpy.savetxt("queries.txt", range(60), "query %d")
numpy.savetxt("answers.txt", [(i, i % 40) for i in range(60)], "%d")


class Index:
    """An inner-product index, with the interface of faiss."""

    def add(self, vectors):
        self.vectors = torch.as_tensor(vectors)

    def search(self, queries, k):
        return (torch.as_tensor(queries) @ self.vectors.T).topk(k)


index = Index()
colors, things = ("red", "blue", "green", "black", "white"), ("house", "boat", "tree", "bird", "road", "hat", "cup")
rows = [(f"what is a {c} {t}?", f"it is a {t}, and it is {c}") for c in colors for t in things]
for name, part in (("pairs.csv", rows[12:]), ("held_out.csv", rows[:12])):
    with open(name, "w", newline="") as file:
        csv.writer(file).writerows([("question", "answer"), *part])
dataset = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randn(64, 6), torch.arange(64))
loader = torch.utils.data.DataLoader(dataset, batch_size=16)
tower = torch.nn.Linear(6, 4)
model = lambda x, y: (normalize(tower(x), dim=1), normalize(tower(y), dim=1))
'''
SMALL = "data.batch_size=8 schedule.epochs=1 threads=1 data.workers=1"


@pytest.mark.slow
def test_the_code_of_the_readme_runs(tmp_path):
    kept = [block for block in tutorials.blocks(README) if TRAINER not in block.code]
    assert [block.language for block in kept] == ["python", "sh", "sh", "python"]
    page = tmp_path / "page.md"
    lines = "".join(f"```{block.language}\n{block.code}```\n" for block in kept).splitlines(keepends=True)
    code = "".join(line for line in lines if not line.startswith(EXPORT))
    page.write_text(f"```python{SET_UP}```\n" + code.replace("out=runs/mine ", f"out=runs/mine {SMALL} "))
    process = forks.Fork(tutorials.run_page, [str(page), str(tmp_path)], dict(os.environ))
    [(status, _, err)] = runs.finish([process])
    assert status == 0, err[-3000:]
    assert (tmp_path / "hubness" / "report.html").exists() and (tmp_path / "held_out.npz").exists()
