"""Tests with the real packages that nuclr works with; `make integrations` installs them and runs these tests.

A module of tests starts with `pytest.importorskip` for its package. Tests marked `open_clip` need a torchvision whose
compiled operators do not work on every machine; the schemas of two of them must exist before it can be imported.
"""

import importlib.util

import torch

from tests.export.conftest import runs  # noqa: F401 (a fixture)

if importlib.util.find_spec("torchvision") is not None:
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
