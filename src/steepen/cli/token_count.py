"""Token counts on the command line: 250000, 2e9, 100M, 30B."""

from __future__ import annotations

import math

import typer

from steepen.errors import show

MAX_TOKENS = 1e15
SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_token_count(text: str | float) -> int:
    """The whole number that a text such as 250000, 2e9, 100M or 30B means."""
    if not isinstance(text, str):
        text = repr(text)
    words = text.strip().replace(",", "").replace("_", "")
    factor = SUFFIXES.get(words[-1:].upper(), 1.0)
    try:
        value = float(words if factor == 1.0 else words[:-1]) * factor
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_TOKENS:
        value = math.nan
    if not math.isfinite(value) or value != round(value):
        raise typer.BadParameter(
            f"{show(text)} is not a whole number of tokens from 0 to 1e15, such as 250000, 2e9 or 100M."
        )
    return round(value)
