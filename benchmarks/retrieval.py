"""Memory and time of retrieval metrics from features: n images and n captions, both directions.

    python benchmarks/retrieval.py [--n 100000] [--width 256] [--out FILE.json]

Peak memory is that of the process, minus its memory after creating the features.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from torch.nn.functional import normalize

from nuclr.evaluation import retrieval_metrics


def peak() -> int:
    """Return the peak memory of the process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Print a line and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "retrieval.json")
    options = parser.parse_args()
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
