"""Where the scores of a checkpoint go, beside it and into its run's record, and which may go there."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from steepen.errors import SteepenError, UsageError
from steepen.evaluation.measure import LoadedCheckpoint

if TYPE_CHECKING:
    from steepen.data import Dataset

ALIKE = ("run", "step", "passes", "precision")  # what results must share to stand in one file


@dataclass(frozen=True)
class Elsewhere(LoadedCheckpoint):
    """A checkpoint whose results are kept in another folder than its run's."""

    folder: Path
    why: str | None = None  # what is wrong with the run's own folder

    @staticmethod
    def of(subject: LoadedCheckpoint, folder: Path, why: str | None = None) -> Elsewhere:
        """The subject, with its results in a folder."""
        return Elsewhere(subject.run, subject.spec, subject.checkpoint, folder, why)

    @property
    def results(self) -> Path:
        """Where this checkpoint's results are kept."""
        return self.folder


@dataclass
class Kept:
    """What became of results: whether they joined the record, the file they are in, and what to say."""

    joined: bool
    saved: Path | None
    notes: list[str] = field(default_factory=list[str])


def has_tokenizer_of(subject: LoadedCheckpoint, dataset: Dataset, join: bool | None) -> bool:
    """Whether data surely has a run's tokenizer.

    Refused where it surely has another, or where it may have and its scores are to join the record.
    """
    own, vocabulary = dataset.manifest.tokenizer.sha256, subject.spec.shape.vocabulary
    if dataset.identity == subject.spec.data.identity:
        return True
    known = _known_tokenizer(subject)
    if known is not None and known != own:
        raise UsageError(
            f"{dataset.directory} has another tokenizer ({own[:12]}) than the run was trained with "
            f"({known[:12]}); give data prepared with the run's own tokenizer."
        )
    if known is None and dataset.padded_vocabulary != vocabulary:
        raise UsageError(
            f"{dataset.directory} has another tokenizer than the run was trained with (its vocabulary is "
            f"{dataset.padded_vocabulary:,}, the run's {vocabulary:,}); give data prepared with the run's "
            "own tokenizer."
        )
    if known is None and join:
        raise UsageError(
            f"{dataset.directory} is not what the run was trained on and may have another tokenizer, so its "
            "scores cannot join the run's record; leave --join out, or evaluate on the run's own data once."
        )
    return known is not None


def _known_tokenizer(subject: LoadedCheckpoint) -> str | None:
    """The hash of a run's tokenizer, where an evaluation on the run's own data has left it."""
    from steepen.runs.store import RunDirectory

    record = RunDirectory(subject.run).record()
    folder = subject.run / "evaluation"
    saved = [{} if record is None else record.evaluation]
    saved += [_read_json(file) for file in sorted(folder.glob("*/evaluation.json"))]
    for scores in saved:
        if isinstance(scores.get("tokenizer"), str):
            return scores["tokenizer"]
        outcomes = scores.get("core", {}).get("outcomes")
        if outcomes and scores.get("data") == subject.spec.data.identity:
            # STEP/core/KEY, wherever the run stood when it was scored.
            settings = _read_json(folder.joinpath(*Path(outcomes).parts[-3:], "settings.json"))
            if isinstance(settings.get("tokenizer"), str):
                return settings["tokenizer"]
    return None


@contextlib.contextmanager
def somewhere(subject: LoadedCheckpoint) -> Generator[LoadedCheckpoint]:
    """The subject with a folder that can be written: its own, or else one that is gone afterwards."""
    try:
        subject.results.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=subject.results).close()
    except OSError as error:
        why = _reason(error)
    else:
        yield subject
        return
    with tempfile.TemporaryDirectory(prefix="steepen-eval-") as name:
        spare = Path(name) / "results"
        if subject.results.is_dir():  # what was scored before need not be scored again
            shutil.copytree(subject.results, spare)
        yield Elsewhere.of(subject, spare, why)


