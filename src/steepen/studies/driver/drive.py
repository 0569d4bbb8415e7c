"""Drives a study: takes the specs it yields, gets their records from store or launcher, sends them back."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, TypeVar

from steepen.errors import SteepenError
from steepen.launch.base import Failure, Launcher, Outcome
from steepen.launch.batch_progress import BatchProgress
from steepen.launch.budget import Budget, BudgetReached
from steepen.launch.cost_estimate import flops_left
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.studies.driver.journal import Journal

A = TypeVar("A")

# A study yields batches of specs, is sent their records in the same order, and returns its answer.
# (What is sent is `list[RunRecord]`, or `list[RunRecord | None]` where gaps are accepted.)
Study = Generator[Sequence[RunSpec], Any, A]


class RunsFailed(SteepenError):
    """Some runs of a batch cannot be finished; the others have been."""

    def __init__(self, failed: Sequence[Outcome]) -> None:
        self.failed = list(failed)
        first = failed[0]
        spec, failure = first.spec, first.failure
        assert failure is not None
        more = (
            f" ({len(failed) - 1} more failed; see `steepen runs --status failed`)" if len(failed) > 1 else ""
        )
        tried = f" after {first.retried} retries" if first.retried else ""
        super().__init__(
            f"run {spec.hash} ({spec.arm.name} d{spec.shape.depth}) failed{tried}: "
            f"{failure.kind}: {failure.message}{more}"
        )


class Stopped(SteepenError):
    """A signal asked the driver to stop; the runs have saved."""

    resumable = True

    def __init__(self, number: int) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        super().__init__(f"stopped by {name}; runs are saved, and the same command goes on from there.")
        self.exit_code = 128 + number


@dataclass(frozen=True)
class DryRunStep:
    """How far a study comes with what is finished, and the runs it would make next."""

    finished: int  # runs it asked for that are in the store
    batch: list[RunSpec]  # to be made: of the first batch that is not, and any that will follow for sure
    complete: bool  # the study came to its answer: nothing is left to run
    answer: Any = None
    later: list[RunSpec] = field(default_factory=list[RunSpec])  # that would follow, by stand-in results


def drive(
    study: Study[A],
    store: RunStore,
    launcher: Launcher,
    *,
    journal: Journal | None = None,
    budget: Budget | None = None,
    gaps: bool = False,
    retry_diverged: bool = False,
    progress: BatchProgress | None = None,
) -> A:
    """Run a study to its answer.

    Finished specs come from the store, the others from the launcher. A run that cannot be finished raises
    `RunsFailed`, after all others of its batch have ended. With `gaps`, a run that *diverged* is a result:
    the study is sent None in its place. A run that has diverged is not trained again unless `retry_diverged`.
    With a budget the runs that fit are made, and `BudgetReached` is raised for those that did not. Whatever
    is raised, and whenever the process is stopped or killed, the same call goes on from there.
    """
    progress = progress or BatchProgress(store, quiet=True)
    with contextlib.ExitStack() as stack:
        if journal is not None:
            stack.enter_context(journal.driving())
        stack.enter_context(_stop_on_sigterm())
        stack.enter_context(progress)
        batch = _Batch(store, launcher, budget, gaps, retry_diverged, progress)
        try:
            specs = next(study)
            while True:
                if journal is not None:
                    journal.ask(specs)
                specs = study.send(batch.run(specs))
        except StopIteration as end:
            if journal is not None:
                journal.answer(end.value)
            return end.value
        except KeyboardInterrupt:
            raise Stopped(signal.SIGINT) from None


def simulate_study(study: Study[Any], store: RunStore, *, gaps: bool = False) -> DryRunStep:
    """Walk a study on what is finished, as far as that goes; starts nothing and writes nothing."""
    finished: set[str] = set()
    try:
        specs = next(study)
        while True:
            found = [_known(store, spec, gaps) for spec in specs]
            missing = {
                spec.hash: spec
                for spec, known in zip(specs, found, strict=True)
                if isinstance(known, _Missing)
            }
            finished |= {spec.hash for spec in specs} - missing.keys()
            if missing:
                study.close()
                return DryRunStep(len(finished), list(missing.values()), complete=False)
            specs = study.send(found)
    except StopIteration as end:
        return DryRunStep(len(finished), [], complete=True, answer=end.value)


def look_ahead(
    make_study: Callable[[], Study[Any]],
    store: RunStore,
    stand_ins: Sequence[Callable[[RunSpec], RunRecord]],
    *,
    gaps: bool = False,
) -> DryRunStep:
    """Rehearse a study to its end, with made-up results for the runs that are not finished.

    Runs that every stand-in leads to are known, whatever comes out; those only the first leads to are an
    estimate of how many more there will be. Without stand-ins this is `rehearse`.
    """
    first = simulate_study(make_study(), store, gaps=gaps)
    if first.complete or not stand_ins:
        return first
    walks = [_asked(make_study(), store, stand_in, gaps) for stand_in in stand_ins]
    sure = {spec.hash: spec for spec in first.batch}
    sure |= {run: spec for run, spec in walks[0].items() if all(run in walk for walk in walks)}
    later = [spec for run, spec in walks[0].items() if run not in sure]
    return replace(first, batch=list(sure.values()), later=later)


def _asked(
    study: Study[Any], store: RunStore, stand_in: Callable[[RunSpec], RunRecord], gaps: bool
) -> dict[str, RunSpec]:
    """Every unfinished run a study asks for, were they to come out like the stand-in."""
    asked: dict[str, RunSpec] = {}
    try:
        specs = next(study)
        while True:
            found = [_known(store, spec, gaps) for spec in specs]
            asked |= {s.hash: s for s, known in zip(specs, found, strict=True) if isinstance(known, _Missing)}
            specs = study.send(
                [stand_in(s) if isinstance(k, _Missing) else k for s, k in zip(specs, found, strict=True)]
            )
    except StopIteration:
        pass
    except SteepenError:  # made-up results beside real ones may not make a fit: what was asked is known
        study.close()
    return asked


class _Missing:
    """Nothing is known of a run yet."""


def _known(store: RunStore, spec: RunSpec, gaps: bool) -> RunRecord | _Missing | None:
    """A finished run's record, None for one that diverged where that counts as a result, or `_Missing`."""
    run = store.run(spec)
    record = run.record()
    if record is not None:
        return record
    failure = run.failure()
    if gaps and failure is not None and failure[0] == "Diverged" and not run.busy():
        return None
    return _Missing()


