"""Numbers, counts, FLOPs and durations as text, in one format; and text without control characters.

`CostAxis` has the words for what ladders are measured along: FLOPs, time, tokens or dollars.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import IO, Any, TextIO, TypeGuard

MISSING = "–"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def superscript(power: int) -> str:
    """An integer exponent in superscript digits: 18 → ¹⁸."""
    return str(power).translate(_SUPERSCRIPT)


def typographic_minus(text: str) -> str:
    """Replace hyphens in a number's text by typographic minus signs."""
    return text.replace("-", "−")


def scientific(value: float, digits: int = 3) -> str:
    """A number in scientific notation: 1.23×10¹⁸."""
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    mantissa = typographic_minus(mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa)
    return f"{mantissa}×10{superscript(int(power))}"


def pretty_exponents(text: str) -> str:
    """Rewrite the numbers in a label from 3e+17 to 3×10¹⁷."""
    return re.sub(r"(?<![\w.])(\d(?:\.\d+)?)e([+-]?\d{1,3})(?!\w)", _power_of_ten, text)


def _power_of_ten(match: re.Match[str]) -> str:
    mantissa, power = match.group(1), superscript(int(match.group(2)))
    return f"10{power}" if mantissa == "1" else f"{mantissa}×10{power}"


def compute_factor(multiplier: float) -> str:
    """A compute multiplier in words: 1.25 → "1.25× less compute", 0.41 → "2.4× more compute"."""
    value, word = (multiplier, "less") if multiplier >= 1 else (1 / multiplier, "more")
    return f"{value:.3g}× {word} compute" if value >= 1.005 else "the same compute"


def format_value(value: Any, digits: int = 4) -> str:
    """A cell's value as text, floats to `digits` significant digits; None and NaN as a dash."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and abs(value) < 10**7:
        return typographic_minus(f"{value:,}")
    if isinstance(value, int | float):
        return _format_float(float(value), digits)
    if isinstance(value, list | tuple):
        return _format_list(list(value), digits)
    if isinstance(value, dict):
        return ", ".join(f"{key} {format_value(item, digits)}" for key, item in value.items())
    return str(value)


def _format_float(value: float, digits: int) -> str:
    if math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        return scientific(value, min(digits, 3))
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return typographic_minus(text.rstrip("0").rstrip(".") if "." in text else text)


def _format_list(values: list[Any], digits: int) -> str:
    """An ascending pair of numbers as an interval, anything else as a comma-separated list."""
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if len(values) == 2 and numbers and values[0] <= values[1]:
        return f"{format_value(values[0], digits)} to {format_value(values[1], digits)}"
    return ", ".join(format_value(value, digits) for value in values)


def format_column(values: Sequence[Any]) -> list[str]:
    """A table's column as text; its floats get one common number of decimals, so that they compare."""
    decimals = _common_decimals(values)
    return [
        typographic_minus(f"{value:,.{decimals}f}")
        if decimals is not None and isinstance(value, float) and math.isfinite(value)
        else format_value(value)
        for value in values
    ]


def _common_decimals(values: Sequence[Any]) -> int | None:
    """Decimals for all floats of a column; None where one of them would be hard to read with these."""
    fractions = [v for v in values if isinstance(v, float) and math.isfinite(v)]
    sizes = [abs(v) for v in fractions if v != 0]
    if not sizes or not 1e-3 <= max(sizes) < 1e6 or any(isinstance(v, list | tuple) for v in values):
        return None
    decimals = max(0, min(4, 4 - math.floor(math.log10(max(sizes)))))
    if any(round(size, decimals) == 0 for size in sizes):  # a p-value must not become 0.0000
        return None
    while decimals and all(round(v, decimals - 1) == round(v, decimals) for v in fractions):
        decimals -= 1
    return decimals


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a cell holds a number (and is right-aligned)."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def format_flops(flops: float, digits: int = 3) -> str:
    """FLOPs to `digits` significant digits: 1.2e21."""
    return f"{flops:.{digits}g}".replace("e+", "e")


