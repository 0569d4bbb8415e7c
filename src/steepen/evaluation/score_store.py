"""Save and read the scores of a checkpoint, beside it and in its run's record.

RUN/evaluation/STEP/evaluation.json has the scores of one checkpoint; the record of a finished run also has
those of its last checkpoint. A smaller CORE evaluation never replaces a larger one.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from steepen.data import Dataset
from steepen.data.tokenizer import run_tokenizer_identity
from steepen.errors import SteepenError, UsageError
from steepen.evaluation.core.results import count_examples, may_replace
from steepen.evaluation.load import RunCheckpoint
from steepen.runs.record import check_scores
from steepen.runs.store import RunDirectory
from steepen.utils.json_io import read_json, with_checksum, without_checksum, write_json

SCORES_FILE = "evaluation.json"
MERGE_KEYS = ("run", "step", "passes", "precision")  # scores that agree in these may be merged in one file


@dataclass
class Evaluation:
    """The scores of a checkpoint, where they were saved, and notes for the user."""

    checkpoint: RunCheckpoint
    scores: dict[str, Any]
    in_record: bool = False  # whether they are in the run's record
    saved: Path | None = None
    notes: list[str] = field(default_factory=list[str])


def scores_directory(checkpoint: RunCheckpoint) -> Path:
    """Where the scores of a checkpoint are saved."""
    return checkpoint.run / "evaluation" / checkpoint.checkpoint.path.name


def check_tokenizer(checkpoint: RunCheckpoint, dataset: Dataset) -> None:
    """Raise for data with another tokenizer than the run's: losses per token could not be compared."""
    own = run_tokenizer_identity(RunDirectory(checkpoint.run).tokenizer_file)
    found = dataset.manifest.tokenizer.sha256
    if found != own:
        raise UsageError(
            f"{dataset.directory} has another tokenizer ({found[:12]}) than the run was trained with "
            f"({own[:12]}); give data prepared with the run's own tokenizer."
        )


def check_record_update(checkpoint: RunCheckpoint, update_record: bool | None) -> None:
    """Raise if scores are to be added to a record that cannot have them; before hours of evaluation."""
    if update_record and not checkpoint.is_final:
        raise UsageError(
            f"{checkpoint.checkpoint.path} is not the run's last checkpoint (step {checkpoint.step:,} of "
            f"{checkpoint.spec.steps:,}), so its scores cannot be added to the run's record; leave"
            " `update_record` out."
        )
    if update_record and not RunDirectory(checkpoint.run).record_file.exists():
        raise SteepenError(f"{checkpoint.run} has no record.json: finish the run first.")


def write_problem(directory: Path) -> str | None:
    """Why no file can be written into a directory, which is created; None if one can."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def save_scores(
    checkpoint: RunCheckpoint,
    scores: dict[str, Any],
    update_record: bool | None,
    problem: str | None = None,
) -> Evaluation:
    """Save scores beside the checkpoint and, with `update_record`, in the run's record.

    By default (None) only scores of the last checkpoint are added to it. Earlier scores that are
    not measured now are kept, and so is a larger CORE evaluation. `problem` says why nothing can be written
    beside the checkpoint; the record may still be.
    """
    update_record = checkpoint.is_final if update_record is None else update_record
    saved = Evaluation(checkpoint, scores)
    file, record_file = scores_directory(checkpoint) / SCORES_FILE, RunDirectory(checkpoint.run).record_file
    stored = {file: _valid_scores(_read_json(file))}
    if update_record:  # the record first: a note about it is the one to show
        stored = {record_file: _valid_scores(_read_json(record_file).get("evaluation")), **stored}
    for place, before in stored.items():
        if not _has_larger_core(before, scores):
            continue
        if not saved.notes:
            saved.notes.append(_larger_core_note(place, before, scores))
        if not _mergeable(before, scores):
            return saved
        scores = {**scores, "core": before["core"]}
    try:
        if problem is None:
            # The file first: a kill in between leaves the record as it was, and the next evaluation merges
            # with the file. One that exists and cannot be read raises here: it must not be overwritten.
            before = _valid_scores(_read_object(file)) if file.is_file() else {}
            write_json(file, with_checksum(_merge(before, scores)))
        saved.in_record = update_record and _update_record(checkpoint, scores)
    except OSError as error:
        problem = problem or error.strerror or str(error)
    if saved.in_record:
        saved.saved = record_file
    elif problem is None:
        saved.saved = file
    if problem is not None:
        what = "every example's outcome" if saved.in_record else "the scores"
        saved.notes.append(f"{what} could not be saved in {checkpoint.run} ({problem}).")
    return saved


def _update_record(checkpoint: RunCheckpoint, scores: dict[str, Any]) -> bool:
    """Merge scores into the run's record; returns whether there is one."""
    directory = RunDirectory(checkpoint.run)
    with directory.lock(wait=True):
        record = directory.record()
        if record is None:
            return False
        updated = replace(record, evaluation=_merge(record.evaluation, scores))
        write_json(directory.record_file, updated.to_dict())
    return True


def _mergeable(before: dict[str, Any], scores: dict[str, Any]) -> bool:
    """Whether both are scores of the same checkpoint in the same precision."""
    return all(before.get(name) == scores[name] for name in MERGE_KEYS)


def _merge(before: dict[str, Any], scores: dict[str, Any]) -> dict[str, Any]:
    """New scores over earlier ones of the same checkpoint.

    A smaller CORE evaluation does not replace a larger one, even one that another process wrote a moment ago.
    """
    if not _mergeable(before, scores):
        return scores
    kept = {"core": before["core"]} if _has_larger_core(before, scores) else {}
    return {**before, **scores, **kept}


def _has_larger_core(before: dict[str, Any], scores: dict[str, Any]) -> bool:
    """Whether saved scores have a CORE evaluation that the new ones must not replace."""
    old, new = before.get("core"), scores.get("core")
    if old is None or new is None:  # scores of another precision would replace all, CORE included
        return old is not None and not _mergeable(before, scores)
    return not may_replace(new, old)


def _larger_core_note(place: Path, before: dict[str, Any], scores: dict[str, Any]) -> str:
    """A note for the user that `place` keeps its larger CORE evaluation."""
    larger = f"{place} keeps its larger CORE result ({_size(before['core'])}"
    if _mergeable(before, scores):
        return f"{larger}); this one ({_size(scores['core'])}) was not saved there."
    return (
        f"{larger}, in {before.get('precision')}); what was measured in {scores['precision']} was not saved."
    )


def _size(core: Any) -> str:
    name = core.get("convention") or "an earlier version"
    seeds = len(core.get("seeds") or ())
    size = f"{len(core['tasks'])} tasks, {seeds} seeds, {count_examples(core):,} examples"
    return f"{size}, convention: {name}"


def _valid_scores(scores: Any) -> dict[str, Any]:
    """The scores of a file; {} where a field is missing or of a wrong type, as if there were none."""
    try:
        check_scores(scores)
    except UsageError:
        return {}
    return scores


def _read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if it cannot be read."""
    try:
        return _read_object(file)
    except OSError:
        return {}


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if it holds anything else."""
    try:
        value = without_checksum(read_json(file))
    except ValueError:
        return {}
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}
