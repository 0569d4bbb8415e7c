"""What `study`, `open_study` and `status` return: progress, answer, verdicts, runs, figures and report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rich.cells import cell_len

from steepen.report.colours import ARM_TITLES, arm_colour, arm_key
from steepen.report.curves import ladder_title
from steepen.report.figure_style import FORMATS, Format
from steepen.results.fit import STYLES, verdict_words
from steepen.results.panel import Panel
from steepen.results.result import Result
from steepen.results.runs import run_blocks, run_table
from steepen.results.table import Column, Table, formatted_rows, right_columns
from steepen.results.text import WIDTH, Block, Lines, Paragraph
from steepen.studies.answer import Answer
from steepen.studies.driver.journal import Journal, find_study_folder
from steepen.studies.driver.study_status import StudyStatus, done_fraction, study_status, with_mistuned
from steepen.studies.mistuning import Mistuning
from steepen.utils.formatting import format_duration

if TYPE_CHECKING:
    from steepen.results.runs import Runs


MAX_ROWS = 20  # rows of a table in a terminal; the report has them all
MAX_PARTS = 3  # of a table that is wider than the terminal; wider ones are left to the report


def open_study(study: str | Path, studies: str | Path = "studies", runs: str | Path | None = None) -> Study:
    """A study by its directory, its name in `studies` or a prefix of it; `runs` where its runs are now."""
    folder = find_study_folder(str(study), Path(studies))
    return Study(Journal.read(folder), None if runs is None else Path(runs))


@dataclass(frozen=True, eq=False, repr=False)
class Study(Result):
    """A study: its progress, answer, verdicts, runs, figures and report."""

    arm_titles = ARM_TITLES

    journal: Journal
    runs_directory: Path | None = None  # None: where the journal says

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.journal.entry.name

    @property
    def folder(self) -> Path:
        """Its directory."""
        return self.journal.folder

    @property
    def answer(self) -> Answer | None:
        """The answer; None until the study has finished."""
        value = self.journal.entry.answer
        return None if value is None else Answer.from_dict(value)

    @property
    def verdicts(self) -> dict[str, Any]:
        """The main verdict on each arm."""
        answer = self.answer
        return {} if answer is None else {one.arm: one.verdict for one in answer.primary_verdicts}

    @property
    def runs(self) -> Runs:
        """The runs that the study requested."""
        from steepen.results.runs import Runs, open_runs

        names = {asked.run for asked in self.journal.entry.runs}
        found = open_runs(self.status().runs_directory)
        return Runs(tuple(run for run in found if run.name in names), found.directory)

    @property
    def rows(self) -> Sequence[Any]:
        """One row per verdict; of a study without an answer, one per run."""
        answer = self.answer
        return self.status().runs if answer is None else [one.row for one in answer.verdicts]

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per verdict; of a study without verdicts, the rows of its first table."""
        answer = self.answer
        if answer is None:
            return [row.to_dict() for row in self.rows]
        if answer.verdicts:
            return super().to_rows()
        return [dict(zip(one.columns, row, strict=False)) for one in answer.tables[:1] for row in one.rows]

    def table(self, caption: str = "") -> Table:
        """The verdicts; of a study without any, its first table; without an answer, the runs."""
        answer = self.answer
        if answer is None:
            table = run_table([vars(row) for row in self.rows], WIDTH)
            return replace(table, title=self.headline(), caption=caption)
        if answer.verdicts or not answer.tables:
            return super().table(caption)
        return replace(answer.tables[0], caption=caption)

    def status(self) -> StudyStatus:
        """Runs by status, FLOPs done and left, and the estimated time, from the files."""
        return study_status(self.journal, self.runs_directory)

    @property
    def mistuned(self) -> tuple[Mistuning, ...]:
        """The runs that look mistuned, by their metrics; none where these are not here."""
        return with_mistuned(self.status()).mistuned

    def headline(self) -> str:
        """Name, state and verdicts."""
        words = verdict_words(self.verdicts)
        return f"study {self.name}: {self.journal.live_status}" + (f"; {words}" if words else "")

    def to_dict(self) -> dict[str, Any] | None:
        """The answer, as study.json has it; None until the study has finished."""
        return self.journal.entry.answer

    def panels(self) -> Sequence[Panel]:
        """The panels of the answer."""
        return () if self.answer is None else self.answer.panels

    def report(self, out: str | Path, formats: Sequence[Format] = FORMATS) -> Path:
        """Write the page, figures and tables of the answer to a directory; returns the page's path."""
        from steepen.report.write import make_report

        return make_report([self.folder], Path(out), formats, runs=self.runs_directory)[0]

    def blocks(self, width: int) -> Iterable[Block]:
        """The answer, verdicts first, and where its files are."""
        answer = self.answer
        if answer is None:
            yield Paragraph(f"{self.headline()}; no answer yet. {self.journal.entry.message}".rstrip())
            return
        yield from answer_blocks(answer, width, self.mistuned)
        runs = self.journal.runs_directory(self.runs_directory)
        runs = runs.relative_to(Path.cwd()) if runs.is_relative_to(Path.cwd()) else runs
        yield Paragraph()
        yield Lines(f"The answer is in {self.journal.file}; its {len(set(answer.runs))} runs are in {runs}.")
        for path in answer.recipe_files(self.folder):
            yield Lines(f"The recipe is {path}: give it to plan, train or study with `--recipe {path}`.")


