"""What `pip install nuclr` without extras gives: objectives, popularity and metrics, and a command line that explains.

`.ci/run` runs this file in a virtual environment with only torch, numpy and safetensors: ``python tests/core_only.py``.
"""

import subprocess
import sys
from pathlib import Path

import numpy
import torch

import nuclr.evaluation
import nuclr.objectives
import nuclr.popularity

torch.manual_seed(0)


def check(condition: object, message: str) -> None:
    if not condition:
        sys.exit(f"core only: {message}")


def objective_step() -> None:
    features = torch.nn.functional.normalize(torch.randn(2, 8, 4), dim=-1).requires_grad_()
    for name in ("clip", "siglip", "dcl", "cyclip", "sogclr", "isogclr", "nuclr"):
        objective = nuclr.build(name, num_samples=32)
        out = objective(features[0], features[1], torch.arange(8))
        out.loss.backward()
        check(features.grad is not None and features.grad.isfinite().all(), f"{name}: the gradient is not finite")


def solve_and_metrics() -> None:
    x, y = torch.nn.functional.normalize(torch.randn(2, 40, 8, dtype=torch.float64), dim=-1)
    result = nuclr.solve(x=x, y=y, temperature=0.1)
    check(result.converged and len(result.zeta) == 40, f"solve did not converge: {result}")
    metrics = nuclr.evaluation.retrieval_metrics(x, x, torch.arange(40).repeat(2, 1).T)
    check(metrics["image_to_text_R@1"] == 1, f"identical features must be found: {metrics}")


def package_data() -> None:
    source, installed = Path(__file__).parents[1] / "src" / "nuclr", Path(nuclr.__file__).parent
    files = {path.relative_to(source) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    missing = sorted(str(path) for path in files if not (installed / path).is_file())
    check(not missing, f"not installed: {missing}")


def command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "nuclr", "--help"], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    check(done.returncode == 2, f"nuclr --help: status {done.returncode}, not 2\n{done.stderr}")
    check(len(lines) == 1 and "pip install 'nuclr[search]'" in lines[0], f"nuclr --help: {done.stderr}")


for package in nuclr.errors.EXTRAS:
    if package == "jinja2":  # torch itself depends on it
        continue
    check(package not in sys.modules, f"{package} was imported by the core")
objective_step()
solve_and_metrics()
package_data()
command_line()
sys.stdout.write(
    f"core only: objectives, popularity and metrics work (torch {torch.__version__}, numpy {numpy.__version__})\n"
)
