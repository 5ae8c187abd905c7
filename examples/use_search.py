"""Search images with texts: encode the gallery once, then every query.

python examples/use_search.py runs/demo "a red circle"
"""

import sys

from nuclr.data import open_pairs
from nuclr.models import DualEncoder


def main() -> None:
    run, queries = sys.argv[1], sys.argv[2:]
    pairs = open_pairs("builtin:n=500,split=val,shapes=2")
    model = DualEncoder.from_pretrained(f"{run}/model")
    gallery = model.encode_images([pairs.item("x", i) for i in range(len(pairs))])
    scores, found = (model.encode_texts(queries) @ gallery.T).topk(3)
    for query, row, numbers in zip(queries, scores, found, strict=True):
        print(query)
        for score, number in zip(row.tolist(), numbers.tolist(), strict=True):
            print(f"  {score:.3f}  image {number}: {pairs.item('y', number)}")


if __name__ == "__main__":
    main()