def answer_blocks(answer: Answer, width: int, mistuned: Sequence[Mistuning] = ()) -> Iterable[Block]:
    """The question, the verdicts, the other findings, the tables and the warnings.

    Tables with a row per run, and those too wide for the terminal, are left to the report.
    """
    yield Paragraph(lead=answer.question, style="bold")
    yield Paragraph()
    for judged in answer.primary_verdicts:
        row, verdict = judged.row, judged.verdict
        title, part = _title(judged.arm, judged.variant), f" ({judged.part})" if judged.part else ""
        yield Paragraph(f" {row.verdict}{part}", f"■ {title}", STYLES[row.better])
        yield Paragraph(verdict.sentence, indent=2)
        yield from (Paragraph(f"· {line}", indent=2) for line in verdict.what_would_change)
        doubts = [found.sentence for found in mistuned if found.arm == judged.arm]
        yield from (Paragraph(f"· mistuned? {sentence}", indent=2) for sentence in doubts)
    with_verdict = {judged.arm for judged in answer.primary_verdicts}
    # A reference has no verdict, and its rungs decide all of them.
    yield from (Paragraph(f"• mistuned? {one.sentence}") for one in mistuned if one.arm not in with_verdict)
    yield from (Paragraph(f"• {finding}") for finding in answer.findings)
    left_out: list[str] = []
    for table in (table for table in answer.tables if not table.per_run):
        parts = _fitting(table, width)
        if len(parts) > MAX_PARTS:
            left_out.append(table.title)
            continue
        yield Paragraph()
        yield from parts
        if len(table.rows) > MAX_ROWS:
            yield Paragraph(f"… and {len(table.rows) - MAX_ROWS} more rows.")
        if table.caption:
            yield Paragraph(table.caption)
    if left_out:
        yield Paragraph()
        yield Paragraph(f"Too wide for this terminal, so in the report only: {', '.join(left_out)}.")
    if answer.cautions or answer.warnings:
        yield Paragraph()
    for warning in (*answer.cautions, *answer.warnings):
        yield Paragraph(f" {warning}", "warning:", "yellow")


def _title(name: str, variant: str = "") -> str:
    return ladder_title(name, variant, ARM_TITLES)


