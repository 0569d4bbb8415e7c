"""Numbers as people read them; the same in tables, hover texts and on axes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, TypeGuard

NOTHING = "–"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def superscript(power: int) -> str:
    """An exponent in small raised digits."""
    return str(power).translate(_SUPERSCRIPT)


def minus(text: str) -> str:
    """Typographic minus signs in a number's text."""
    return text.replace("-", "−")


def scientific(value: float, digits: int = 3) -> str:
    """1.23×10¹⁸."""
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    mantissa = minus(mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa)
    return f"{mantissa}×10{superscript(int(power))}"


def pretty(text: str) -> str:
    """A label in which numbers written for machines (3e+17) are written for people (3×10¹⁷)."""
    return re.sub(r"(?<![\w.])(\d(?:\.\d+)?)e([+-]?\d{1,3})(?!\w)", _powers, text)


def _powers(match: re.Match[str]) -> str:
    mantissa, power = match.group(1), superscript(int(match.group(2)))
    return f"10{power}" if mantissa == "1" else f"{mantissa}×10{power}"


def readable(value: Any, digits: int = 4) -> str:
    """One value on its own, to a few significant digits."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and abs(value) < 10**7:
        return minus(f"{value:,}")
    if isinstance(value, int | float):
        return _float(float(value), digits)
    if isinstance(value, list | tuple):
        return _several(list(value), digits)
    if isinstance(value, dict):
        return ", ".join(f"{key} {readable(item, digits)}" for key, item in value.items())
    return str(value)


def _float(value: float, digits: int) -> str:
    if math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        return scientific(value, min(digits, 3))
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return minus(text.rstrip("0").rstrip(".") if "." in text else text)


def _several(values: list[Any], digits: int) -> str:
    """A pair of numbers is an interval; anything else is a list."""
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if len(values) == 2 and numbers and values[0] <= values[1]:
        return f"{readable(values[0], digits)} to {readable(values[1], digits)}"
    return ", ".join(readable(value, digits) for value in values)


def column(values: Sequence[Any]) -> list[str]:
    """A table's column: ordinary fractions share their number of decimals, so that they can be compared."""
    fractions = [v for v in values if isinstance(v, float) and math.isfinite(v)]
    sizes = [abs(v) for v in fractions if v != 0]
    if not sizes or not 1e-3 <= max(sizes) < 1e6 or any(isinstance(v, list | tuple) for v in values):
        return [readable(value) for value in values]
    decimals = max(0, min(4, 4 - math.floor(math.log10(max(sizes)))))
    if any(round(size, decimals) == 0 for size in sizes):  # a p-value must not become 0.0000
        return [readable(value) for value in values]
    while decimals and all(round(v, decimals - 1) == round(v, decimals) for v in fractions):
        decimals -= 1
    return [
        minus(f"{value:,.{decimals}f}")
        if isinstance(value, float) and math.isfinite(value)
        else readable(value)
        for value in values
    ]


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a cell holds a number (and belongs on the right of its column)."""
    return isinstance(value, int | float) and not isinstance(value, bool)
