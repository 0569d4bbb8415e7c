"""A run as one flat row: what its record says or, until it has finished, its spec; and its status.

All is read from the files of the run, so it works on every machine that mounts the directory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from steepen.errors import SteepenError, is_whole
from steepen.recipe.flops import compute_active_parameters, stored_parameters
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec, expected_flops
from steepen.utils.codec import to_builtins
from steepen.utils.files import open_regular
from steepen.utils.formatting import is_number
from steepen.utils.json_io import parse_json, read_json
from steepen.utils.series import corpus_name, recipe_name

if TYPE_CHECKING:
    from steepen.runs.store import RunDirectory

Status = Literal["finished", "running", "failed", "interrupted", "waiting", "unknown"]
STATUSES: tuple[Status, ...] = get_args(Status)
CANNOT_TELL = (
    "cannot tell from here whether a process is at it: its lock cannot be read, or it was begun on another "
    "machine whose locks this file system does not show."
)
_SECTIONS = ("optimizer", "lr_schedule", "options")  # of a spec, whose fields keep the section's name


@dataclass(frozen=True)
class RunRow:
    """A run as one row of a table."""

    run: str
    arm: str
    depth: int
    seed: int
    tokens: int
    flops: float  # of the whole run, expected until it has finished; 0: only custom code could count them
    status: Status
    cause: str = ""  # of a failure, with its kind
    failure_kind: str = ""  # Diverged, OutOfMemory, DamagedRecord, …
    loss: float | None = None  # validation loss; until the run has finished, the last training loss
    step: int | None = None  # steps done, until the run has finished
    steps: int | None = None
    tokens_per_second: float | None = None
    finished: str = ""  # UTC
    corpus: str = ""  # content hash of the data, shortened; with the size of a pool
    recipe: str = ""  # digest of the hyperparameters; see `utils.series.recipe_name`
    # Every setting, size, cost and score by name: see `runs.fields`.
    more: Mapping[str, Any] = field(
        default_factory=dict[str, Any], repr=False, compare=False, metadata={"transient": True}
    )

    def to_dict(self) -> dict[str, Any]:
        """JSON values of the row itself, for --json."""
        return to_builtins(self)


def read_row(run: RunDirectory) -> RunRow:
    """The row of a run's record or, until it has finished, of its spec; FileNotFoundError if it has neither.

    The record is checked whole. A damaged one gives a row of status failed, with the reason; one that this
    user may not read, of status unknown.
    """
    try:
        try:
            return _finished_row(run)
        except FileNotFoundError:
            return _unfinished_row(run)
    except PermissionError as error:
        return RunRow(run.path.name, "?", 0, 0, 0, 0.0, "unknown", f"you may not read {error.filename}.")


def _finished_row(run: RunDirectory) -> RunRow:
    row: RunRow | None = None
    try:
        value = read_json(run.record_file)
        row = _row_of_record(run.path.name, value)
        run.check_name(value["run"])
        record = RunRecord.from_dict(value)
        return replace(row, more=_spec_fields(record.spec) | _record_fields(record))
    except (FileNotFoundError, PermissionError):
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SteepenError) as error:
        row = row or RunRow(run.path.name, "?", 0, 0, 0, 0.0, "failed")
        cause = str(run.unreadable(error))
        more: Mapping[str, Any] = {}
        with contextlib.suppress(FileNotFoundError):
            more = _unfinished_row(run).more
        return replace(row, status="failed", cause=cause, failure_kind="DamagedRecord", loss=None, more=more)


def _row_of_record(name: str, record: dict[str, Any]) -> RunRow:
    spec = record["spec"]
    numbers = (spec["shape"]["depth"], spec["seed"], record["tokens"], record["flops"])
    numbers = (*numbers, record["validation_loss"], record["tokens_per_second"])
    if not (all(map(is_number, numbers)) and isinstance(spec["arm"]["name"], str)):
        raise TypeError("a field has a wrong type")
    return RunRow(
        run=name,
        arm=spec["arm"]["name"],
        depth=spec["shape"]["depth"],
        seed=spec["seed"],
        tokens=record["tokens"],
        flops=record["flops"],
        status="finished",
        loss=record["validation_loss"],
        steps=spec.get("steps"),
        tokens_per_second=record["tokens_per_second"],
        finished=record["finished"],
        corpus=corpus_name(spec["data"]),
        recipe=recipe_name(spec),
    )


def _unfinished_row(run: RunDirectory) -> RunRow:
    try:
        spec = RunSpec.from_dict(read_json(run.spec_file))
    except (FileNotFoundError, PermissionError):
        raise
    except (OSError, ValueError, SteepenError) as error:
        return RunRow(
            run.path.name, "?", 0, 0, 0, 0.0, "failed", f"spec.json cannot be read: {error}", "DamagedSpec"
        )
    flops = 0.0
    with contextlib.suppress(SteepenError):  # counting may need a custom block's code, which no listing runs
        flops = expected_flops(spec)
    return RunRow(
        run=run.path.name,
        arm=spec.arm.name,
        depth=spec.shape.depth,
        seed=spec.seed,
        tokens=spec.tokens,
        flops=flops,
        status="waiting",
        steps=spec.steps,
        more=_spec_fields(spec),
    )


def _spec_fields(spec: RunSpec) -> dict[str, Any]:
    shape, data = spec.shape, spec.data
    fields: dict[str, Any] = {
        "recipe_arm": spec.arm.recipe,
        "width": shape.width,
        "context": shape.context,
        "vocabulary": shape.vocabulary,
        "steps": spec.steps,
        "batch_tokens": spec.batch_tokens,
        "precision": spec.precision,
        "data": data.identity,
        "pool_tokens": data.pool_tokens,
        "epochs": data.epochs,
        "block": spec.arm.block,
        **spec.hyperparameters.to_dict(),
    }
    for section in _SECTIONS:
        fields |= {f"{section}.{name}": one for name, one in to_builtins(getattr(spec, section)).items()}
    return fields | _counts(spec)


def _counts(spec: RunSpec) -> dict[str, Any]:
    """Passes and parameters that a spec implies, whether or not the run has finished."""
    counts: dict[str, Any] = {}
    try:
        counts["passes"] = final = spec.schedule.final
        counts["parameters"] = stored_parameters(spec.arm, spec.shape, final)
        counts["compute_active_parameters"] = compute_active_parameters(spec.arm, spec.shape, final)
    except Exception:  # custom code that is not here or not trusted
        pass
    return counts


def _record_fields(record: RunRecord) -> dict[str, Any]:
    parameters, hardware = record.parameters, record.hardware
    fields: dict[str, Any] = {
        "loss": record.validation_loss,
        "bits_per_byte": record.validation_bits_per_byte,
        "train_loss": record.train_loss,
        "parameters": parameters.stored,
        "initial_parameters": parameters.initial_stored,
        "compute_active_parameters": parameters.compute_active,
        "mean_compute_active_parameters": parameters.mean_compute_active,
        "embedding_parameters": parameters.embedding,
        "seconds_training": record.seconds_training,
        "seconds_total": record.seconds_total,
        "mfu": record.mfu,
        "peak_memory_bytes": record.peak_memory_bytes,
        "device": hardware.get("name") or hardware.get("device"),
        "host": hardware.get("host"),
        "validation_data": record.validation_identity,
        "resumed": record.resumed,
        "trunk": record.trunk or record.run,  # a run that shares its first steps with none is its own trunk
        "trunk_steps": record.trunk_steps,
        "spent_flops": record.spent_flops,
    }
    for score in record.validation_scores[-1:]:
        fields |= {f"loss.{name}": loss for name, loss in score.by_source.items()}
    return fields | score_fields(record.evaluation)


def score_fields(scores: dict[str, Any]) -> dict[str, Any]:
    """Scores of `steepen eval`: CORE, its tasks, KL effective depth."""
    fields: dict[str, Any] = {}
    core = scores.get("core") or {}
    for name in ("core22", "core17", "nll22", "bits_per_byte22"):
        if core.get(name) is not None:
            fields[name] = core[name]
    for task, score in (core.get("tasks") or {}).items():
        fields[f"core.{task}"] = score.get("centered")
    depth = scores.get("kl_depth") or {}
    if depth.get("depth") is not None:
        fields["kl_depth"] = depth["depth"]
    passes = scores.get("test_time_passes") or {}
    for count, loss in zip(passes.get("passes") or (), passes.get("losses") or (), strict=False):
        fields[f"loss_at_{count}_passes"] = loss
    return fields


def last_metrics(run: RunDirectory) -> dict[str, Any]:
    """The last complete line of metrics.jsonl; empty if there is none yet."""
    try:
        with open(run.metrics_file, "rb", opener=open_regular) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 8192))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            value = parse_json(line)
        except ValueError:  # the first or last line of the window, cut off
            continue
        if isinstance(value, dict) and is_number(value.get("loss")) and is_whole(value.get("step")):
            return value
    return {}


def status_of(run: RunDirectory) -> tuple[Status, tuple[str, str] | None]:
    """Status and, if failed or unknown, kind and message of the cause, from the run's files and its lock."""
    busy = run.busy()  # asked first: a run writes its record before it releases its lock
    if run.record_file.exists():
        return "finished", None
    if busy is True:
        return "running", None
    failure = run.failure()
    if failure is not None:
        return "failed", failure
    if busy is None:
        return "unknown", ("", CANNOT_TELL)
    begun = run.metrics_file.exists() or run.checkpoints.exists()
    return ("interrupted" if begun else "waiting"), None


def with_status(row: RunRow, run: RunDirectory) -> RunRow:
    """The row of a run that had no record, with its status, last loss and step as they are now."""
    status, failure = status_of(run)
    last = last_metrics(run)
    return replace(
        row,
        status=status,
        cause="" if failure is None else ": ".join(filter(None, failure)),
        failure_kind="" if failure is None else failure[0],
        loss=last.get("loss"),
        step=last.get("step", 0),
        tokens_per_second=speed if is_number(speed := last.get("tokens_per_second")) else None,
    )
