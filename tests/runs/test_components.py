"""The parts of a run, built from its settings."""

import numpy as np
import pytest
import torch

from nuclr.runs import components
from tests.training import runs


def test_vectors_are_standardized(tmp_path):
    settings = runs.load(tmp_path)
    source = components.open_train(settings.data)
    model = components.make_model(settings.model, source, 0)
    x = torch.from_numpy(np.stack([source.pairs.x(i) for i in range(120)]))
    standard = model.x.tower(x)
    assert standard.mean(0).abs().max() < 1e-5
    assert float(standard.square().mean()) == pytest.approx(1, rel=1e-4)
