"""Writes a report: report.html, figures/ and tables/."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from steepen.errors import UsageError
from steepen.report.figure_style import FORMATS, Format
from steepen.report.load_studies import LoadedStudy, arm_titles, load_study
from steepen.report.page import render_page
from steepen.report.panel_figures import draw_panels
from steepen.report.table_files import to_csv, to_markdown
from steepen.studies.answer import Panel
from steepen.utils.files import write_atomically

PAGE_NAME = "report.html"
MAX_COMBINED_PANELS = 6  # panels that one figure may hold


def write_report(
    studies: Sequence[LoadedStudy], out: Path, formats: tuple[Format, ...] = FORMATS
) -> Iterator[tuple[Path, ...]]:
    """Write everything, yielding the files of each step: the page, then a figure or a table at a time."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; give a folder, which is made if it does not exist.")
    out.mkdir(parents=True, exist_ok=True)
    yield (_write(out / PAGE_NAME, render_page(studies).encode()),)
    names = arm_titles(studies)
    drawn_names: set[str] = set()
    table_names: set[str] = set()
    for study in studies:
        for title, panels in figures_to_draw(study):
            name = _name(study.name, title, drawn_names)
            drawn = draw_panels(panels, names, formats)
            yield tuple(_write(out / "figures" / f"{name}.{kind}", data) for kind, data in drawn.items())
        for table in study.answer.tables:
            name = _name(study.name, table.title, table_names)
            texts = {"csv": to_csv(table), "md": to_markdown(table)}
            yield tuple(
                _write(out / "tables" / f"{name}.{kind}", text.encode()) for kind, text in texts.items()
            )


def make_report(
    study: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    formats: str = "pdf,svg,png",
    studies: str | Path = "studies",
    runs: str | Path | None = None,
) -> Path:
    """Write the report of one or more studies to the directory `out`; returns the path of the page.

    A study is its directory, or its name in `studies`; `runs` is where its runs are, if they have moved.
    """
    names = [study] if isinstance(study, str | Path) else list(study)
    place = None if runs is None else Path(runs)
    loaded = [load_study(str(name), Path(studies), place) for name in dict.fromkeys(names)]
    for _ in write_report(loaded, Path(out), parse_formats(formats)):
        pass
    return Path(out) / PAGE_NAME


def figures_to_draw(study: LoadedStudy) -> list[tuple[str, list[Panel]]]:
    """What is drawn of a study: every panel by itself, and together where they fit on one page."""
    panels = list(study.answer.panels)
    alone = [(panel.title, [panel]) for panel in panels]
    return [*alone, ("all", panels)] if 1 < len(panels) <= MAX_COMBINED_PANELS else alone


def step_count(studies: Sequence[LoadedStudy]) -> int:
    """How many steps `write_report` takes."""
    return 1 + sum(len(figures_to_draw(study)) + len(study.answer.tables) for study in studies)


def parse_formats(text: str) -> tuple[Format, ...]:
    """The formats of "pdf,svg"."""
    requested = [word.strip().lower() for word in text.split(",") if word.strip()]
    for word in requested:
        if word not in FORMATS:
            raise UsageError(
                f"--format {word!r} is not known: choose among {', '.join(FORMATS)}, separated by commas."
            )
    if not requested:
        raise UsageError(f"--format is empty: choose among {', '.join(FORMATS)}, separated by commas.")
    return tuple(kind for kind in FORMATS if kind in requested)


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
