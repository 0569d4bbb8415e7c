"""Lists on the command line: words with commas, and integers as 2,3,5, 0-2 or 6-20:2."""

from __future__ import annotations

import re

from steepen.errors import UsageError

MAX_INTEGER = 10_000


def parse_words(text: str | None) -> list[str]:
    """Split a list with commas; [] for None."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def parse_integers(option: str, text: str | None, minimum: int = 0) -> list[int]:
    """Parse integers and ranges, ends included (2,3,5; 0-2; 6-20:2), to a sorted list without repeats."""
    found: set[int] = set()
    for word in parse_words(text):
        match = re.fullmatch(r"(\d{1,12})(?:-(\d{1,12})(?::(\d{1,12}))?)?", word)
        first, last, step = match.groups() if match else (None, None, None)
        if first is None or (last is not None and int(last) < int(first)) or step == "0":
            raise UsageError(
                f"{option} {text!r} is not valid: write a list like 2,3,5, a range like 0-2 or, with a step, "
                "6-20:2."
            )
        if int(first) < minimum or int(last or first) > MAX_INTEGER:
            raise UsageError(
                f"{option} {text!r} is not valid: numbers must be from {minimum} to {MAX_INTEGER:,}."
            )
        found |= set(range(int(first), int(last or first) + 1, int(step or 1)))
    if text is not None and not found:
        raise UsageError(f"{option} {text!r} is not valid: it names no number.")
    return sorted(found)