def keep_scores(subject: LoadedCheckpoint, found: dict[str, Any], join: bool | None) -> Kept:
    """Save results and join them to the run's record, but never in the place of a larger look at CORE.

    By default only what the run ended with is joined. What was measured before and is not measured now stays.
    """
    from steepen.runs.store import RunDirectory

    why = subject.why if isinstance(subject, Elsewhere) else None
    if why is not None and "core" in found:
        found["core"]["outcomes"] = None
    kept = Kept(False, None)
    file, record_file = subject.results / "evaluation.json", RunDirectory(subject.run).record_file
    places = [(file, _read_json(file))]
    if _joins(subject, join):
        places.insert(0, (record_file, _read_json(record_file).get("evaluation", {})))
    for place, before in places:
        alike = _alike(before, found)
        note = _larger(place, before, found, alike)
        if note is None:
            continue
        if not kept.notes:
            kept.notes.append(note)
        if not alike:  # they cannot stand in one file
            return kept
        found = {**found, "core": before["core"]}
    try:
        kept.joined = _save(subject, found, join)
    except OSError as error:
        why = why or _reason(error)
    if kept.joined:
        kept.saved = record_file
    elif why is None:
        kept.saved = file
    if why is not None:
        what = "every example's outcome" if kept.joined else "the scores"
        kept.notes.append(f"{what} could not be saved in {subject.run} ({why}).")
    return kept


def _save(subject: LoadedCheckpoint, found: dict[str, Any], join: bool | None) -> bool:
    """Write results beside the checkpoint and into the run's record; returns whether they joined it."""
    from steepen.runs.store import RunDirectory
    from steepen.utils.json_io import write_json

    file = subject.results / "evaluation.json"
    # A file that is there and cannot be read is an error here: it must not be written over.
    write_json(file, _merged(_object_in(file) if file.is_file() else {}, found))
    if not _joins(subject, join):
        return False
    if not subject.final:
        raise UsageError(
            f"{subject.checkpoint.path} is not what the run ended with (step {subject.checkpoint.step:,} of "
            f"{subject.spec.steps:,}), so its scores cannot join the run's record; leave --join out."
        )
    directory = RunDirectory(subject.run)
    with directory.lock(wait=True):
        record = directory.record()
        if record is None:
            if join:
                raise SteepenError(f"{subject.run} has no record.json to join: finish the run first.")
            return False
        joined = replace(record, evaluation=_merged(record.evaluation, found))
        write_json(directory.record_file, joined.to_dict())
    return True


def _joins(subject: LoadedCheckpoint, join: bool | None) -> bool:
    """Whether results are to join the run's record."""
    return subject.final if join is None else join


def _alike(before: dict[str, Any], found: dict[str, Any]) -> bool:
    """Whether results are of the same checkpoint and precision; others would not belong together."""
    return all(before.get(name) == found[name] for name in ALIKE)


def _merged(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """New results over old ones they belong with.

    A smaller look at CORE does not displace a larger one, also where that was written a moment ago by another
    process: a quick check must not cost a record its scores.
    """
    from steepen.evaluation.core.results import covers

    if not _alike(before, found):
        return found
    merged = {**before, **found}
    if "core" in before and "core" in found and not covers(found["core"], before["core"]):
        merged["core"] = before["core"]
    return merged


def _larger(place: Path, before: dict[str, Any], found: dict[str, Any], alike: bool) -> str | None:
    """What to say where a file has a larger look at CORE than is found now."""
    from steepen.evaluation.core.results import covers

    old, new = before.get("core"), found.get("core")
    if old is None or (new is None and alike) or (new is not None and covers(new, old)):
        return None
    larger = f"{place} keeps its larger CORE result ({_size(old)}"
    if alike:
        return f"{larger}); this one ({_size(new)}) was not saved there."
    return (
        f"{larger}, in {before.get('precision')}); what was measured in {found['precision']} was not saved."
    )


def _size(core: Any) -> str:
    examples = sum(task["examples"] for task in core["tasks"].values())
    return f"{len(core['tasks'])} tasks, {len(core['seeds'])} seeds, {examples:,} examples"


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _read_json(file: Path) -> dict[str, Any]:
    """An object of a file; an empty one where there is none to read."""
    try:
        return _object_in(file)
    except OSError:
        return {}


def _object_in(file: Path) -> dict[str, Any]:
    """The object a file holds; an empty one where it holds something else."""
    try:
        value = json.loads(file.read_text())
    except ValueError:
        return {}
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}
