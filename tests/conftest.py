"""Tests work on small tensors: one thread is faster than two that wait for each other, and leaves a core free."""

import torch

torch.set_num_threads(1)
