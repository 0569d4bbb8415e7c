"""What is known of the irreducible loss before a fit: a value, or a value with its standard deviation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steepen.errors import UsageError


@dataclass(frozen=True)
class Prior:
    """A normal prior; without `sd` the value is fixed."""

    mean: float
    sd: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.mean < math.inf:
            raise UsageError(f"the irreducible loss is {self.mean}; it must be zero or more.")
        if self.sd is not None and not 0 < self.sd < math.inf:
            raise UsageError(
                f"the standard deviation of the irreducible loss is {self.sd}; give one above 0."
            )

    @classmethod
    def from_text(cls, text: str) -> Prior:
        """Parse `1.69` or `1.69±0.05` (also `1.69+-0.05`)."""
        mean, sign, sd = text.replace("+/-", "±").replace("+-", "±").partition("±")
        try:
            return cls(float(mean), float(sd) if sign else None)
        except ValueError:
            raise UsageError(f"the irreducible loss is {text!r}; write 1.69 or 1.69±0.05.") from None

    def __str__(self) -> str:
        return f"{self.mean:g}" + ("" if self.sd is None else f"±{self.sd:g}")
