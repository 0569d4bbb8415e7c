"""Writes a report: report.html, figures/ and tables/."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steepen.report.contents import StudyContent, figure_csv
from steepen.report.curves import styled_panel
from steepen.report.figure import figure_files
from steepen.report.figure_style import FORMATS, Format
from steepen.report.load_studies import (
    LoadedStudy,
    arm_titles,
    load_study,
    study_arm_styles,
    with_registered_forecasts,
)
from steepen.report.page import render_page
from steepen.results.table import to_csv, to_latex, to_markdown
from steepen.studies.answer import Panel, Table
from steepen.utils.files import write_atomically
from steepen.utils.progress import show_steps

PAGE_NAME = "report.html"
MAX_COMBINED_PANELS = 6  # panels that one figure of a whole study may hold


@dataclass(frozen=True)
class _File:
    """A figure or table with the name of its files; `id` is its place on the page, "" if it has none."""

    name: str
    id: str
    panels: tuple[Panel, ...] = ()
    table: Table | None = None


def write_report(
    studies: Sequence[LoadedStudy], out: Path, formats: tuple[Format, ...] = FORMATS
) -> list[Path]:
    """Write everything and return the files, the page first. Progress goes to standard error."""
    out.mkdir(parents=True, exist_ok=True)
    titles, planned = arm_titles(studies), _plan(studies)
    links = {one.id: _links(one, formats) for one in planned if one.id}
    written = [_write(out / PAGE_NAME, render_page(studies, links).encode())]
    for one in show_steps(planned):
        if one.table is None:
            drawn = figure_files(one.panels, titles, formats)
            content = {**drawn, "csv": figure_csv(one.panels, titles).encode()}
        else:
            texts = {"csv": to_csv(one.table), "md": to_markdown(one.table), "tex": to_latex(one.table)}
            content = {kind: text.encode() for kind, text in texts.items()}
        folder = out / ("figures" if one.table is None else "tables")
        written += [_write(folder / f"{one.name}.{kind}", data) for kind, data in content.items()]
    return written


def _plan(studies: Sequence[LoadedStudy]) -> list[_File]:
    """Every figure and table of the report, each with a name of its own.

    A study of a few panels without groups also has a figure of all of them, "…-all".
    """
    titles, styles = arm_titles(studies), study_arm_styles(studies)
    figure_names, table_names = set[str](), set[str]()
    found: list[_File] = []
    for i, study in enumerate(studies):
        content = StudyContent.of(i, study, titles, styles)
        for figure in content.figures:
            found.append(_File(_name(study.name, figure.title, figure_names), figure.id, figure.panels))
        panels = tuple(styled_panel(panel, styles) for panel in study.answer.panels)
        if 1 < len(panels) <= MAX_COMBINED_PANELS:
            found.append(_File(_name(study.name, "all", figure_names), "", panels))
        for k, table in enumerate(content.tables):
            name = _name(study.name, table.title, table_names)
            found.append(_File(name, content.table_id(k), table=table))
    return found


def _links(one: _File, formats: tuple[Format, ...]) -> list[tuple[str, str]]:
    """The files of a figure or table, relative to the page."""
    if one.table is None:
        return [(kind, f"figures/{one.name}.{kind}") for kind in ("csv", *formats)]
    return [(kind, f"tables/{one.name}.{kind}") for kind in ("csv", "md", "tex")]


def make_report(
    names: Sequence[str | Path],
    out: Path,
    formats: Sequence[Format] = FORMATS,
    *,
    studies: Path = Path("studies"),
    runs: Path | None = None,
    forecasts: Path | None = None,
) -> list[Path]:
    """Write the report of some studies to a directory; returns its files, the page first.

    A study is its directory, or its name in `studies`; `runs` is where its runs are, if they have moved.
    """
    loaded = [load_study(str(name), studies, runs) for name in dict.fromkeys(names)]
    if forecasts is not None:
        loaded = [with_registered_forecasts(one, forecasts) for one in loaded]
    return write_report(loaded, out, tuple(kind for kind in FORMATS if kind in formats))


def _name(study: str, title: str, taken: set[str]) -> str:
    """A file name of slug letters, used once."""
    slug = re.sub(r"[^a-z0-9]+", "-", f"{study} {title}".lower()).strip("-")[:80] or "untitled"
    name, count = slug, 1
    while name in taken:
        count += 1
        name = f"{slug}-{count}"
    taken.add(name)
    return name


def _write(path: Path, data: bytes) -> Path:
    write_atomically(path, data)
    return path
