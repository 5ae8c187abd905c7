"""The only owner of time: what changes during a run, as pure functions of where it is.

t counts epochs with fractions: in step k of an epoch of S steps, t = epoch + k / S.
"""

import math


def cosine(start: float, end: float, progress: float) -> float:
    """From `start` at progress 0 to `end` at 1, and there it stays."""
    return end + (start - end) * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0))) / 2


def learning_rate(step: int, steps: int, warmup: int, start: float, peak: float, end: float) -> float:
    """In step 0, ..., steps - 1 of the run: linear from `start` to `peak` in `warmup` steps, then a cosine to `end`."""
    if step < warmup:
        return start + (peak - start) * step / warmup
    return cosine(peak, end, (step - warmup) / max(1, steps - warmup))


def zeta_rate(t: float, epochs: int, peak: float, frozen: int, shape: str, steps: bool) -> float:
    """Step of zeta: 0 for `frozen` epochs, then constant or a cosine to 0 at the end.

    `steps` divides it by 10 from half, and by 100 from three quarters of the epochs on, as the published code does.
    """
    if t < frozen:
        return 0.0
    rate = cosine(peak, 0.0, (t - frozen) / max(1, epochs - frozen)) if shape == "cosine" else peak
    if steps:
        rate /= 100 if t >= 0.75 * epochs else 10 if t >= 0.5 * epochs else 1
    return rate


def gamma(t: float, epochs: int, value: float, shape: str) -> float:
    """Weight of the new batch in the running averages: constant, or a cosine from 1 down to `value`."""
    return cosine(1.0, value, t / epochs) if shape == "cosine" else value
