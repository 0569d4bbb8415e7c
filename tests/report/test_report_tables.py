"""Tables as CSV (every digit) and Markdown (rounded), and answers in the terminal."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from steepen.report.load_studies import LoadedStudy
from steepen.results.study import answer_blocks
from steepen.results.table import formatted_rows, numeric_columns, to_csv, to_markdown
from steepen.results.text import print_blocks
from steepen.studies.answer import Table
from steepen.utils.formatting import format_column, format_value, pretty_exponents

TABLE = Table(
    "Laws | arms",
    ("arm", "γ", "interval", "FLOPs", "n"),
    (
        ("vanilla", 0.1113, (0.11, 0.1126), 3.25e17, 8),
        ("a|b, *c*", 0.11684999, [0.1, math.inf], 1.01e20, None),
    ),
    "Simulated.",
)


def test_csv_keeps_every_digit() -> None:
    rows = list(csv.reader(io.StringIO(to_csv(TABLE))))
    assert rows[0] == list(TABLE.columns)
    assert float(rows[2][1]) == 0.11684999 and float(rows[1][3]) == 3.25e17
    assert rows[2][0] == "a|b, *c*" and rows[2][4] == ""


FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t")  # what a spreadsheet would compute begins so
DELIMITERS = re.compile("[;\t\n]")  # of cells in other locales, and of lines


@pytest.mark.parametrize(
    ("text", "written"),
    [
        *(("=1", "'=1"), ("-x", "'-x"), ("＝1", "'＝1"), ("＠SUM(1)", "'＠SUM(1)"), (" =1", "' =1")),
        *((";=1", ";'=1"), ("a;=1;+2", "a;'=1;'+2"), ("a\t=1", "a\t'=1"), ("a;b", "a;b"), ("a-b=c", "a-b=c")),
    ],
)  # fmt: skip
def test_text_that_a_spreadsheet_would_compute_gets_an_apostrophe(text: str, written: str) -> None:
    assert next(csv.reader(io.StringIO(to_csv(Table("t", (text,), ()))))) == [written]
    assert list(csv.reader(io.StringIO(to_csv(Table("t", ("a",), ((text,),))))))[1] == [written]


@given(st.lists(st.tuples(st.text(), st.floats(allow_nan=False) | st.integers()), min_size=1))
def test_any_csv_round_trips_and_computes_nothing(rows: list[tuple[str, float]]) -> None:
    rows = [(text.replace("\r", "").replace("\0", ""), value) for text, value in rows]
    back = list(csv.reader(io.StringIO(to_csv(Table("t", ("a", "b"), tuple(rows))), newline="")))[1:]
    assert [(text.replace("'", ""), float(value)) for text, value in back] == [
        (text.replace("'", ""), float(value)) for text, value in rows
    ]
    cells = [cell for text, _ in back for cell in DELIMITERS.split(text)]
    assert not any(cell.lstrip().startswith(FORMULA) for cell in cells)


def test_markdown_has_one_line_per_row_and_escapes_pipes() -> None:
    lines = to_markdown(TABLE).splitlines()
    assert lines[0] == r"**Laws \| arms**"
    assert lines[3].split("|")[2].strip() == "---:"
    assert lines[4] == "| vanilla | 0.1113 | 0.11 to 0.1126 | 3.25×10¹⁷ | 8 |"
    assert lines[5].startswith(r"| a\|b, \*c\* | 0.1168 | 0.1 to ∞ | 1.01×10²⁰ | – |")


def test_numbers_of_a_column_have_equal_decimals() -> None:
    assert format_column([3.2, 3.21537, None]) == ["3.2000", "3.2154", "–"]
    assert format_column([1.5, 2.0]) == ["1.5", "2.0"]
    assert format_column([0.00003, 0.5]) == ["3×10⁻⁵", "0.5"]
    assert format_column([0.00006, -0.0022]) == ["0.0001", "−0.0022"]
    assert numeric_columns(TABLE) == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (True, "yes"), (-3, "−3"), (1234567, "1,234,567"), (12345678, "1.23×10⁷"), (math.nan, "–"),
        (-0.000123, "−1.23×10⁻⁴"), (999.96, "1,000"), ("x", "x"), ({"a": 1}, "a 1"), ([1, 2, 3], "1, 2, 3"),
    ],
)  # fmt: skip
def test_format_value(value: object, text: str) -> None:
    assert format_value(value) == text


def test_exponents_in_labels_are_typeset() -> None:
    assert pretty_exponents("1e+17 FLOPs, 3.5e-4") == "10¹⁷ FLOPs, 3.5×10⁻⁴"
    assert pretty_exponents("run 12e4f00d, loop-2e1x") == "run 12e4f00d, loop-2e1x"


def test_short_rows_are_padded() -> None:
    assert formatted_rows(Table("t", ("a", "b"), ((1,),))) == [["1", "–"]]


def shown(study: LoadedStudy, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_blocks(lambda columns: answer_blocks(study.answer, columns), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_terminal_prints_verdicts_before_tables(finished: Callable[[str], LoadedStudy]) -> None:
    study = finished("ladder")
    text = shown(replace(study, answer=replace(study.answer, warnings=("a rung is missing.",))))
    parts = ("Simulated laws", "Operator-1 better", "Verdicts against vanilla", "warning")
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert " ".join(text.split()).count("untied-grow against vanilla: better") == 1


def test_wide_tables_wrap_between_columns(
    finished: Callable[[str], LoadedStudy],
) -> None:
    columns = ("arm", *(f"column {i}" for i in range(9)))
    table = Table("Wide", columns, (("untied-grow", *(0.12345 + i for i in range(9))),) * 25)
    study = finished("tpp")
    text = shown(replace(study, answer=replace(study.answer, tables=(table,))), width=60)
    assert "…" not in text.replace("… and 5 more rows.", "") and "… and 5 more rows." in text
    assert all(f"{0.12345 + i:.4f}" in text for i in range(9))
    assert max(map(len, text.splitlines())) <= 60


def test_terminal_prints_brackets_literally(finished: Callable[[str], LoadedStudy]) -> None:
    study = finished("tpp")
    odd = replace(
        study.answer,
        findings=("[bold]not markup[/nonsense]",),
        tables=(Table("[x]", ("[y]",), (("[/z]",),)),),
    )
    text = shown(replace(study, answer=odd))
    assert "[bold]not markup[/nonsense]" in text and "[/z]" in text and "[y]" in text
