"""What `eval` returns: the scores of a checkpoint or of many runs, and which tasks pass the filter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from steepen.results.panel import Panel
from steepen.results.result import Result
from steepen.results.table import Column, table_of
from steepen.results.text import Block, Lines, Paragraph
from steepen.utils.formatting import counted

if TYPE_CHECKING:
    from steepen.evaluation.evaluate_many import ManyScores
    from steepen.laws.fits.downstream import TaskFilter


@dataclass(frozen=True)
class ScoreRow:
    """One score of a checkpoint."""

    score: str
    value: float


@dataclass(frozen=True, eq=False, repr=False)
class EvaluationResult(Result):
    """Scores of a checkpoint, or of a model of transformers; `scores` has them all as nested dicts."""

    scores: dict[str, Any]
    title: str = ""  # of the arm
    in_record: bool = False  # whether they are in the run's record
    saved: Path | None = None
    remarks: tuple[str, ...] = ()
    unsaved: bool = False  # they were to be added to the record, and could not be

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader of the scores should know."""
        return self.remarks

    @property
    def failure(self) -> str:
        """That the record lacks them."""
        return "the scores were not added to the run's record." if self.unsaved else ""

    @property
    def rows(self) -> list[ScoreRow]:
        """One row per score: loss, bits per byte, CORE and its tasks, KL depth, loss at each passes."""
        from steepen.runs.row import score_fields

        validation = self.scores.get("validation", {})
        found = {name: validation.get(name) for name in ("loss", "bits_per_byte")}
        found |= score_fields(self.scores)
        return [ScoreRow(name, value) for name, value in found.items() if value is not None]

    def headline(self) -> str:
        """Run and step, or model, and the validation loss."""
        scores = self.scores
        what = f"run {scores['run']} at step {scores['step']}" if "run" in scores else scores["model"]
        validation = scores.get("validation")
        return what if validation is None else f"{what}: loss {validation['loss']:.4f}"

    def to_dict(self) -> dict[str, Any]:
        """The scores and, of a run, where they were saved."""
        saved = None if self.saved is None else str(self.saved)
        place = {"in_record": self.in_record, "saved": saved} if "run" in self.scores else {}
        return {**self.scores, **place}

    def panels(self) -> list[Panel]:
        """KL divergence after each executed block, loss against passes, centred accuracy by task."""
        from steepen.report.score_panels import score_panels

        return score_panels(self.scores, self.title)

    def blocks(self, width: int) -> Iterable[Block]:
        """The scores as sentences, CORE as a table."""
        yield from score_blocks(self.scores)
        if self.saved is not None:
            yield Lines(f"saved in {self.saved}")


def score_blocks(scores: Mapping[str, Any]) -> Iterator[Block]:
    """The scores of a checkpoint for a terminal."""
    yield from _validation(scores)
    if depth := scores.get("kl_depth"):
        curve = " ".join(f"{value:.2f}" for value in depth["curve"])
        yield Lines(
            f"KL effective depth {depth['depth']} of {depth['executed']} executed blocks "
            f"(peak after {depth['peak']}, {depth['tokens']:,} tokens); nats after 0, 1, …: {curve}"
        )
    if passes := scores.get("test_time_passes"):
        pairs = zip(passes["passes"], passes["differences"], strict=True)
        parts = ", ".join(f"{count}: {difference:+.4f}" for count, difference in pairs)
        if parts:
            yield Lines(f"loss at k passes minus loss at {passes['trained']}: {parts}")
        if left := passes["unsupported_passes"]:
            yield Lines(
                f"passes {', '.join(map(str, left))} are not supported: untied cores run one pass each, "
                "and a network without a core runs only one."
            )
    if core := scores.get("core"):
        yield from _core(core)


def _validation(scores: Mapping[str, Any]) -> Iterator[Block]:
    validation = scores.get("validation")
    if "model" in scores:
        size = f"{scores['parameters']:,} parameters, {scores['precision']}, context {scores['context']:,}"
        yield Lines(f"{scores['model']}: {size}")
        if validation:
            yield Lines(
                f"validation text: {validation['bits_per_byte']:.4f} bits per byte "
                f"({validation['loss']:.4f} nats per token, {validation['tokens']:,} tokens, "
                f"{validation['bytes']:,} bytes)"
            )
        return
    passes = f"{scores['passes']} core passes, " if scores["passes"] > 1 else ""  # 1: nothing is repeated
    assert validation is not None
    yield Lines(
        f"step {scores['step']:,}, {passes}{scores['precision']}: validation loss "
        f"{validation['loss']:.4f} ({validation['bits_per_byte']:.4f} bits per byte, "
        f"{validation['tokens']:,} tokens)"
    )


