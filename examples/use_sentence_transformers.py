"""Use the text side of a model in sentence-transformers, here to find similar captions.

pip install '.[st]'
nuclr export runs/demo --to sentence-transformers --out demo-st
python examples/use_sentence_transformers.py demo-st "a red circle"
"""

import sys

from sentence_transformers import SentenceTransformer
from sentence_transformers.util import semantic_search

from nuclr.data import open_pairs


def main() -> None:
    folder, queries = sys.argv[1], sys.argv[2:]
    pairs = open_pairs("builtin:n=500,split=val")
    texts = [pairs.item("y", i) for i in range(len(pairs))]

    model = SentenceTransformer(folder)
    corpus = model.encode(texts, convert_to_tensor=True)
    found = semantic_search(model.encode(queries, convert_to_tensor=True), corpus, top_k=3)

    for query, hits in zip(queries, found, strict=True):
        print(query)
        for hit in hits:
            print(f"  {hit['score']:.3f}  {texts[hit['corpus_id']]}")


if __name__ == "__main__":
    main()
