"""The public API as a user meets it: lazy import, docstrings, one-line reprs, numpy arrays as welcome as tensors."""

import importlib
import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

import nuclr
from nuclr import evaluation, objectives, popularity
from nuclr.data import open_pairs

PACKAGES = ("objectives", "popularity", "evaluation", "data", "models")


def test_importing_nuclr_imports_neither_torch_nor_numpy():
    code = "import nuclr, sys; print([name for name in ('torch', 'numpy', 'typer') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_names_are_reached_lazily():
    assert {*PACKAGES, "build", "solve", "__version__"} <= set(dir(nuclr))
    assert all(getattr(nuclr, name) is not None for name in nuclr.__all__)
    assert nuclr.build is objectives.build and nuclr.solve is popularity.solve
    with pytest.raises(AttributeError, match="optimise"):
        nuclr.optimise  # noqa: B018


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_hide_no_module_and_are_documented(package):
    module = importlib.import_module(f"nuclr.{package}")
    assert not [name for name in module.__all__ if importlib.util.find_spec(f"nuclr.{package}.{name}") is not None]
    for name in module.__all__:
        thing = getattr(module, name)
        if not callable(thing):
            continue
        text = inspect.getdoc(thing)
        assert text, f"{name} has no docstring"
        if inspect.isfunction(thing):
            if inspect.signature(thing).parameters:
                assert "\nArgs:\n" in text, f"{name}: the docstring has no Args section"
            if inspect.signature(thing).return_annotation not in (None, "None"):
                says = text.startswith(("Return ", "Yield ")) or "\nReturns:\n" in text or "\nYields:\n" in text
                assert says, f"{name}: the docstring does not say what it returns"


def test_reprs_are_one_line():
    scores = torch.eye(4)
    result = popularity.solve(scores=scores, temperature=0.5)
    ranks = evaluation.query_ranks_from_scores(scores, torch.arange(4).repeat(2, 1).T)
    for thing in (result, ranks, open_pairs("builtin:n=20")):
        text = repr(thing)
        assert "\n" not in text and len(text) < 200 and " object at 0x" not in text


# numpy arrays give the same as tensors

X, Y = normalize(torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=-1)
LINKS = np.arange(6).repeat(2).reshape(6, 2)
LABELS = [0, 1, 2, 0, 1, 2]

CALLS = {
    "solve": lambda x, y: popularity.solve(x=x, y=y, temperature=0.2).zeta,
    "solve scores": lambda x, _: popularity.solve(scores=x, temperature=0.2).zeta,
    "extend": lambda x, y: popularity.solve(x=x, y=y, temperature=0.2).extend(y),
    "bias": lambda x, y: popularity.PopularityCorrection(0.2).fit(x, y).bias(y),
    "tuned bias": lambda x, y: popularity.PopularityCorrection().fit(x, y, pairs=(x, y, LINKS)).bias(y),
    "gallery": lambda x, y: popularity.PopularityCorrection(0.2).fit(x, y).gallery(x),
    "queries": lambda x, _: popularity.PopularityCorrection().queries(x),
    "query_ranks": lambda x, y: evaluation.query_ranks(x, y, LINKS).expected(),
    "query_ranks_from_scores": lambda x, _: evaluation.query_ranks_from_scores(x[:4], LINKS[:4]).expected(),
    "retrieval_metrics": lambda x, y: evaluation.retrieval_metrics(x, y, LINKS)["mean_R@1"],
    "zero_shot_metrics": lambda x, y: evaluation.zero_shot_metrics(x, y[:3], LABELS)["zero_shot_acc1"],
    "knn_accuracy": lambda x, y: evaluation.knn_accuracy(x, LABELS, y, LABELS, k=2),
    "knn_metrics": lambda x, _: evaluation.knn_metrics(x, LABELS)["knn_acc1"],
    "class_features": lambda x, y: evaluation.class_features([x, y]),
    "rank_correlation": lambda x, y: evaluation.rank_correlation(x[:, 0], y[:, 0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_numpy_arrays_give_the_same_as_tensors_and_other_types_are_refused(name):
    expected = CALLS[name](X, Y)
    outcome = CALLS[name](X.numpy(), Y.numpy())
    assert isinstance(outcome, type(expected))
    np.testing.assert_array_equal(np.asarray(outcome), np.asarray(expected))
    with pytest.raises((TypeError, ValueError)):
        CALLS[name]("features", "features")