def _core(core: Mapping[str, Any]) -> Iterator[Block]:
    columns = [
        Column("task", value=lambda row: row[0]),
        Column("shots", value=lambda row: row[1]["shots"]),
        Column("examples", value=lambda row: row[1]["examples"]),
        Column("accuracy", ".4f", value=lambda row: row[1]["accuracy"]),
        Column("chance", ".4f", value=lambda row: row[1]["baseline"]),
        Column("centred", ".4f", value=lambda row: row[1]["centered"]),
        Column("answer NLL", ".4f", value=lambda row: row[1]["nll"]),
    ]
    yield table_of(list(core["tasks"].items()), columns, f"CORE, convention: {core['convention']}")
    spread = "" if core["core22_seed_sd"] is None else f" ± {core['core22_seed_sd']:.4f} over seeds"
    subset = "" if core["examples"] is None else f", at most {core['examples']:,} examples per task"
    if core["core22"] is not None:
        bits = core.get("bits_per_byte22")
        per_byte = "" if bits is None else f" ({bits:.4f} bits per byte)"
        yield Lines(
            f"CORE22 {core['core22']:.4f}{spread}, CORE17 {core['core17']:.4f}, "
            f"answer NLL {core['nll22']:.4f}{per_byte}{subset}"
        )
    else:
        yield Lines(
            f"mean of {len(core['tasks'])} tasks: centred {core['mean_centered']:.4f}, "
            f"answer NLL {core['mean_nll']:.4f}{subset}"
        )


@dataclass(frozen=True)
class EvaluatedRow:
    """A run among several that were to be evaluated."""

    run: str
    status: str  # evaluated, skipped (it had the scores) or failed
    loss: Annotated[float | None, Column(format=".4f")] = None
    core22: Annotated[float | None, Column("CORE22", ".4f")] = None
    kl_depth: float | None = None
    reason: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class EvaluatedRuns(Result):
    """Runs that were evaluated now, that had the scores before, and that failed with their reasons."""

    found: ManyScores

    @property
    def rows(self) -> list[EvaluatedRow]:
        """One row per run."""
        return [
            *(_evaluated(one.scores, one.checkpoint.run.name) for one in self.found.evaluated),
            *(EvaluatedRow(run.name, "skipped") for run in self.found.skipped),
            *(EvaluatedRow(run.name, "failed", reason=why) for run, why in self.found.failed.items()),
        ]

    def headline(self) -> str:
        """How many were evaluated, skipped and failed."""
        done, had, failed = (self.found.evaluated, self.found.skipped, self.found.failed)
        return f"{counted(len(done), 'run')} evaluated, {len(had)} had these scores, {len(failed)} failed."

    @property
    def failure(self) -> str:
        """How many runs were not evaluated, and why the first was not."""
        failed = self.found.failed
        what = "1 run was" if len(failed) == 1 else f"{len(failed)} runs were"
        return next((f"{what} not evaluated, {run.name} because: {why}" for run, why in failed.items()), "")

    def to_dict(self) -> dict[str, Any]:
        """The counts, the scores of every run that was evaluated now, and why others were not."""
        found = self.found
        counts = {name: len(getattr(found, name)) for name in ("evaluated", "skipped", "failed")}
        reasons = {str(run): why for run, why in found.failed.items()}
        return {**counts, "scores": [one.scores for one in found.evaluated], "reasons": reasons}

    def blocks(self, width: int) -> Iterable[Block]:
        """The counts; each run was reported when it ended."""
        return [Paragraph(self.headline())]


def _evaluated(scores: Mapping[str, Any], run: str) -> EvaluatedRow:
    core, depth = scores.get("core") or {}, scores.get("kl_depth") or {}
    loss = (scores.get("validation") or {}).get("loss")
    return EvaluatedRow(run, "evaluated", loss, core.get("core22"), depth.get("depth"))


@dataclass(frozen=True)
class TaskRow:
    """A task, and whether it passes the filter."""

    task: str
    gap: Annotated[float, Column("points above chance", lambda gap: f"{100 * gap:+.2f}", align="right")]
    tau: Annotated[float, Column("τ_b", "+.3f")]
    passed: Annotated[bool, Column("selected")]
    reason: str


@dataclass(frozen=True, eq=False, repr=False)
class FilteredTasks(Result):
    """Tasks above chance that improve with training, from the CORE scores of reference runs."""

    arm: str
    runs: int
    results: Mapping[str, TaskFilter]

    @property
    def selected(self) -> list[str]:
        """The labels of the tasks that pass."""
        return [label for label, result in self.results.items() if result.passed]

    @property
    def rows(self) -> list[TaskRow]:
        """One row per task."""
        return [TaskRow(label, r.gap, r.tau, r.passed, r.reason) for label, r in self.results.items()]

    def headline(self) -> str:
        """How many tasks are selected."""
        tasks = f"{len(self.selected)} of {len(self.results)} tasks"
        return f"{tasks} selected, from {self.runs} runs of {self.arm}."

    def to_dict(self) -> dict[str, Any]:
        """The selected labels, and the two criteria of every task."""
        values = {label: asdict(result) for label, result in self.results.items()}
        return {"arm": self.arm, "runs": self.runs, "selected": self.selected, "tasks": values}
