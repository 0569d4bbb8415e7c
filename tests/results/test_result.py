"""A result's typed rows are rendered once for every format; nothing depends on titles or words."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from steepen.errors import UsageError
from steepen.results.panel import Axis, Panel, Series
from steepen.results.result import Result
from steepen.results.table import (
    WRITERS,
    Column,
    Table,
    columns_of,
    table_of,
    to_csv,
    to_html,
    to_latex,
    to_markdown,
)
from steepen.results.text import Lines, Paragraph, to_text
from steepen.utils.codec import from_builtins, to_builtins


@dataclass(frozen=True)
class Cup:
    name: str
    gamma: Annotated[float | None, Column("γ", ".2f")]
    size: Annotated[float, Column(format=lambda value: f"{value:g} cl")]
    secret: Annotated[str, Column(shown=False)] = "s"
    mark: Annotated[str, Column("mark", stored=False)] = "?"


@dataclass(frozen=True, eq=False, repr=False)
class Cups(Result):
    cups: tuple[Cup, ...]
    hidden: tuple[str, ...] = ()

    @property
    def rows(self) -> Sequence[Cup]:
        return self.cups

    def headline(self) -> str:
        return f"{len(self.cups)} cups & more"

    def headings(self) -> dict[str, str]:
        return {"size": "size (cl)"}

    def left_out(self) -> tuple[str, ...]:
        return self.hidden

    def legend(self) -> list[str]:
        return ["?: unknown <cup>"]

    def panels(self) -> list[Panel]:
        series = Series("cups", "points", (1.0, 2.0), (3.0, 4.0))
        return [Panel("Cups", Axis("x"), Axis("y"), (series,))]


CUPS = Cups((Cup("a_b", 0.123456789, 2.0), Cup("=1+2", math.nan, 30.0), Cup("|c|", None, 4.5)))


def test_people_read_shown_columns_in_their_formats_under_their_headings() -> None:
    table = CUPS.table()
    assert table.columns == ("name", "γ", "size (cl)", "mark")
    text = to_text(lambda width: [table])
    assert "0.12" in text and "0.123" not in text and "30 cl" in text and "–" in text
    latex = CUPS.to_latex(caption="Cups.", label="tab:cups")
    assert latex.startswith("% ?: unknown <cup>\n% needs") and r"a\_b & 0.12 & 2 cl & ?" in latex
    assert r"\caption{Cups.}" in latex and "$\\gamma$" in latex
    assert "| a\\_b | 0.12 | 2 cl | ? |" in to_markdown(table) and "\\|c\\|" in to_markdown(table)
    page = CUPS._repr_html_()
    assert "<p>3 cups &amp; more</p>" in page and "<th>γ</th>" in page and "unknown &lt;cup&gt;" in page


def test_programs_read_every_stored_column_and_digit(tmp_path: Path) -> None:
    rows = CUPS.to_rows()
    assert list(rows[0]) == ["name", "gamma", "size", "secret"] and rows[0]["gamma"] == 0.123456789
    assert list(CUPS.to_frame().columns) == list(rows[0])
    assert json.loads(CUPS.to_json())["rows"][1] == {
        "name": "=1+2",
        "gamma": None,
        "size": 30.0,
        "secret": "s",
    }
    text = CUPS.write_table(tmp_path / "cups.csv").read_text()
    assert text.splitlines()[:3] == ["name,gamma,size,secret", "a_b,0.123456789,2.0,s", "'=1+2,nan,30.0,s"]


def test_a_field_that_says_nothing_is_neither_shown_nor_written() -> None:
    fewer = Cups(CUPS.cups, hidden=("gamma",))
    assert "γ" not in fewer.table().columns and "gamma" not in fewer.to_rows()[0]


@pytest.mark.parametrize("ending", WRITERS)
def test_every_table_format_is_written(ending: str, tmp_path: Path) -> None:
    assert "a" in CUPS.write_table(tmp_path / f"cups{ending}").read_text()


def test_unknown_formats_are_rejected_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must end in \.tex, \.csv"):
        CUPS.write_table(tmp_path / "cups.doc")
    with pytest.raises(UsageError, match=r"must end in \.pdf, \.png or \.svg"):
        CUPS.save_figure(tmp_path / "cups.doc")


def test_figure_is_drawn_from_the_panels(tmp_path: Path) -> None:
    assert CUPS.save_figure(tmp_path / "cups.svg").stat().st_size > 1000
    assert CUPS.plot().get_title() == "Cups"


def test_blocks_are_wrapped_but_lines_are_not() -> None:
    blocks: list[Any] = [Paragraph(" long word" * 12, "■", "red", indent=2), Lines("x" * 100)]
    lines = to_text(lambda width: blocks, 40).splitlines()
    assert lines[0].startswith("  ■ long") and max(map(len, lines[:-1])) <= 40 and lines[-1] == "x" * 100


def test_how_columns_are_shown_is_not_part_of_a_tables_json() -> None:
    table = table_of(CUPS.cups, list(columns_of(Cup).values()), "Cups")
    value = to_builtins(table)
    assert "shown" not in value
    assert from_builtins(Table, json.loads(json.dumps(value))).columns == table.columns


def test_a_table_without_column_types_gets_common_decimals() -> None:
    table = Table("t", ("a", "b"), ((1.5, "x"), (2.25, None)))
    assert to_csv(table) == "a,b\n1.5,x\n2.25,\n"
    assert "1.50 & x" in to_latex(table) and '<td style="text-align:right">2.25</td>' in to_html(table)
