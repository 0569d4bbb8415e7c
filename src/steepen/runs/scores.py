"""Checks scores that `steepen eval` has added to a record: the fields that others read, and their types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from steepen.errors import UsageError, show
from steepen.utils.formatting import is_number

# A field that ends in "?" may be absent or null. "*" stands for any name; a list has one kind of item.
_NUMBER, _TEXT = "a finite number", "text"
_TASK = {
    "nll": _NUMBER,
    "bits_per_byte?": _NUMBER,
    "kind?": _TEXT,
    "accuracy?": _NUMBER,
    "centered?": _NUMBER,
    "baseline?": _NUMBER,
    "examples?": _NUMBER,
    "seeds?": [{"accuracy": _NUMBER}],
}
_SCHEMA: dict[str, Any] = {
    "validation?": {"loss": _NUMBER, "bits_per_byte?": _NUMBER},
    "kl_depth?": {"depth": _NUMBER, "executed?": _NUMBER, "curve?": [_NUMBER]},
    "test_time_passes?": {
        "trained": _NUMBER,
        "passes": [_NUMBER],
        "losses?": [_NUMBER],
        "differences": [_NUMBER],
    },
    "core?": {
        "core22?": _NUMBER,
        "core22_seed_sd?": _NUMBER,
        "core17?": _NUMBER,
        "core17_seed_sd?": _NUMBER,
        "nll22?": _NUMBER,
        "bits_per_byte22?": _NUMBER,
        "bundle?": _TEXT,
        "seeds?": [_NUMBER],
        "examples?": _NUMBER,
        "tasks": {"*": _TASK},
    },
}


def check_scores(scores: Any, where: str = "record.evaluation") -> None:
    """Raise UsageError unless the known fields of these scores have their types and are finite."""
    _check(scores, _SCHEMA, where)
    passes = scores.get("test_time_passes") or {}
    lengths = {len(passes[name]) for name in ("passes", "losses", "differences") if passes.get(name)}
    if len(lengths) > 1:
        raise UsageError(f"{where}.test_time_passes has lists of different lengths.")


def _check(value: Any, expected: Any, where: str) -> None:
    if expected == _NUMBER:
        if not (is_number(value) and math.isfinite(value)):
            raise UsageError(f"{where} = {show(value)} is not valid: it must be {_NUMBER}.")
    elif expected == _TEXT:
        if not isinstance(value, str):
            raise UsageError(f"{where} = {show(value)} is not valid: it must be {_TEXT}.")
    elif isinstance(expected, list):
        if not isinstance(value, list):
            raise UsageError(f"{where} = {show(value)} is not valid: it must be a list.")
        for number, item in enumerate(cast("list[Any]", value)):
            _check(item, expected[0], f"{where}[{number}]")
    else:
        if not isinstance(value, dict):
            raise UsageError(f"{where} = {show(value)} is not valid: it must be an object.")
        _check_fields(cast("dict[str, Any]", value), expected, where)


def _check_fields(value: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    if "*" in expected:
        for name, item in value.items():
            _check(item, expected["*"], f"{where}.{name}")
        return
    for name, kind in expected.items():
        found = value.get(name.removesuffix("?"))
        if found is None and name.endswith("?"):
            continue
        _check(found, kind, f"{where}.{name.removesuffix('?')}")
