"""Forecast CORE at a larger compute from the task scores of smaller runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from steepen.errors import UsageError
from steepen.evaluation.core.suite import CORE17
from steepen.evaluation.scored_runs import ScoredRun, ScoreSeries, choose_tasks, find_runs
from steepen.laws.fits.downstream import (
    GPT3_CORE,
    Checkpoints,
    DownstreamFit,
    HeldOutScore,
    RatioFrom,
    TaskResiduals,
    fit_downstream,
)

MIN_RUNS = 4  # of a series, to fit a law to its task losses
Held = Mapping[str, Sequence[ScoredRun]]  # runs that take part in no fit, by the label of their series


@dataclass(frozen=True)
class Forecast:
    """A fit of the series' scores, and what it forecasts.

    Runs that were held out by name take no part in `fit`; the largest runs, held out by default for a check
    of the method (`hold_out_scores`), do.
    """

    series: tuple[ScoreSeries, ...]  # with the runs that were held out
    tasks: tuple[str, ...]
    fit: DownstreamFit
    is_core: bool = True  # False: the score is the mean centred accuracy of `tasks`
    held_out: Held = field(default_factory=dict[str, Sequence[ScoredRun]])  # by name; empty for the check
    hold_out_scores: tuple[tuple[ScoredRun, HeldOutScore], ...] = ()
    targets: tuple[float, ...] = ()  # FLOPs

    @property
    def references(self) -> Mapping[str, float]:
        """Published scores to compare with: none for a score that is not CORE."""
        return GPT3_CORE if self.is_core else {}

    @property
    def score_name(self) -> str:
        """The key of the score in JSON."""
        return "core" if self.is_core else "mean_centered"

    def score(self, run: ScoredRun) -> float | None:
        """The measured score of a run."""
        return run.core22 if self.is_core else run.mean_centered(self.tasks)

    @cached_property
    def checkpoints(self) -> dict[str, Checkpoints]:
        """What was fitted, by series."""
        return {
            one.label: one.without(self.held_out.get(one.label, ())).checkpoints(self.tasks, self.score)
            for one in self.series
        }

    @cached_property
    def crossings(self) -> dict[str, dict[str, float]]:
        """FLOPs at which a series is forecast to reach a reference score; infinite if out of reach."""
        return {
            name: {one.label: self.fit.compute_for(one.label, score) for one in self.series}
            for name, score in self.references.items()
        }

    def at_targets(self) -> list[tuple[str, float, float]]:
        """(series, FLOPs, score) forecast at the targets."""
        return [
            (one.label, flops, float(self.fit.predict(one.label, flops)[0]))
            for flops in self.targets
            for one in self.series
        ]


def forecast(
    series: Sequence[ScoreSeries],
    *,
    tasks: str | Sequence[str] = "core17",
    held_out: Sequence[str] | None = None,
    targets: Sequence[float] = (),
    residuals: TaskResiduals = "raw-nll",
    ratio: RatioFrom = "measured",
) -> Forecast:
    """Fit the scores of runs, compare with held-out runs, and forecast the score at `targets` FLOPs.

    `held_out` are beginnings of run names: these runs take no part in any fit. None checks the method on
    each series' largest run, if it has more than MIN_RUNS, with a fit of its own; the forecasts use every
    run. `residuals` and `ratio` are options of `fit_downstream`; the defaults are the paper's authors'.
    Where a run lacks some of CORE's 22 tasks, the mean of `tasks` is forecast instead of CORE.
    """
    runs = [run for one in series for run in one.runs]
    labels = choose_tasks(tasks, runs)
    is_core = all(run.core22 is not None for run in runs)
    held = _held_out(series, held_out)

    def score(run: ScoredRun) -> float:
        return run.core22 if is_core and run.core22 is not None else run.mean_centered(labels)

    def fitted(without: Held) -> DownstreamFit:
        tables = {
            one.label: one.without(without.get(one.label, ())).checkpoints(labels, score) for one in series
        }
        return fit_downstream(tables, labels, residuals=residuals, ratio=ratio)

    if not held:
        return Forecast(tuple(series), tuple(labels), fitted({}), is_core, targets=tuple(targets))
    check = fitted(held)
    compared = [
        (run, check.hold_out(label, run.flops, score(run))) for label, own in held.items() for run in own
    ]
    # Runs that were held out by name stay out; the largest ones only checked the method.
    fit, kept = (fitted({}), dict[str, Sequence[ScoredRun]]()) if held_out is None else (check, held)
    return Forecast(tuple(series), tuple(labels), fit, is_core, kept, tuple(compared), tuple(targets))


def _held_out(series: Sequence[ScoreSeries], names: Sequence[str] | None) -> Held:
    """The runs of each series that these names begin, or its largest where it has more than MIN_RUNS.

    Raises UsageError where too few are left of a series to fit a law to.
    """
    if names is None:
        held = {one.label: list(one.runs[-1:]) for one in series if len(one.runs) > MIN_RUNS}
    else:
        chosen = {run.run for run in find_runs((run for one in series for run in one.runs), names)}
        held = {one.label: [run for run in one.runs if run.run in chosen] for one in series}
    for one in series:
        left = len(one.runs) - len(held.get(one.label, ()))
        if left < MIN_RUNS:
            besides = " besides those held out" if held.get(one.label) else ""
            raise UsageError(
                f"{one.label} has {left} scored runs{besides}; a task law needs at least {MIN_RUNS} (choose "
                "others with `arms`)."
            )
    return {label: own for label, own in held.items() if own}


def forecast_core(series: Sequence[ScoreSeries], targets: Sequence[float] = ()) -> Forecast | None:
    """CORE of the series with enough runs that have every task; None if there is none."""
    tables = {one.label: one.checkpoints(CORE17) for one in series}
    known = {label: own for label, own in tables.items() if len(own.flops) >= MIN_RUNS}
    if not known:
        return None
    fit = fit_downstream(known, CORE17)
    return Forecast(tuple(s for s in series if s.label in known), CORE17, fit, targets=tuple(targets))
