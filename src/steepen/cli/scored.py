"""Scores of runs: where `steepen eval` keeps them, and how `eval filter` and `forecast` read them."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from steepen.cli.measure import Subject
from steepen.errors import SteepenError, UsageError

if TYPE_CHECKING:
    from steepen.data import Dataset

ALIKE = ("run", "step", "passes", "precision")  # what results must share to stand in one file


@dataclass(frozen=True)
class Scored:
    """What the commands need of a run: who, how much training, and the scores of its tasks."""

    run: str
    arm: str
    depth: int
    tokens: float
    flops: float
    core: dict[str, Any]

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """Scores by task label."""
        return self.core["tasks"]

    def mean_centered(self, labels: Sequence[str]) -> float:
        """Mean centred accuracy of some tasks."""
        return sum(float(self.tasks[label]["centered"]) for label in labels) / len(labels)


def read_scored(paths: Sequence[Path]) -> list[Scored]:
    """The runs with CORE scores among stores, run directories and record files, by compute."""
    files: list[Path] = []
    for path in paths:
        if path.is_file():
            files.append(path)
        elif (path / "record.json").is_file():
            files.append(path / "record.json")
        elif path.is_dir():
            files += sorted(path.glob("*/record.json"))
        else:
            raise UsageError(f"{path} does not exist; give a store, a run directory or a record.json.")
    found = [scored for file in dict.fromkeys(files) if (scored := _read(file)) is not None]
    if not found:
        raise UsageError(
            f"none of the {len(files)} records has CORE scores; "
            "`steepen eval RUN --data … --core …` joins them."
        )
    return sorted(found, key=lambda scored: scored.flops)


def by_arm(runs: Sequence[Scored]) -> dict[str, list[Scored]]:
    """Runs grouped by their arm, in order of compute; an arm is one series."""
    groups: dict[str, list[Scored]] = {}
    for run in runs:
        groups.setdefault(run.arm, []).append(run)
    return groups


def _read(file: Path) -> Scored | None:
    from steepen.runs.record import RunRecord

    try:
        record = RunRecord.from_dict(json.loads(file.read_text()))
    except (OSError, ValueError, SteepenError) as error:
        raise SteepenError(f"the record {file} cannot be read ({error}).") from error
    core = record.evaluation.get("core")
    if core is None:
        return None
    spec = record.spec
    return Scored(record.run, spec.arm.name, spec.shape.depth, record.tokens, record.flops, core)


# --- where results are kept ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Elsewhere(Subject):
    """A checkpoint whose results are kept in another folder than its run's."""

    folder: Path
    why: str | None = None  # what is wrong with the run's own folder

    @staticmethod
    def of(subject: Subject, folder: Path, why: str | None = None) -> Elsewhere:
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


def has_tokenizer_of(subject: Subject, dataset: Dataset, join: bool | None) -> bool:
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


def _known_tokenizer(subject: Subject) -> str | None:
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


def _read_json(file: Path) -> dict[str, Any]:
    """An object of a file; an empty one where there is none to read."""
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


@contextlib.contextmanager
def somewhere(subject: Subject) -> Generator[Subject]:
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


def keep_scores(subject: Subject, found: dict[str, Any], join: bool | None) -> Kept:
    """Save results and join them to the run's record, but never in the place of a larger look at CORE."""
    from steepen.cli.measure import keep
    from steepen.runs.store import RunDirectory

    why = subject.why if isinstance(subject, Elsewhere) else None
    if why is not None and "core" in found:
        found["core"]["outcomes"] = None
    kept = Kept(False, None)
    file, record_file = subject.results / "evaluation.json", RunDirectory(subject.run).record_file
    places = [(file, _read_json(file))]
    if join or (join is None and subject.final):
        places.insert(0, (record_file, _read_json(record_file).get("evaluation", {})))
    for place, before in places:
        alike = all(before.get(name) == found[name] for name in ALIKE)
        note = _larger(place, before, found, alike)
        if note is None:
            continue
        if not kept.notes:
            kept.notes.append(note)
        if not alike:  # they cannot stand in one file
            return kept
        found = {**found, "core": before["core"]}
    try:
        kept.joined = keep(subject, found, join)
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


def _larger(place: Path, before: dict[str, Any], found: dict[str, Any], alike: bool) -> str | None:
    """What to say where a file has a larger look at CORE than is found now."""
    from steepen.evaluation.results import covers

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
