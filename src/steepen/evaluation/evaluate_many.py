"""Evaluate many runs one after another: finished ones are skipped, failures are listed, time is estimated."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from steepen.data import Dataset
from steepen.errors import SteepenError, UsageError
from steepen.evaluation.load import RunCheckpoint, find_checkpoint
from steepen.evaluation.score_options import ScoreOptions
from steepen.evaluation.score_store import Evaluation
from steepen.runs.spec import expected_flops
from steepen.utils.formatting import format_duration
from steepen.utils.json_io import canonical_json, read_json, write_json

DONE_FILE = "done.json"  # RUN/evaluation/done.json: requests that were answered in full


@dataclass
class ManyScores:
    """Runs that were evaluated now, that had been before, and that failed with their reasons."""

    evaluated: list[Evaluation] = field(default_factory=list[Evaluation])
    skipped: list[Path] = field(default_factory=list[Path])
    failed: dict[Path, str] = field(default_factory=dict[Path, str])


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Run and checkpoint directories among paths; a store stands for all its finished runs."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise UsageError(f"{path} is not a directory; give runs, a store of runs, or `study`.")
        own = sorted(file.parent for file in path.glob("*/record.json"))
        if not (path / "record.json").exists() and not (path / "spec.json").exists() and own:
            found += own
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def choose_part(runs: Sequence[Path], part: str | None) -> list[Path]:
    """Every N-th run from the I-th, for `I/N` counted from 0; all without `part`."""
    if part is None:
        return list(runs)
    first, slash, count = part.partition("/")
    numbers = all(word.isdecimal() and len(word) < 10 for word in (first, count))
    if not (slash and numbers and int(first) < int(count)):
        raise UsageError(f"`split_runs` = {part!r} is not valid: write I/N with I from 0 to N − 1, e.g. 0/8.")
    return list(runs)[int(first) :: int(count)]


def request_key(scores: ScoreOptions, checkpoint: RunCheckpoint, data: str) -> str:
    """Digest of what decides the scores of a checkpoint: what is measured, the step, the data's identity."""
    core, depth = scores.core_options, [scores.kl_threshold, scores.kl_direction, scores.kl_depth_tokens]
    content = {
        "step": checkpoint.step,
        "data": data,
        "core": None if scores.bundle is None else scores.bundle.identity,
        "options": None
        if scores.bundle is None
        else [core.seeds, core.examples, core.tasks, core.convention],
        "kl_depth": depth if scores.kl_depth else None,
        "passes": list(scores.passes or ()),
        "validation_tokens": scores.validation_tokens,
    }
    return hashlib.sha256(canonical_json(content)).hexdigest()[:16]


@dataclass(frozen=True)
class WaitingRun:
    """A run that does not have the requested scores yet."""

    run: Path
    checkpoint: RunCheckpoint
    key: str  # of the request, see `request_key`

    @property
    def cost(self) -> float:
        """FLOPs per token, to which the time of an evaluation is proportional."""
        return expected_flops(self.checkpoint.spec) / self.checkpoint.spec.tokens


# Runs with their scores, or with the reason why there are none.
Measured: TypeAlias = Iterator[tuple[WaitingRun, Evaluation | str]]


def evaluate_many(
    runs: Sequence[Path],
    data: Any,
    options: ScoreOptions,
    measure: Callable[[Sequence[WaitingRun], Dataset], Measured],
) -> ManyScores:
    """Evaluate runs with `measure`; a line after each goes to standard error, with the time left.

    A run whose scores for the same request are saved is skipped, so the same command resumes. A run that
    cannot be evaluated is named at the end and does not stop the others.
    """
    dataset = Dataset.open(data) if isinstance(data, str | Path) else data
    found = ManyScores()
    waiting: list[WaitingRun] = []
    for run in runs:
        try:
            checkpoint = find_checkpoint(run)
        except SteepenError as error:
            found.failed[run] = str(error)
            continue
        key = request_key(options, checkpoint, dataset.identity)
        if key in _done(checkpoint):
            found.skipped.append(run)
        else:
            waiting.append(WaitingRun(run, checkpoint, key))
    if count := len(found.skipped):
        _report(f"{count} {'run has' if count == 1 else 'runs have'} these scores already.")
    left, begun = sum(one.cost for one in waiting), time.monotonic()
    spent = 0.0
    for done, (one, measured) in enumerate(measure(waiting, dataset), start=1):
        spec = one.checkpoint.spec
        name = f"{done}/{len(waiting)} {spec.arm.name} d{spec.shape.depth} ({one.run.name})"
        if isinstance(measured, str):
            found.failed[one.run] = measured
            _report(f"{name}: failed: {measured}")
        else:
            found.evaluated.append(measured)
            _report(f"{name}: {_words(measured.scores)}")
            done_file = _done_file(one.checkpoint)
            try:
                write_json(done_file, sorted({*_done(one.checkpoint), one.key}))
            except OSError as error:
                why = f"nothing could be saved in {done_file.parent} ({error.strerror})"
                _report(f"{why}: the run will be evaluated again.")
        spent, left = spent + one.cost, left - one.cost
        if done < len(waiting):
            seconds = (time.monotonic() - begun) * max(0.0, left) / spent
            _report(f"about {format_duration(seconds)} left")
    return found


def _report(text: str) -> None:
    print(text, file=sys.stderr)


def _words(scores: dict[str, Any]) -> str:
    if "validation" not in scores:
        return "evaluated"
    parts = [f"validation loss {scores['validation']['loss']:.4f}"]
    if core := scores.get("core"):
        known = core.get("core22")
        parts.append(f"CORE22 {known:.4f}" if known is not None else f"{len(core['tasks'])} tasks")
    if depth := scores.get("kl_depth"):
        parts.append(f"KL depth {depth['depth']} of {depth['executed']}")
    return ", ".join(parts)


def _done_file(checkpoint: RunCheckpoint) -> Path:
    return checkpoint.run / "evaluation" / DONE_FILE


def _done(checkpoint: RunCheckpoint) -> list[str]:
    try:
        found = read_json(_done_file(checkpoint))
    except (OSError, ValueError):  # none yet, or damaged: evaluated again
        return []
    return [str(key) for key in found] if isinstance(found, list) else []
