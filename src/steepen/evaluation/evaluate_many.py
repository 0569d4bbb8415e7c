"""Evaluate many runs one after another: finished ones are skipped, failures are listed, time is estimated."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steepen.errors import SteepenError, UsageError
from steepen.evaluation.evaluate_run import Evaluation, EvaluationRequest, evaluate
from steepen.evaluation.load import RunCheckpoint, find_checkpoint
from steepen.runs.spec import expected_flops
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
            raise UsageError(f"{path} is not a directory; give runs, a store of runs, or --study.")
        own = sorted(file.parent for file in path.glob("*/record.json"))
        if not (path / "record.json").exists() and not (path / "spec.json").exists() and own:
            found += own
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def choose_shard(runs: Sequence[Path], shard: str | None) -> list[Path]:
    """Every N-th run from the I-th, for `I/N` counted from 0; all without a shard."""
    if shard is None:
        return list(runs)
    first, slash, count = shard.partition("/")
    numbers = all(word.isdecimal() and len(word) < 10 for word in (first, count))
    if not (slash and numbers and int(first) < int(count)):
        raise UsageError(f"--shard {shard!r} is not valid: write I/N with I from 0 to N − 1, e.g. 0/8.")
    return list(runs)[int(first) :: int(count)]


def request_key(request: EvaluationRequest, checkpoint: RunCheckpoint, data: str) -> str:
    """Digest of what decides the scores of a checkpoint: the request, the step, the data's identity."""
    options = request.core_options
    content = {
        "step": checkpoint.step,
        "data": data,
        "core": None if request.core is None else request.core.identity,
        "options": None
        if options is None or request.core is None
        else [options.seeds, options.examples, options.tasks, options.convention],
        "kl_depth": [request.kl_threshold, request.kl_direction, request.kl_depth_tokens]
        if request.kl_depth
        else None,
        "passes": list(request.passes),
        "validation_tokens": request.validation_tokens,
    }
    return hashlib.sha256(canonical_json(content)).hexdigest()[:16]


def evaluate_many(
    runs: Sequence[Path],
    data: Path,
    request: EvaluationRequest,
    *,
    report: Callable[[str], None],
    **options: Any,
) -> ManyScores:
    """Evaluate runs in turn; `report` gets a line after each, with an estimate of the time left.

    A run whose scores for the same request are saved is skipped, so the same command resumes. A run that
    cannot be evaluated is named at the end and does not stop the others. `options` are those of `evaluate`.
    """
    from steepen.data import Dataset
    from steepen.utils.formatting import format_duration

    dataset = Dataset.open(data)
    found = ManyScores()
    waiting: list[tuple[Path, RunCheckpoint, str]] = []
    for run in runs:
        try:
            checkpoint = find_checkpoint(run)
        except SteepenError as error:
            found.failed[run] = str(error)
            continue
        key = request_key(request, checkpoint, dataset.identity)
        if key in _done(checkpoint):
            found.skipped.append(run)
        else:
            waiting.append((run, checkpoint, key))
    if found.skipped:
        report(f"{len(found.skipped)} runs have these scores already.")
    costs = [expected_flops(c.spec) / c.spec.tokens for _, c, _ in waiting]  # FLOPs per token
    begun, spent = time.monotonic(), 0.0
    for number, (run, checkpoint, key) in enumerate(waiting, start=1):
        name = (
            f"{number}/{len(waiting)} {checkpoint.spec.arm.name} d{checkpoint.spec.shape.depth} ({run.name})"
        )
        try:
            scores = evaluate(checkpoint, dataset, request, **options)
        except SteepenError as error:
            found.failed[run] = str(error)
            report(f"{name}: failed: {error}")
        else:
            found.evaluated.append(scores)
            write_json(_done_file(checkpoint), sorted({*_done(checkpoint), key}))
            report(f"{name}: {_words(scores.scores)}")
        spent += costs[number - 1]
        left = sum(costs[number:])
        if left:
            seconds = (time.monotonic() - begun) * left / spent
            report(f"about {format_duration(seconds)} left")
    return found


def _words(scores: dict[str, Any]) -> str:
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
