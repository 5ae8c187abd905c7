"""Memory and time of retrieval metrics from features: n images and n captions, both directions.

    python benchmarks/retrieval.py [--n 100000] [--width 256] [--out FILE.json]
    python benchmarks/retrieval.py --map FOLDER --n 10000000 --width 64

Peak memory is that of the process, minus its memory after creating the features. `--map` writes the features to shards
of a million rows in FOLDER (float32, 2.5 GB) and applies a correction with a bank of `--bank` queries to them, as
`nuclr hubness` does, on one thread. Its rate is in processor time. It is compared with one product of 262,144 items and
the bank's queries, and the peak memory is that of the whole process. What is in FOLDER is used again.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import normalize

from nuclr.data.vectors import open_vectors
from nuclr.evaluation import retrieval_metrics
from nuclr.popularity import PopularityCorrection
from nuclr.studies.items.row_maps import row_maps
from nuclr.studies.items.rows import check_rows

SHARD = 1_000_000
PRODUCT = 2**18


def peak() -> int:
    """Return the peak memory of the process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def apply_to_shards(folder: Path, n: int, width: int, bank: int) -> None:
    """Print the rate and the memory of a correction that is applied to n items in files."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    queries = normalize(torch.randn(bank, width, generator=generator) + 0.3, dim=1)
    shards = folder / "items"
    shards.mkdir(parents=True, exist_ok=True)
    for start in range(0, n, SHARD):
        path = shards / f"{start:012}.npy"
        if not path.is_file():
            items = torch.randn(min(SHARD, n - start), width, generator=generator) + 0.3
            np.save(path, normalize(items, dim=1).numpy())
            del items
    vectors = check_rows(open_vectors(shards), normalize=True)
    fix = PopularityCorrection(normalize=True).fit(queries, vectors.rows)
    block = vectors.rows[:PRODUCT]
    begin = time.process_time()
    for part in block.split(4096):
        queries @ part.T
    product = (time.process_time() - begin) / len(block)
    with row_maps(folder, [vectors], [bank]) as maps:
        begin = time.process_time()
        bias = fix.bias(vectors.rows, row_map=maps)
        seconds = (time.process_time() - begin) / n
    print(
        f"{len(bias):,} rows of width {width}, bank of {bank:,}, {len(fix.scales_)} scales: "
        f"{1 / seconds:,.0f} rows per second and core, {seconds / product:.2f} times a product of the same size; "
        f"peak {peak() / 2**20:,.0f} MiB"
    )


def main() -> None:
    """Print a line and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "retrieval.json")
    parser.add_argument("--bank", type=int, default=3000)
    parser.add_argument("--map", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.map is not None:
        apply_to_shards(options.map, options.n, options.width, options.bank)
        return
    torch.manual_seed(0)
    x = normalize(torch.randn(options.n, options.width), dim=1)
    y = x + 0.5 * torch.randn(options.n, options.width).mul_(options.width**-0.5)
    y = normalize(y, dim=1)
    links = torch.arange(options.n)[:, None].expand(-1, 2)
    bias = torch.randn(options.n).mul_(0.01)
    retrieval_metrics(x[:500], y[:500], links[:500])  # libraries allocate their own memory on the first call
    before, begin = peak(), time.perf_counter()
    metrics = retrieval_metrics(x, y, links, bias_x=bias, bias_y=bias)
    content = {
        "n": options.n,
        "width": options.width,
        "peak_above_features": peak() - before,
        "features": 2 * options.n * options.width * 4,
        "score_matrix": options.n**2 * 4,
        "seconds": time.perf_counter() - begin,
        "mean_R@1": metrics["mean_R@1"],
    }
    print(
        f"{options.n:,} x {options.n:,}, width {options.width}: "
        f"{content['peak_above_features'] / 2**20:,.0f} MiB above the features "
        f"(the scores alone would take {content['score_matrix'] / 2**20:,.0f} MiB), "
        f"{content['seconds']:.0f} s for both directions"
    )
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
