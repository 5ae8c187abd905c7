"""Search with a correction for hubs, images that too many queries find, and compare with the plain search.

    python examples/use_corrected_search.py runs/demo

The correction is fitted on texts of the training data, without labels. `nuclr evaluate RUN --correct bank=train` does
the same with all metrics.
"""

import sys

import torch

from nuclr.data import open_pairs
from nuclr.models import DualEncoder
from nuclr.popularity import PopularityCorrection, hubness


def main() -> None:
    train, held_out = (open_pairs(f"builtin:n=500,shapes=2,split={split}") for split in ("train", "val"))
    model = DualEncoder.from_pretrained(f"{sys.argv[1]}/model")
    bank = model.encode_texts([train.item("y", i) for i in range(500)])
    gallery = model.encode_images([held_out.item("x", i) for i in range(500)])
    queries = model.encode_texts([held_out.item("y", i) for i in range(500)])

    fix = PopularityCorrection().fit(bank, gallery)
    items, corrected = fix.gallery(gallery), fix.queries(queries)  # one more coordinate, for any index

    for name, x, y in (("plain", gallery, queries), ("corrected", items, corrected)):
        found = (y @ x.T).topk(10).indices
        recall = (found == torch.arange(500)[:, None]).any(1).float().mean()
        never = 1 - len(found.unique()) / 500
        print(f"{name}: recall@10 {recall:.1%}, {never:.1%} of the images are never among the first ten")
    print(f"skewness of the number of queries that find an image: {hubness(queries, gallery, k=10).skewness:.2f}")


if __name__ == "__main__":
    main()
