"""A limit on what one call may spend: FLOPs, or time."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field

from steepen.errors import SteepenError, UsageError
from steepen.utils.formatting import format_duration

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class BudgetReached(SteepenError):
    """The runs that are left do not fit into the budget; all that was started has been finished."""

    exit_code = 3
    resumable = True


@dataclass
class Budget:
    """Admits runs while they fit. Time counts from the budget's making, FLOPs from the runs it admitted."""

    flops: float | None = None
    seconds: float | None = None
    spent: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @staticmethod
    def parse(text: str) -> Budget:
        """`1e15` is FLOPs; `90s`, `30m`, `2h`, `1d` and `1h30m` are time."""
        words = text.strip().lower().replace(" ", "")
        if re.fullmatch(r"(\d+(\.\d+)?[smhd])+", words):
            parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", words)
            return Budget(seconds=sum(float(number) * _UNITS[unit] for number, unit in parts))
        try:
            value = float(words.removesuffix("flops"))
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise UsageError(
                f"--budget {text!r} is not valid: give FLOPs (1e15) or time (90s, 30m, 2h, 1h30m)."
            )
        return Budget(flops=value)

    def admits(self, flops: float, seconds: float) -> bool:
        """Whether a run of this cost fits; one that does is counted as spent."""
        if self.flops is not None and self.spent + flops > self.flops:
            return False
        if self.seconds is not None and time.monotonic() - self.began + seconds > self.seconds:
            return False
        self.spent += flops
        return True

    def serves_again(self, flops: float, seconds: float) -> bool:
        """Whether the same budget, given anew, admits a run of this cost."""
        if self.spent == 0:  # nothing was begun under this one; another is no different
            return False
        return flops <= (self.flops or math.inf) and seconds <= (self.seconds or math.inf)

    def needed(self, flops: float, seconds: float) -> str:
        """What a budget of this kind must be to admit a run of this cost; rounded up, so that it does."""
        if self.flops is not None:
            size = 10.0 ** (math.floor(math.log10(flops)) - 2)
            return f"{math.ceil(flops / size) * size:.3g} FLOPs"
        unit = (
            1 if seconds < 3600 else 60 if seconds < 86400 else 3600
        )  # the least that `format_duration` shows
        return format_duration((math.floor(seconds / unit) + 1) * unit)

    def __str__(self) -> str:
        if self.flops is not None:
            return f"{self.flops:.3g} FLOPs"
        return format_duration(self.seconds or 0.0)
