"""Evaluate an exported model with MTEB, on the held-out pairs of a run on two texts.

    pip install '.[st]' mteb
    sh examples/text_pairs.sh
    nuclr export run --to sentence-transformers --out run-st
    python examples/use_mteb.py run-st run
    python examples/use_mteb.py run-st run fix.safetensors

Side x holds the queries and side y the documents. Tasks of MTEB itself work in the same way:
`mteb.evaluate(model, mteb.get_tasks(tasks=["NFCorpus"]))`; they are downloaded.

The file is a correction that `PopularityCorrection.save` wrote. Documents are then ranked by score minus popularity.
"""

import sys
from typing import Any

import mteb
from datasets import Dataset
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from sentence_transformers import SentenceTransformer
from torch import Tensor

from nuclr.popularity import PopularityCorrection
from nuclr.runs.run import Run


class Corrected(SentenceTransformer):
    """A model whose cosines rank documents by score minus popularity: the vectors get two more coordinates."""

    fix: PopularityCorrection

    def encode_query(self, *args: Any, **options: Any) -> Tensor:
        """Return the vectors of queries."""
        return self.fix.queries(super().encode_query(*args, **options), metric="cosine")

    def encode_document(self, *args: Any, **options: Any) -> Tensor:
        """Return the vectors of documents, which hold their popularity."""
        return self.fix.gallery(super().encode_document(*args, **options), metric="cosine")


class HeldOutPairs(AbsTaskRetrieval):
    """Retrieval of y by x among the held-out pairs of a run."""

    metadata = TaskMetadata(
        name="HeldOutPairs",
        description="Held-out pairs of a run of nuclr",
        dataset={"path": "local", "revision": "1"},
        type="Retrieval",
        category="t2t",
        eval_langs=["eng-Latn"],
        main_score="ndcg_at_10",
    )

    def __init__(self, run: Run) -> None:
        super().__init__()
        held_out = run.val
        self.pairs = [(held_out.pairs.item("x", int(n)), held_out.pairs.item("y", int(n))) for n in held_out.numbers]

    def load_data(self, *_: object, **__: object) -> None:
        """Fill `dataset`; texts that occur in several pairs are one query or document."""
        queries, documents = (list(dict.fromkeys(texts)) for texts in zip(*self.pairs, strict=True))
        relevant = {f"q{number}": {} for number in range(len(queries))}
        for x, y in self.pairs:
            relevant[f"q{queries.index(x)}"][f"d{documents.index(y)}"] = 1
        split = {
            "queries": Dataset.from_list([{"id": f"q{i}", "text": text} for i, text in enumerate(queries)]),
            "corpus": Dataset.from_list([{"id": f"d{i}", "text": text} for i, text in enumerate(documents)]),
            "relevant_docs": relevant,
            "top_ranked": None,
        }
        self.dataset, self.data_loaded = {"default": {"test": split}}, True


def main() -> None:
    folder, run = sys.argv[1], Run.open_finished(sys.argv[2])
    model = SentenceTransformer(folder)
    if len(sys.argv) > 3:
        model = Corrected(folder)
        model.fix = PopularityCorrection.load(sys.argv[3])
    result = mteb.evaluate(model, HeldOutPairs(run), cache=None, show_progress_bar=False)
    (scores,) = result.task_results[0].scores["test"]
    for name in ("recall_at_1", "recall_at_10", "ndcg_at_10", "mrr_at_10"):
        print(f"{name} {scores[name]:.4f}")


if __name__ == "__main__":
    main()
