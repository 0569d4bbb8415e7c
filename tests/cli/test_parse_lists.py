"""Lists and ranges on the command line."""

from __future__ import annotations

import pytest

from steepen.cli.parse_lists import parse_integers, parse_words
from steepen.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2,3,5", [2, 3, 5]), ("0-2", [0, 1, 2]), ("6-20:2", [6, 8, 10, 12, 14, 16, 18, 20]),
     ("5, 1-2,2", [1, 2, 5]), ("7", [7]), (None, [])],
)  # fmt: skip
def test_lists_and_ranges_of_integers(text: str | None, expected: list[int]) -> None:
    assert parse_integers("--seeds", text) == expected


@pytest.mark.parametrize("text", ["1..8", "3-1", "2-8:0", "a", "-1", "1-", "", ",", "1-99999999"])
def test_invalid_integers_are_rejected_with_the_option_and_the_text(text: str) -> None:
    with pytest.raises(UsageError, match="--passes") as caught:
        parse_integers("--passes", text)
    assert repr(text) in str(caught.value)


def test_integers_below_the_minimum_are_rejected() -> None:
    with pytest.raises(UsageError, match="from 1 to"):
        parse_integers("--passes", "0-4", minimum=1)


def test_words_are_split_at_commas() -> None:
    assert parse_words("vanilla, operator-1,,") == ["vanilla", "operator-1"] and parse_words(None) == []
