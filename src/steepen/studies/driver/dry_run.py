"""Dry runs: step through a study with finished and synthetic records, to see which runs it would make."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from steepen.errors import SteepenError
from steepen.launch.cost_estimate import Speed, remaining_flops
from steepen.recipe.memory import checkpoint_bytes
from steepen.results.dry_run import DryRun, DryRunRow
from steepen.runs.fields import varied_settings
from steepen.runs.record import RunRecord
from steepen.runs.spec import UNKNOWN_DATA, RunSpec, expected_flops
from steepen.runs.store import RunStore
from steepen.runs.trunk import first_steps, waiting
from steepen.studies.answer import Work
from steepen.studies.cells import lead


class _Stop(Exception):
    """Stops a simulated study at the first batch with unfinished runs."""


@dataclass
class SimulatedStudy:
    """How far a study comes with the finished records, and the runs that it would make next."""

    finished: set[str] = field(default_factory=set[str])  # requested runs that are in the store
    unfinished: dict[str, RunSpec] = field(default_factory=dict[str, RunSpec])  # requested, by hash
    complete: bool = False  # the study returned its answer: nothing is left to run
    answer: Any = None


def simulate_study(
    study: Work[Any],
    store: RunStore | None,
    *,
    accept_diverged: bool = False,
    stand_in: Callable[[RunSpec], RunRecord] | None = None,
) -> SimulatedStudy:
    """Step through a study with the finished records (none without a store); start and write nothing.

    It stops at the first batch with unfinished runs, or goes on with the records that `stand_in` makes of
    them.
    """
    found = SimulatedStudy()

    def records(specs: Sequence[RunSpec]) -> list[RunRecord | None]:
        every = {spec.hash: spec for spec in specs}
        missing = every if store is None else _unfinished(every, store, accept_diverged)
        found.finished |= every.keys() - missing.keys()
        found.unfinished |= missing
        if missing and stand_in is None:
            raise _Stop
        made = {name: stand_in(spec) for name, spec in missing.items() if stand_in is not None}
        return [made.get(spec.hash) or (store.record(spec) if store else None) for spec in specs]

    # Synthetic records beside real ones may fail a fit: then what was requested so far is returned.
    with contextlib.suppress(_Stop, *([SteepenError] if stand_in else [])):
        found.answer = lead(study, records)
        found.complete = not found.unfinished
    study.close()
    return found


def _unfinished(every: dict[str, RunSpec], store: RunStore, accept_diverged: bool) -> dict[str, RunSpec]:
    """The specs whose runs have no record; without those that diverged, if that is accepted."""

    def diverged(spec: RunSpec) -> bool:
        run = store.run(spec)
        failure = run.failure()
        return failure is not None and failure[0] == "Diverged" and not run.busy()

    return {
        name: spec
        for name, spec in every.items()
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
    available: int | None = None,
) -> DryRun:
    """The runs that a study would make next, with FLOPs, time and cost; starts and writes nothing.

    `stand_ins` make synthetic records that lead an adaptive study to its later runs. Runs that it requests
    with every one of them do not depend on results; those requested only with the first estimate how many
    more follow.
    """
    found = simulate_study(make_study(), store, accept_diverged=accept_diverged)
    asked = [
        simulate_study(make_study(), store, accept_diverged=accept_diverged, stand_in=one).unfinished
        for one in (() if found.complete else stand_ins)
    ]
    first = asked[0] if asked else dict[str, RunSpec]()
    certain = {run: spec for run, spec in first.items() if all(run in other for other in asked)}
    batch = found.unfinished | certain
    later = [spec for run, spec in first.items() if run not in batch]
    specs, varied = list(batch.values()), varied_settings(batch.values())
    starts = first_steps(store, specs)
    shared = {spec.hash: spec.branch_point for spec in waiting(store, specs)}
    begun = first_steps(store, later)
    costs = [remaining_flops(spec, begun[spec.hash]) for spec in later]
    return DryRun(
        len(found.finished), found.complete,
        tuple(_row(spec, starts[spec.hash], shared.get(spec.hash, 0), speed, varied) for spec in specs),
        slots, speed.source(specs), dollars_per_hour, len(later), sum(costs),
        sum(speed.seconds(s, cost) * speed.gpus_per_run.of(s) for s, cost in zip(later, costs, strict=True)),
        all(spec.data.identity != UNKNOWN_DATA for spec in specs), on_cpu, available,
    )  # fmt: skip


def _row(spec: RunSpec, start: int, shared: int, speed: Speed, varied: dict[str, str]) -> DryRunRow:
    flops = remaining_flops(spec, start)
    saved = checkpoint_bytes(spec.arm, spec.shape, spec.schedule.max_passes, spec.optimizer)
    return DryRunRow(
        spec.hash, spec.arm.name, spec.shape.depth, spec.seed, spec.tokens, flops, speed.seconds(spec, flops),
        saved, speed.gpus_per_run.of(spec), varied[spec.hash], expected_flops(spec, stop=shared),
    )  # fmt: skip
