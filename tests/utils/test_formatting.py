"""Numbers as text for people."""

from __future__ import annotations

import io

import pytest

from steepen.utils.formatting import format_duration, percent, wrap_to_terminal


def test_durations_have_at_most_two_units() -> None:
    assert [format_duration(s) for s in (0, 59, 60, 200, 7500, 90000)] == [
        "0 s", "59 s", "1 min", "3 min 20 s", "2 h 5 min", "1 d 1 h",
    ]  # fmt: skip


def test_percentages_keep_their_digits() -> None:
    assert [percent(x) for x in (0.9, 0.05, 0.025, 0.005, 0.999)] == ["90%", "5%", "2.5%", "0.5%", "99.9%"]
    assert [percent(x) for x in (0.99973, 1 - 1e-6, 1.0)] == ["99.97%", "99.9999%", "100%"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_messages_break_at_words_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    text = "one two three four\nbatch-tokens five"
    assert wrap_to_terminal(text, Terminal()) == "one two\nthree four\nbatch-tokens\nfive"
    assert wrap_to_terminal(text, io.StringIO()) == text
