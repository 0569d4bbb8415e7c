"""Trunks: the first steps that several runs have in common are trained once.

A run's result depends on its spec alone, so runs that differ only in what comes later (the length of a `wsd`
schedule, the moment of growth) go through the same states until then: `RunSpec.trunk` names these steps,
`RunSpec.branch_point` says how many a run has of them. Of a group of such runs the one that branches off last
is trained first and keeps a checkpoint wherever another branches off; the others start from there.

`share` leaves an empty file .trunks/TRUNK/POINT-STEPS-RUN beside the runs for each of them, so that every
launcher's workers know. Nothing depends on it: a run that finds no checkpoint trains all its steps, to the
same result.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from steepen.errors import SteepenError
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunDirectory, RunStore, checkpoint_step
from steepen.utils.json_io import read_json

_DIRECTORY = ".trunks"
Kept = list[tuple[int, RunDirectory, list[Path]]]  # branch point, run and checkpoints


def group_by_trunk(specs: Iterable[RunSpec]) -> list[list[RunSpec]]:
    """The runs that share a trunk with others of `specs`, the one that branches off last first."""
    groups: dict[str, dict[str, RunSpec]] = {}
    for spec in specs:
        if spec.trunk is not None and spec.branch_point:
            groups.setdefault(spec.trunk, {})[spec.hash] = spec
    return [
        sorted(group.values(), key=lambda spec: (-spec.branch_point, -spec.steps, spec.hash))
        for group in groups.values()
        if len(group) > 1
    ]


def share(store: RunStore, specs: Sequence[RunSpec]) -> list[RunSpec]:
    """Note which of these runs share a trunk; returns those that wait until another has trained it."""
    for group in group_by_trunk(specs):
        for spec in group:
            note = _folder(store.root, spec) / f"{spec.branch_point}-{spec.steps}-{spec.hash}"
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()
    return waiting(store, specs)


def waiting(store: RunStore, specs: Iterable[RunSpec]) -> list[RunSpec]:
    """The runs that lack a checkpoint to start from, but for the first of each trunk, which trains it."""
    found: list[RunSpec] = []
    for group in group_by_trunk(specs):
        kept = _kept(group[0], store.run(group[0]))
        found += [one for one in group if start_step(one, store.run(one), kept) < one.branch_point][1:]
    return found


def first_steps(store: RunStore, specs: Sequence[RunSpec]) -> dict[str, int]:
    """The step at which each run starts, by hash, where these are trained together."""
    found = {spec.hash: start_step(spec, store.run(spec)) for spec in specs}
    return found | {one.hash: one.branch_point for one in waiting(store, specs)}


def shared_fractions(store: RunStore) -> dict[str, float]:
    """The fraction of the steps that another run trains, by hash, of the runs whose trunk is noted."""
    found: dict[str, float] = {}
    for folder in sorted((store.root / _DIRECTORY).glob("*")):
        notes = sorted(_notes(folder), key=lambda note: (-note[0], -note[1], note[2]))
        found |= {run: point / steps for point, steps, run in notes[1:]}
    return found


def start_step(spec: RunSpec, run: RunDirectory, kept: Kept | None = None) -> int:
    """The step of the newest checkpoint from which a run can go on, its own or of its trunk; 0 if none."""
    shared = [checkpoint_step(path.name) for path in shared_checkpoints(spec, run, kept)[:1]]
    return max(0, run.saved_step(), *shared)


def shared_checkpoints(spec: RunSpec, run: RunDirectory, kept: Kept | None = None) -> list[Path]:
    """Checkpoints of other runs that are states of this one too, newest first.

    `kept` are the checkpoints of the runs of its trunk, if they were read already.
    """
    found: list[Path] = []
    for point, other, saved in _kept(spec, run) if kept is None else kept:
        if other != run:
            last = min(point, spec.branch_point)
            found += [path for path in saved if 0 < checkpoint_step(path.name) <= last]
    return sorted(found, key=lambda path: (-checkpoint_step(path.name), path))


def _kept(spec: RunSpec, run: RunDirectory) -> Kept:
    found: Kept = []
    for point, other in _members(spec, run):
        with contextlib.suppress(OSError):
            found.append((point, other, list(other.checkpoints.iterdir())))
    return found


def branch_points_within(spec: RunSpec, run: RunDirectory) -> set[int]:
    """The steps of a run at which other, unfinished runs branch off."""
    return {
        point
        for point, other in _members(spec, run)
        if other != run and point <= spec.branch_point and not other.record_file.exists()
    }


def is_state_of(spec: RunSpec, checkpoint: Path) -> bool:
    """Whether a checkpoint in the store is a state of `spec` too, by the spec of its run.

    The notes do not say so for certain: anything may lie under their names.
    """
    its = _with_trunk_of(spec, RunDirectory(checkpoint.parents[1]))
    return its is not None and checkpoint_step(checkpoint.name) <= min(its.branch_point, spec.branch_point)


def _with_trunk_of(spec: RunSpec, run: RunDirectory) -> RunSpec | None:
    """The spec of a run in the store, if it has the trunk of `spec`."""
    try:
        its = RunSpec.from_dict(read_json(run.spec_file))
    except (OSError, ValueError, SteepenError):
        return None
    return its if its.hash == run.path.name and its.trunk == spec.trunk else None


def finished_trunk(spec: RunSpec, run: RunDirectory) -> list[RunDirectory]:
    """The runs of a trunk once all have finished, with their notes removed; before that, none."""
    members = [other for _, other in _members(spec, run)]
    if not all(other.record_file.exists() for other in members):
        return []
    if members:
        shutil.rmtree(_folder(run.path.parent, spec), ignore_errors=True)
    return [other for other in members if _with_trunk_of(spec, other)]


def _folder(root: Path, spec: RunSpec) -> Path:
    return root / _DIRECTORY / (spec.trunk or "none")


def _members(spec: RunSpec, run: RunDirectory) -> list[tuple[int, RunDirectory]]:
    """Branch point and directory of every run that was noted for the run's trunk."""
    root = run.path.parent
    return [(point, RunDirectory(root / name)) for point, _, name in _notes(_folder(root, spec))]


def _notes(folder: Path) -> list[tuple[int, int, str]]:
    """Branch point, steps and name of the runs that were noted in a trunk's folder."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError:
        return []
    parts = [name.split("-") for name in names if re.fullmatch(r"[0-9]+-[1-9][0-9]*-[^-]+", name)]
    return [(int(point), int(steps), name) for point, steps, name in parts]
