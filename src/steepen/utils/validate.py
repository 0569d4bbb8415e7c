"""Checks that refuse a bad value at construction and name the field, the value and what is accepted."""

from __future__ import annotations

from typing import TypeGuard

from steepen.errors import UsageError, show


def require(holds: bool, owner: str, field: str, value: object, accepted: str) -> None:
    """Raise UsageError unless `holds`: "owner.field = value is not valid: it must be …"."""
    if not holds:
        raise UsageError(f"{owner}.{field} = {show(value)} is not valid: it must be {accepted}.")


def require_positive(instance: object, names: tuple[str, ...]) -> None:
    """Require every named field of a dataclass to be an integer of at least 1."""
    for name in names:
        value = getattr(instance, name)
        require(
            is_whole(value) and value >= 1,
            type(instance).__name__,
            name,
            value,
            "a whole number of at least 1",
        )


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is an integer, and not true or false."""
    return isinstance(value, int) and not isinstance(value, bool)
