"""A limit on what one command may spend: FLOPs or wall-clock time."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field

from steepen.errors import SteepenError, UsageError, shorten
from steepen.utils.formatting import format_duration

MAX_FLOPS = 1e40
MAX_SECONDS = 36_500 * 86_400.0
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class BudgetReached(SteepenError):
    """Some runs do not fit into the budget; those that were started have finished."""

    exit_code = 3
    resumable = True


@dataclass
class Budget:
    """A limit on the FLOPs of the runs admitted so far, or on the time since construction."""

    flops: float | None = None
    seconds: float | None = None
    spent: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @staticmethod
    def parse(text: str) -> Budget:
        """Parse FLOPs (`1e15`) or time (`90s`, `30m`, `2h`, `1d`, `1h30m`)."""
        compact = text.strip().lower().replace(" ", "")
        if re.fullmatch(r"(\d+(\.\d+)?[smhd])+", compact):
            parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", compact)
            seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
            if 0 < seconds <= MAX_SECONDS:
                return Budget(seconds=seconds)
        try:
            value = float(compact.removesuffix("flops"))
        except ValueError:
            value = math.nan
        if not 0 < value <= MAX_FLOPS:
            raise UsageError(
                f"`budget` = {shorten(text)!r} is not valid: give FLOPs (1e15, at most 1e40) or time "
                "(90s, 30m, 2h, 1h30m, at most 36500d)."
            )
        return Budget(flops=value)

    def admits(self, flops: float, seconds: float) -> bool:
        """Whether a run of this cost fits; if so, count it as spent."""
        if self.flops is not None and self.spent + flops > self.flops:
            return False
        if self.seconds is not None and time.monotonic() - self.started + seconds > self.seconds:
            return False
        self.spent += flops
        return True

    def fits_fresh_budget(self, flops: float, seconds: float) -> bool:
        """Whether the same budget, given to a new command, would admit a run of this cost."""
        if self.spent == 0:  # it admitted nothing; a new one would not either
            return False
        return flops <= (self.flops or math.inf) and seconds <= (self.seconds or math.inf)

    def smallest_sufficient(self, flops: float, seconds: float) -> str:
        """The smallest budget of this kind that admits a run of this cost, rounded up."""
        if self.flops is not None:
            size = 10.0 ** (math.floor(math.log10(flops)) - 2)
            return f"{math.ceil(flops / size) * size:.3g} FLOPs"
        unit = 1 if seconds < 3600 else 60 if seconds < 86400 else 3600  # format_duration's resolution
        return format_duration((math.floor(seconds / unit) + 1) * unit)

    def __str__(self) -> str:
        if self.flops is not None:
            return f"{self.flops:.3g} FLOPs"
        return format_duration(self.seconds or 0.0)