def format_count(value: float) -> str:
    """A large count in a few characters: 1.2M, 345k, 87."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.0f}"


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 run, 3 runs."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_bytes(count: float) -> str:
    """A number of bytes: 1.2 GB, 345 kB."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"


# Control characters except newline and tab, and marks that change the direction of text.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, keep: str = "") -> str:
    """The text with � for every character that could control a terminal or cannot be encoded.

    Characters in `keep` stay.
    """
    return _UNPRINTABLE.sub(lambda match: match[0] if match[0] in keep else "�", text)


def printable_values(value: Any) -> Any:
    """A JSON value with every text in it printable, names of fields too."""
    if isinstance(value, dict):
        return {printable(str(key)): printable_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [printable_values(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def wrap_to_terminal(text: str, stream: TextIO) -> str:
    """Break lines at words to the width of the terminal, if `stream` is one; control characters become �."""
    text = printable(text)
    if not stream.isatty():
        return text
    wrapper = textwrap.TextWrapper(
        shutil.get_terminal_size().columns, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(line) for line in text.split("\n"))


def format_clock(seconds: float) -> str:
    """Seconds as 2:03 or 1:02:03."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def format_duration(seconds: float) -> str:
    """A duration in at most two units: 45 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if not math.isfinite(seconds):
        return "unknown"
    whole = max(0, round(seconds))
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    for (unit, size), (smaller, smaller_size) in itertools.pairwise(units):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def percent(fraction: float) -> str:
    """A fraction in percent, with up to three digits: 90%, 2.5%. Only 1 is 100%: 99.95%, 99.9999%."""
    shown = f"{100 * fraction:.3g}"
    if fraction < 1 and float(shown) >= 100:
        shown = f"{100 - float(f'{100 * (1 - fraction):.1g}'):.10g}"
    return f"{shown}%"


def format_change(first: object, last: object) -> str:
    """A value that growth changes, as "11 → 17"; once if it does not."""
    return str(first) if first == last else f"{first} → {last}"


def format_passes(passes: Sequence[int]) -> str:
    """Core passes of a stage: "2", or "1..8" where they are drawn."""
    return str(passes[0]) if len(passes) == 1 else f"{min(passes)}..{max(passes)}"


class PrintableStream:
    """A text stream that replaces control characters in what is written to it."""

    def __init__(self, stream: Any, keep: str = "") -> None:
        self.rich_proxied_file = stream  # rich writes to the stream of this name
        self._keep = keep

    def write(self, text: str) -> int:
        """Write printable text; returns its length."""
        return self.rich_proxied_file.write(printable(text, self._keep))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def unwrapped(stream: IO[str]) -> IO[str]:
    """The stream behind `PrintableStream` and rich's own proxies, for control sequences of steepen itself."""
    while (inner := getattr(stream, "rich_proxied_file", None)) is not None:
        stream = inner
    return stream


@contextlib.contextmanager
def printable_output() -> Generator[None]:
    """Let only printable text reach standard output and standard error, whoever prints it."""
    before = sys.stdout, sys.stderr
    # Progress bars of other libraries go to standard error and return to the start of the line.
    streams: Any = PrintableStream(sys.stdout), PrintableStream(sys.stderr, keep="\r")
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@dataclass(frozen=True)
class CostAxis:
    """A cost of training: its column, its unit, the noun of sentences and the label of axes."""

    column: str
    unit: str
    noun: str
    label: str


FLOPS = CostAxis("flops", "FLOPs", "compute", "training compute (FLOPs)")
AXES = (
    FLOPS,
    CostAxis("seconds", "seconds", "time", "training time (seconds)"),
    CostAxis("hours", "hours", "time", "training time (hours)"),
    CostAxis("tokens", "tokens", "data", "training tokens"),
    CostAxis("dollars", "dollars", "cost", "training cost (dollars)"),
)


def cost_axis(name: str) -> CostAxis:
    """The axis of a column or a unit; any other name is a unit and noun of its own."""
    known = next((one for one in AXES if name.casefold() in (one.column, one.unit.casefold())), None)
    return known or CostAxis(name, name, name, name)
