"""Dry runs: step through a study with finished and synthetic records, to see which runs it would make."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from steepen.errors import SteepenError
from steepen.launch.cost_estimate import Speed, remaining_flops
from steepen.recipe.memory import checkpoint_bytes
from steepen.results.dry_run import DryRun, DryRunRow
from steepen.runs.record import RunRecord
from steepen.runs.spec import UNKNOWN_DATA, RunSpec, expected_flops
from steepen.runs.store import RunStore
from steepen.runs.varied import varied_settings
from steepen.studies.answer import Work
from steepen.studies.cells import lead


class _Unfinished(Exception):
    """Runs of a simulated study that have no record yet."""

    def __init__(self, runs: list[RunSpec]) -> None:
        self.runs = runs


@dataclass(frozen=True)
class SimulatedStudy:
    """Result of simulating a study: its answer, or the runs that it would make next."""

    finished: int  # requested runs that are in the store
    batch: list[RunSpec]  # unfinished runs of the current batch, and later ones that do not depend on results
    complete: bool  # the study returned its answer: nothing is left to run
    answer: Any = None
    later: list[RunSpec] = field(default_factory=list[RunSpec])  # estimated from stand-in results


def simulate_study(study: Work[Any], store: RunStore, *, accept_diverged: bool = False) -> SimulatedStudy:
    """Step through a study with the finished records, as far as they go; start and write nothing."""
    finished: set[str] = set()

    def records(specs: Sequence[RunSpec]) -> list[RunRecord | None]:
        missing = _unfinished(specs, store, accept_diverged)
        finished.update({spec.hash for spec in specs} - missing.keys())
        if missing:
            raise _Unfinished(list(missing.values()))
        return [store.record(spec) for spec in specs]

    try:
        answer = lead(study, records)
    except _Unfinished as stop:
        study.close()
        return SimulatedStudy(len(finished), stop.runs, complete=False)
    return SimulatedStudy(len(finished), [], complete=True, answer=answer)


def simulate_with_stand_ins(
    make_study: Callable[[], Work[Any]],
    store: RunStore,
    stand_ins: Sequence[Callable[[RunSpec], RunRecord]],
    *,
    accept_diverged: bool = False,
) -> SimulatedStudy:
    """Simulate a study to its end, with synthetic records for the runs that have not finished.

    `stand_ins` make these records. Runs that the study requests with every one of them do not depend on the
    results; those requested only with the first estimate how many more follow. Without stand-ins this is
    `simulate_study`.
    """
    first = simulate_study(make_study(), store, accept_diverged=accept_diverged)
    if first.complete or not stand_ins:
        return first
    requests = [_requested_specs(make_study(), store, stand_in, accept_diverged) for stand_in in stand_ins]
    certain = {spec.hash: spec for spec in first.batch}
    certain |= {run: spec for run, spec in requests[0].items() if all(run in other for other in requests)}
    later = [spec for run, spec in requests[0].items() if run not in certain]
    return replace(first, batch=list(certain.values()), later=later)


def _requested_specs(
    study: Work[Any],
    store: RunStore,
    stand_in: Callable[[RunSpec], RunRecord],
    accept_diverged: bool,
) -> dict[str, RunSpec]:
    """Every unfinished run that a study requests if their records are the stand-in's, by hash."""
    requested: dict[str, RunSpec] = {}

    def records(specs: Sequence[RunSpec]) -> list[RunRecord | None]:
        missing = _unfinished(specs, store, accept_diverged)
        requested.update(missing)
        return [stand_in(spec) if spec.hash in missing else store.record(spec) for spec in specs]

    # Synthetic records beside real ones may fail a fit: then what was requested so far is returned.
    with contextlib.suppress(SteepenError):
        lead(study, records)
    return requested


def _unfinished(specs: Sequence[RunSpec], store: RunStore, accept_diverged: bool) -> dict[str, RunSpec]:
    """The specs whose runs have no record, by hash; without those that diverged, if that is accepted."""

    def diverged(spec: RunSpec) -> bool:
        run = store.run(spec)
        failure = run.failure()
        return failure is not None and failure[0] == "Diverged" and not run.busy()

    return {
        spec.hash: spec
        for spec in specs
        if store.record(spec) is None and not (accept_diverged and diverged(spec))
    }


def dry_run(
    make_study: Callable[[], Work[Any]],
    store: RunStore,
    speed: Speed,
    slots: int,
    *,
    stand_ins: Sequence[Callable[[RunSpec], RunRecord]] = (),
    accept_diverged: bool = False,
    dollars_per_hour: float | None = None,
    on_cpu: bool = False,
) -> DryRun:
    """The runs that a study would make next, with FLOPs, time and cost; starts and writes nothing.

    `stand_ins` make synthetic records that lead an adaptive study to its later runs.
    """
    found = simulate_with_stand_ins(make_study, store, stand_ins, accept_diverged=accept_diverged)
    varied = varied_settings(found.batch)
    return DryRun(
        found.finished, found.complete, tuple(_row(spec, store, speed, varied) for spec in found.batch),
        slots, speed.source(found.batch), dollars_per_hour,
        len(found.later), sum(map(expected_flops, found.later)),
        sum(speed.seconds(spec) * speed.gpus(spec) for spec in found.later),
        all(spec.data.identity != UNKNOWN_DATA for spec in found.batch), on_cpu,
    )  # fmt: skip


def _row(spec: RunSpec, store: RunStore, speed: Speed, varied: dict[str, str]) -> DryRunRow:
    flops = remaining_flops(spec, store.run(spec))
    saved = checkpoint_bytes(spec.arm, spec.shape, spec.schedule.max_passes, spec.optimizer)
    return DryRunRow(
        spec.hash, spec.arm.name, spec.shape.depth, spec.seed, spec.tokens, flops, speed.seconds(spec, flops),
        saved, speed.gpus(spec), varied[spec.hash],
    )  # fmt: skip
