"""How pages write numbers: everywhere in the same way, with a true minus sign and narrow spaces."""

import math

_SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
MISSING = "\u2013"
TIMES, SPACE = "\u00d7", "\u202f"  # the space is narrow and does not break a line


def count(value: float) -> str:
    """Write a whole number with separators: 12,000."""
    return f"{round(value):,}"


def percent(value: float | None, digits: int = 1) -> str:
    """Write a fraction as percent: 0.249 is 24.9 %."""
    if value is None or not math.isfinite(value):
        return MISSING
    return _minus(f"{100 * value:.{digits}f}") + f"{SPACE}%"


def number(value: float | None, digits: int = 3) -> str:
    """Write significant digits, with powers of ten if very large or small: 0.0123, 4,210, 1.2 x 10⁻⁵."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if -4 <= exponent < 6:
        decimals = max(0, digits - 1 - exponent)
        text = f"{value:,.{decimals}f}"
        return _minus(text.rstrip("0").rstrip(".") if "." in text else text)
    mantissa, power = f"{value:.{digits - 1}e}".split("e")
    short = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    ten = f"10{str(int(power)).translate(_SUPERSCRIPT)}"
    return ten if short == "1" else _minus(f"{short}{SPACE}{TIMES}{SPACE}{ten}")


def times(value: float | None) -> str:
    """Write a popularity as a multiple of the mean: 12.3, 1.30 or 0.0048 with a multiplication sign."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value < 0.095:
        return number(value, 2) + TIMES
    return f"{value:,.{0 if value >= 99.5 else 1 if value >= 9.95 else 2}f}{TIMES}"


def signed(value: float) -> str:
    """Write a difference in points: +1.25."""
    return _minus(f"{value:+.2f}") if math.isfinite(value) else MISSING


def score(value: float) -> str:
    """Write a cosine or a correlation with three decimals."""
    return _minus(f"{value:.3f}") if math.isfinite(value) else MISSING


def _minus(text: str) -> str:
    return text.replace("-", "\u2212")
