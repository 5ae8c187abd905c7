"""The popularity shown between the samples."""

import torch

from nuclr.studies.toy import figures, spaces


def test_interpolation_returns_the_estimate_at_the_samples():
    sample = spaces.draw(150, 0.2, spaces.generator(0))
    log_q = spaces.popularities(sample)["nuclr"]
    torch.testing.assert_close(figures.interpolate(sample, log_q, sample.y, 0.2), log_q, rtol=0, atol=1e-4)