@dataclass
class _Batch:
    """Gets one batch of records after another."""

    store: RunStore
    launcher: Launcher
    budget: Budget | None
    gaps: bool
    retry_diverged: bool
    progress: BatchProgress

    def run(self, specs: Sequence[RunSpec]) -> list[RunRecord | None]:
        """The records of a batch, in its order."""
        unique = {spec.hash: spec for spec in specs}
        results: dict[str, RunRecord | None] = {}
        failed: list[Outcome] = []
        waiting: list[RunSpec] = []
        for name, spec in unique.items():
            record = self.store.record(spec)
            known = None if record is not None else self.store.run(spec).failure()
            if record is not None:
                results[name] = record
            elif known is not None and known[0] == "Diverged" and not self.retry_diverged:
                self._take(Outcome(spec, failure=Failure(*known)), results, failed)
            else:
                waiting.append(spec)
        self.progress.batch(list(unique.values()), waiting)
        refused: list[RunSpec] = []
        if waiting:
            outcomes = self.launcher.launch(self._admitted(waiting, refused))
            # Closing the iterator is what stops the runs, so it must happen however this loop is left.
            with contextlib.closing(outcomes):
                for outcome in outcomes:
                    self._take(outcome, results, failed)
                    self.progress.ended(outcome)
        if failed:
            raise RunsFailed(failed)
        if refused:
            raise self._over(waiting, refused)
        return [results[spec.hash] for spec in specs]

    def _take(self, outcome: Outcome, results: dict[str, RunRecord | None], failed: list[Outcome]) -> None:
        failure = outcome.failure
        if failure is None:
            results[outcome.spec.hash] = outcome.record
        elif self.gaps and failure.kind == "Diverged":
            results[outcome.spec.hash] = None
        else:
            failed.append(outcome)

    def _admitted(self, waiting: Sequence[RunSpec], refused: list[RunSpec]) -> Iterator[RunSpec]:
        """Specs in order, without those that do not fit into the budget: they end up in `refused`."""
        pending = list(waiting)
        # One that does not fit now is asked again later: measured speed may be better than assumed.
        while (spec := next(filter(self._fits, pending), None)) is not None:
            pending.remove(spec)
            self.progress.started(spec)
            yield spec
        refused += pending

    def _fits(self, spec: RunSpec) -> bool:
        """Whether the budget admits a run; where it does, the run is counted as spent."""
        return self.budget is None or self.budget.admits(*self._cost(spec))

    def _cost(self, spec: RunSpec) -> tuple[float, float]:
        """FLOPs and seconds to the end of a run."""
        flops = flops_left(spec, self.store.run(spec))
        return flops, self.progress.speed().seconds(spec, flops)

    def _over(self, waiting: Sequence[RunSpec], refused: Sequence[RunSpec]) -> BudgetReached:
        budget = self.budget
        assert budget is not None
        costs = [self._cost(spec) for spec in refused]
        made, left = len(waiting) - len(refused), sum(flops for flops, _ in costs)
        were = "run of this batch was" if made == 1 else "runs of this batch were"
        are = "run is" if len(refused) == 1 else "runs are"
        state = f"{made} {were} made, {len(refused)} {are} left ({left:.3g} FLOPs)"
        if any(budget.serves_again(*cost) for cost in costs):
            return BudgetReached(
                f"the budget of {budget} is reached: {state}; the same command goes on from here."
            )
        needed = budget.needed(*min(costs, key=lambda cost: cost[budget.flops is None]))
        return BudgetReached(
            f"the budget of {budget} is too small for what is left: {state}, and the smallest needs "
            f"{needed}; raise --budget to go on."
        )


@contextlib.contextmanager
def _stop_on_sigterm() -> Generator[None]:
    """SIGTERM stops the driver as Ctrl-C does: the runs save, and all stays resumable."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