def _fitting(table: Table, width: int) -> list[Table]:
    """The first rows of a table, split between columns to fit the width; each part has the first column."""
    rows = formatted_rows(table)[:MAX_ROWS]
    columns = [Column(align="right" if right else "left") for right in right_columns(table)]
    if (place := table.arm_column) is not None:
        # Vanilla uses the terminal's default colour: black or white could be invisible.
        coloured = [row[place] for row in rows if arm_key(row[place]) != "vanilla"]
        styles = {_title(arm): f"bold {arm_colour(arm).dark}" for arm in coloured}
        columns[place] = replace(columns[place], styles=styles)
        rows = [[*row[:place], _title(row[place]), *row[place + 1 :]] for row in rows]
    # Two columns more than its longest cell: a space, and the place of a rule.
    wide = [max(map(cell_len, cells)) + 2 for cells in zip(table.columns, *rows, strict=True)]
    parts = [[0]]
    for i in range(1, len(wide)):
        if len(parts[-1]) > 1 and sum(wide[k] for k in parts[-1]) + wide[i] > width - 1:
            parts.append([0])
        parts[-1].append(i)

    def cut(part: list[int], title: str) -> Table:
        def own(cells: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(cells[i] for i in part)

        return Table(title, own(table.columns), tuple(map(own, rows)), shown=own(columns))

    return [cut(part, "" if number else table.title) for number, part in enumerate(parts)]


NOT_ENDED = ("running", "failed", "interrupted", "unknown")


@dataclass(frozen=True, eq=False, repr=False)
class Status(Result):
    """The progress of studies; `alone`: one was asked for by name."""

    row_columns: ClassVar = {
        "study": Column(value=lambda one: one.name),
        "state": Column(),
        "done": Column("done (FLOPs)", ".0%", value=done_fraction),
        "runs": Column(value=lambda one: len(one.runs)),
        "finished": Column(value=lambda one: one.counts["finished"]),
        "flops_left": Column("FLOPs left"),
        "seconds_left": Column("time left"),
        "message": Column(shown=False),
    }

    studies: tuple[StudyStatus, ...]
    preparing: tuple[str, ...] = ()  # studies whose data is being prepared: they have no runs yet
    unreadable: Mapping[str, str] = field(default_factory=dict[str, str])  # why, by name
    alone: bool = False
    directory: str = "studies"

    @property
    def rows(self) -> tuple[StudyStatus, ...]:
        """One row per study."""
        return self.studies

    @property
    def state(self) -> Literal["preparing", "running", "ended"]:
        """Whether it is worth looking again."""
        if self.preparing:
            return "preparing"
        return "running" if any(one.state == "running" for one in self.studies) else "ended"

    def headline(self) -> str:
        """How many studies there are."""
        return f"{len(self.studies)} studies: {', '.join(f'{one.name} {one.state}' for one in self.studies)}"

    def to_dict(self) -> dict[str, Any]:
        """The study that was asked for, or all of them."""
        if self.alone and self.preparing:
            return {"name": self.preparing[0], "state": "preparing"}
        if self.alone:
            return self.studies[0].to_dict()
        return {"studies": [one.to_dict() for one in self.studies], "unreadable": dict(self.unreadable)}

    def blocks(self, width: int) -> Iterable[Block]:
        """One paragraph per study; of one alone also its message, and the runs that have not finished."""
        yield from map(Lines, map(_line, self.studies))
        yield from (
            Lines(f"{name}: its data is being prepared; no runs requested yet.") for name in self.preparing
        )
        yield from (Lines(f"{name}: {why}") for name, why in self.unreadable.items())
        if not (self.studies or self.preparing or self.unreadable):
            yield Lines(f"No study in {self.directory} yet.")
        for one in self.studies if self.alone else ():
            if one.message:
                yield Lines(one.message)
            yield from (Paragraph(f" {found.sentence}", "mistuned?", "yellow") for found in one.mistuned)
            if rows := [vars(row) for row in one.runs if row.status in NOT_ENDED]:
                yield from run_blocks(rows, width)


def _line(study: StudyStatus) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in study.counts.items() if count)
    line = f"{study.name}: {study.state}, batch {study.batches}; {len(study.runs)} runs requested"
    line += f" ({counts})" if counts else ""
    line += f"; {study.flops_done:.3g} FLOPs done, {study.flops_left:.3g} left"
    line += f" ({study.flops_shared:.3g} saved by shared steps)" if study.flops_shared else ""
    if study.flops_left and study.seconds_left is not None:
        left = format_duration(study.seconds_left)
        line += f", ETA {left}" if study.state == "running" else f", about {left} of work"
    return line + "."
