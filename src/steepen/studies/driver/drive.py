"""Drive a study: run the specs it yields, unless they have finished, and send their records back.

The flow: `drive` takes the study's lock and leads its generator. Every batch that it yields is written to
the journal, then `_BatchRunner.run` answers it: finished runs from the store, the others from the launcher,
as the budget admits them. The answer is written to the journal last.

A study has no state of its own to restore. It is a generator that yields the same specs for the same records,
and a record is in the store once its run has finished; so a study resumes by being started again from its
first batch, which the store answers as far as it can. Everything below keeps that true.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, TypeVar, cast

from steepen.errors import SteepenError
from steepen.launch.base import Failure, Launcher, Outcome
from steepen.launch.batch_progress import BatchProgress
from steepen.launch.cost_estimate import Budget, BudgetReached, remaining_flops
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.runs.trunk import first_steps, share, start_step, waiting
from steepen.studies.answer import Answer
from steepen.studies.cells import lead
from steepen.studies.driver.journal import Journal

A = TypeVar("A")

# A study yields batches of specs, is sent their records in the same order, and returns its answer.
# It is sent `list[RunRecord]`, or `list[RunRecord | None]` with `accept_diverged`.
StudyGenerator = Generator[Sequence[RunSpec], Any, A]


class RunsFailed(SteepenError):
    """Some runs of a batch failed; the others have finished."""

    def __init__(self, failed: Sequence[Outcome]) -> None:
        self.failed = list(failed)
        first, *others = failed
        spec, failure = first.spec, first.failure
        assert failure is not None
        more = f" ({len(others)} more failed; see `steepen runs --status failed`)" if others else ""
        tried = f" after {first.retries} retries" if first.retries else ""
        super().__init__(
            f"run {spec.hash} ({spec.arm.name} d{spec.shape.depth}) failed{tried}: "
            f"{failure.kind}: {failure.message}{more}"
        )


class StudyStopped(SteepenError):
    """The driver was stopped by a signal, after its runs had saved."""

    resumable = True

    def __init__(self, number: int) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        super().__init__(f"stopped by {name}; the runs are saved, and the same command resumes them.")
        self.exit_code = 128 + number


def drive(
    study: StudyGenerator[A],
    store: RunStore,
    launcher: Launcher,
    *,
    journal: Journal | None = None,
    budget: Budget | None = None,
    accept_diverged: bool = False,
    retry_diverged: bool = False,
    progress: BatchProgress | None = None,
) -> A:
    """Run a study to its answer.

    Records of finished specs come from the store, the others from the launcher. A failed run raises
    `RunsFailed` after all others of its batch have ended. With `accept_diverged`, a diverged run is a result:
    the study is sent None in its place. A diverged run is not trained again unless `retry_diverged`. With a
    budget, the runs that fit are made and `BudgetReached` is raised for the rest. After any exception, stop
    or kill, the same call resumes the study.
    """
    progress = progress or BatchProgress(store, quiet=True)
    with contextlib.ExitStack() as stack:
        # In this order, so that on the way out the display ends first, and the journal, which is left last,
        # writes how the study ended when no run of it is under way.
        if journal is not None:
            stack.enter_context(journal.driving())
        stack.enter_context(_stop_on_sigterm())
        stack.enter_context(progress)
        batch = _BatchRunner(store, launcher, budget, accept_diverged, retry_diverged, progress)

        seen: dict[str, RunRecord] = {}

        def records(specs: Sequence[RunSpec]) -> list[RunRecord | None]:
            # Before its first run starts, so that `status` of a killed study knows every run it asked for.
            if journal is not None:
                journal.add_batch(specs)
            found = batch.run(specs)
            seen.update({one.run: one for one in found if one is not None})
            return found

        try:
            answer = lead(study, records)
        except KeyboardInterrupt:
            raise StudyStopped(signal.SIGINT) from None
        if isinstance(answer, Answer):
            answer = cast("A", replace(answer, warnings=(*answer.warnings, *_remarks(seen.values()))))
        # Only now, with every record in the store: an answer in the journal means that no run is left.
        if journal is not None:
            journal.set_answer(answer)
        return answer


def _remarks(records: Iterable[RunRecord]) -> list[str]:
    """What is to be said of runs that are no fair ones, each remark with its runs."""
    found: dict[str, list[str]] = {}
    for record in records:
        for remark in record.remarks:
            run = f"{record.spec.arm.name} d{record.spec.shape.depth} ({record.run[:8]})"
            found.setdefault(remark, []).append(run)
    return [
        f"{', '.join(runs[:3])}{f' and {len(runs) - 3} more' if len(runs) > 3 else ''}: {remark}"
        for remark, runs in found.items()
    ]


@dataclass
class _BatchRunner:
    """Runs one batch of specs after another."""

    store: RunStore
    launcher: Launcher
    budget: Budget | None
    accept_diverged: bool
    retry_diverged: bool
    progress: BatchProgress
    expected_ends: dict[str, float] = field(default_factory=dict)  # of started runs, monotonic clock
    under_way: dict[str, RunSpec] = field(default_factory=dict[str, RunSpec])  # given to the launcher
    held_back: bool = False  # whether a run was not given to it because it waits for its trunk

    def run(self, specs: Sequence[RunSpec]) -> list[RunRecord | None]:
        """The records of a batch, in the order of its specs."""
        unique = {spec.hash: spec for spec in specs}  # parts of a study may ask for the same run
        results: dict[str, RunRecord | None] = {}
        failed: list[Outcome] = []
        pending: list[RunSpec] = []
        for spec in unique.values():
            known = self._known_outcome(spec)
            if known is None:
                pending.append(spec)
            else:
                self._add_outcome(known, results, failed)
        share(self.store, pending)
        self.progress.start_batch(list(unique.values()), pending, self.launcher.slots)
        count, before = len(pending), -1
        # Again as long as runs were made and others waited for them, as branches do for their trunk.
        while pending and (before < 0 or (self.held_back and len(pending) < before)):
            before = len(pending)
            self.under_way.clear()
            outcomes = self.launcher.launch(self._admitted(pending))
            # Closing the iterator stops the runs, so close it however this loop ends.
            with contextlib.closing(outcomes):
                for outcome in outcomes:
                    self.under_way.pop(outcome.spec.hash, None)
                    self.expected_ends.pop(outcome.spec.hash, None)
                    self._add_outcome(outcome, results, failed)
                    self.progress.run_ended(outcome)
        # After all outcomes: a failed run does not cost the others of its batch, which are in the store now.
        # A failure comes before the budget, as a larger budget would not mend it.
        if failed:
            raise RunsFailed(failed)
        if pending:
            raise self._budget_reached(count, pending)
        return [results[spec.hash] for spec in specs]

    def _known_outcome(self, spec: RunSpec) -> Outcome | None:
        """What the store, which survives a kill of this process, has of a run; the journal is not asked."""
        record = self.store.record(spec)
        if record is not None:
            return Outcome(spec, record)
        failure = self.store.run(spec).failure()
        if failure is not None and failure[0] == "Diverged" and not self.retry_diverged:
            # Training is deterministic where the device allows it, so the failure is kept like a record.
            return Outcome(spec, failure=Failure(*failure))
        return None

    def _add_outcome(
        self, outcome: Outcome, results: dict[str, RunRecord | None], failed: list[Outcome]
    ) -> None:
        failure = outcome.failure
        if failure is None:
            results[outcome.spec.hash] = outcome.record
        elif self.accept_diverged and failure.kind == "Diverged":
            results[outcome.spec.hash] = None
        else:
            failed.append(outcome)

    def _admitted(self, pending: list[RunSpec]) -> Iterator[RunSpec]:
        """Take specs from `pending`, in order, that need not wait for a trunk and fit into the budget."""
        while True:
            held = {spec.hash for spec in waiting(self.store, [*self.under_way.values(), *pending])}
            ready = [spec for spec in pending if spec.hash not in held]
            self.held_back = len(ready) < len(pending)
            # A spec that does not fit now may fit later, when runs prove faster than assumed.
            spec = next(filter(self._fits, ready), None)
            if spec is None:
                return
            pending.remove(spec)
            self.under_way[spec.hash] = spec
            self.progress.run_started(spec)
            yield spec

    def _fits(self, spec: RunSpec) -> bool:
        """Whether the budget admits a run; if so, count it as spent.

        A launcher may set runs up ahead: such a run trains only when one of those before it has ended.
        """
        if self.budget is None:
            return True
        flops, seconds = self._remaining_cost(spec, start_step(spec, self.store.run(spec)))
        # It starts once fewer than `slots` of the admitted runs are left: at the slots-th latest end.
        ends = sorted(self.expected_ends.values(), reverse=True)
        slots, now = self.launcher.slots, time.monotonic()
        start = max(now, ends[slots - 1]) if len(ends) >= slots else now
        if not self.budget.admits(flops, start - now + seconds):
            return False
        self.expected_ends[spec.hash] = start + seconds
        return True

    def _remaining_cost(self, spec: RunSpec, start: int) -> tuple[float, float]:
        """FLOPs and seconds of a run from a step to its end."""
        flops = remaining_flops(spec, start)
        return flops, self.progress.speed().seconds(spec, flops)

    def _budget_reached(self, count: int, rejected: Sequence[RunSpec]) -> BudgetReached:
        budget = self.budget
        assert budget is not None
        starts = first_steps(self.store, rejected)
        costs = [self._remaining_cost(spec, starts[spec.hash]) for spec in rejected]
        made, left = count - len(rejected), sum(flops for flops, _ in costs)
        were = "run of this batch was" if made == 1 else "runs of this batch were"
        are = "run is" if len(rejected) == 1 else "runs are"
        state = f"{made} {were} made, {len(rejected)} {are} left ({left:.3g} FLOPs)"
        if any(budget.fits_fresh_budget(*cost) for cost in costs):
            return BudgetReached(f"the budget of {budget} is reached: {state}; the same command continues.")
        needed = budget.smallest_sufficient(*min(costs, key=lambda cost: cost[budget.flops is None]))
        return BudgetReached(
            f"the budget of {budget} is too small for what is left: {state}, and the smallest needs "
            f"{needed}; raise `budget` to go on."
        )


@contextlib.contextmanager
def _stop_on_sigterm() -> Generator[None]:
    """Make SIGTERM stop the driver as Ctrl-C does: the runs save and can be resumed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise StudyStopped(number)

    # An exception closes the launcher's iterator, which makes every run save a checkpoint.
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
