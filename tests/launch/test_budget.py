"""Parsing of --budget."""

from __future__ import annotations

import pytest

from steepen.errors import UsageError
from steepen.launch.cost_estimate import Budget


@pytest.mark.parametrize(
    ("text", "flops", "seconds"),
    [
        ("1e15", 1e15, None),
        ("30m", None, 1800),
        ("1h30m", None, 5400),
        ("90 s", None, 90),
        ("2d", None, 172800),
    ],
)
def test_a_budget_is_flops_or_time(text: str, flops: float | None, seconds: float | None) -> None:
    budget = Budget.parse(text)
    assert (budget.flops, budget.seconds) == (flops, seconds)


@pytest.mark.parametrize("text", ["", "much", "-1", "0", "nan", "inf", "30x", "m"])
def test_an_invalid_budget_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="`budget`"):
        Budget.parse(text)
