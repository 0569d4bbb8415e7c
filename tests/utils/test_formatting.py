"""Numbers as text for people."""

from __future__ import annotations

from steepen.utils.formatting import format_duration


def test_durations_have_at_most_two_units() -> None:
    assert [format_duration(s) for s in (0, 59, 60, 200, 7500, 90000)] == [
        "0 s", "59 s", "1 min", "3 min 20 s", "2 h 5 min", "1 d 1 h",
    ]  # fmt: skip
