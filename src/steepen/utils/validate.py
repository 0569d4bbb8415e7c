"""Checks that reject a bad value at construction and name the field, the value and what is accepted."""

from __future__ import annotations

from typing import TypeGuard

from steepen.errors import UsageError, show


def require(holds: bool, owner: str, field: str, value: object, accepted: str) -> None:
    """Raise UsageError unless `holds`: "owner.field = value is not valid: it must be …"."""
    if not holds:
        raise UsageError(f"{owner}.{field} = {show(value)} is not valid: it must be {accepted}.")


MAX_WHOLE = 10**15  # of any count in a spec: tokens, steps, widths


def require_positive(instance: object, names: tuple[str, ...], maximum: int = MAX_WHOLE) -> None:
    """Require every named field of a dataclass to be an integer from 1 to `maximum`."""
    for name in names:
        value = getattr(instance, name)
        good = is_whole(value) and 1 <= value <= maximum
        require(good, type(instance).__name__, name, value, f"a whole number from 1 to {maximum:,}")


def require_count(owner: str, field: str, value: object, low: int = 1, maximum: int = MAX_WHOLE) -> None:
    """Require null or an integer from `low` to `maximum`."""
    good = value is None or (is_whole(value) and low <= value <= maximum)
    require(good, owner, field, value, f"a whole number from {low} to {maximum:,}, or null")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is an integer, and not true or false."""
    return isinstance(value, int) and not isinstance(value, bool)
