"""Search your own vectors with faiss, ranked by score minus popularity.

    pip install '.[indexes]'
    python examples/corrected_search.py QUERIES.npy GALLERY.npy FOUND.npy

QUERIES and GALLERY are vectors of one model, a row each. The queries of even number fit the correction, which needs no
labels, and those of odd number are searched. FOUND gets the rows of the ten items that each of them finds.
"""

import sys

import faiss
import numpy as np

from nuclr.popularity import PopularityCorrection, hubness

K = 10


def main() -> None:
    queries, gallery = np.load(sys.argv[1]), np.load(sys.argv[2])
    fix = PopularityCorrection(normalize=True).fit(queries[::2], gallery)
    queries = queries[1::2]

    items = fix.gallery(gallery).numpy()  # one more coordinate, which holds the bias
    index = faiss.IndexFlatIP(items.shape[1])
    index.add(items)
    _, found = index.search(fix.queries(queries).numpy(), K)
    np.save(sys.argv[3], found)

    plain = hubness(queries, gallery, k=K, normalize=True).counts
    corrected = np.bincount(found.ravel(), minlength=len(gallery))
    for name, counts in (("plain", plain.numpy()), ("corrected", corrected)):
        print(
            f"{name}: {np.mean(counts == 0):.1%} of the items are never found, "
            f"and the largest hub is found by {counts.max()} of {len(queries)} queries"
        )


if __name__ == "__main__":
    main()
