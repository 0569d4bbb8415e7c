"""Fit every arm of a table by itself, and compare each with the reference: what all laws have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from steepen.errors import UsageError
from steepen.tables.table_selection import HoldOut, held_out
from steepen.utils.arrays import Array, Mask

T = TypeVar("T")


def fit_arms(
    arms: Sequence[str], reference: str | None, fit: Callable[[str], T], warnings: list[str]
) -> dict[str, T]:
    """What `fit` returns for every arm; an arm that it rejects is left out with a warning.

    The error of the reference, or of the only arm, is raised: without it there is no answer.
    """
    found: dict[str, T] = {}
    for arm in arms:
        try:
            found[arm] = fit(arm)
        except UsageError as error:
            if len(arms) == 1 or arm == reference:
                raise UsageError(f"arm '{arm}': {error}" if arm else str(error)) from None
            warnings.append(f"arm '{arm}' is left out: {error}")
    return found


def compare_arms(
    arms: Iterable[str], compare: Callable[[str], T], warnings: list[str], *, only: bool = False
) -> dict[str, T]:
    """What `compare` returns for every arm; one that it rejects gets a warning, the `only` one an error."""
    found: dict[str, T] = {}
    for arm in arms:
        try:
            found[arm] = compare(arm)
        except UsageError as error:
            if only:
                raise
            warnings.append(f"arm '{arm}' is not compared: {error}")
    return found


def held_rows(hold_outs: Sequence[HoldOut], names: Any, flops: Array) -> Mask:
    """The rows that hold-outs select, given the arm (an array of names) and the compute of every row."""
    held = np.zeros(len(flops), bool)
    masks = held_out(hold_outs, {arm: flops[names == arm] for arm in dict.fromkeys(names.tolist())})
    for arm, mask in masks.items():
        held[names == arm] = mask
    return held
