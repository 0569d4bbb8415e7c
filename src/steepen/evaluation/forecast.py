"""Forecast CORE at a larger compute from the task scores of smaller runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from steepen.errors import UsageError
from steepen.evaluation.scored_runs import RunsByArm, ScoredRun, checkpoint_tables, choose_tasks, hold_out
from steepen.laws.fits.downstream import (
    GPT3_CORE,
    DownstreamFit,
    HeldOutScore,
    RatioFrom,
    TaskResiduals,
    fit_downstream,
)

MIN_RUNS = 4  # of an arm, to fit a law to its task losses


@dataclass(frozen=True)
class Forecast:
    """A fit, its forecasts, and how well a fit without the held-out runs predicted them.

    Runs that were held out by name take no part in `fit`; the largest runs, held out by default for a check
    of the method, do.
    """

    runs: RunsByArm
    held_out: RunsByArm  # by name; empty for the default check
    tasks: tuple[str, ...]
    is_core: bool  # False: the score is the mean centred accuracy of `tasks`
    fit: DownstreamFit
    hold_out_scores: tuple[tuple[ScoredRun, HeldOutScore], ...]
    targets: tuple[float, ...]  # FLOPs
    references: Mapping[str, float]  # published CORE scores; empty unless `is_core`

    @property
    def score_name(self) -> str:
        """The key of the score in JSON."""
        return "core" if self.is_core else "mean_centered"

    def score(self, run: ScoredRun) -> float:
        """The measured score of a run."""
        return _score(run, self.tasks, self.is_core)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "score": self.score_name,
            "tasks": list(self.tasks),
            "runs": {name: [run.run for run in runs] for name, runs in self.runs.items()},
            "hold_out": [{"run": run.run, **asdict(result)} for run, result in self.hold_out_scores],
            "forecast": [
                {"arm": name, "flops": flops, self.score_name: float(self.fit.predict(name, flops)[0])}
                for flops in self.targets
                for name in self.runs
            ],
            "compute_for": [
                {
                    "reference": reference,
                    "core": value,
                    "arm": name,
                    "flops": self.fit.compute_for(name, value),
                }
                for reference, value in self.references.items()
                for name in self.runs
            ],
            "r": self.fit.r,
            "scatter": self.fit.sigma,
        }


def forecast(
    groups: RunsByArm,
    *,
    tasks: str | Sequence[str] = "core17",
    held_out: Sequence[str] | None = None,
    targets: Sequence[float] = (),
    residuals: TaskResiduals = "raw-nll",
    ratio: RatioFrom = "measured",
) -> Forecast:
    """Fit the scores of runs by arm, compare with held-out runs, and forecast the score at `targets` FLOPs.

    `held_out` are beginnings of run names: these runs take no part in any fit. None checks the method on
    each arm's largest run, if it has more than MIN_RUNS, with a fit of its own; the forecasts use every run.
    `residuals` and `ratio` are options of `fit_downstream`; the defaults are the paper's authors'.
    Where a run lacks some of CORE's 22 tasks, the mean of `tasks` is forecast instead of CORE.
    """
    for flops in targets:
        if not 0 < flops < float("inf"):
            raise UsageError(f"--target {flops} is not valid: give a positive number of FLOPs.")
    labels = choose_tasks(tasks, groups)
    is_core = all(run.has_core for runs in groups.values() for run in runs)

    def score(run: ScoredRun) -> float:
        return _score(run, labels, is_core)

    fitted, held = hold_out(groups, held_out, MIN_RUNS)
    for name, runs in groups.items():
        if len(runs) < MIN_RUNS:
            raise UsageError(
                f"{name} has {len(runs)} scored runs; a task law needs at least {MIN_RUNS} (choose others "
                "with --arms)."
            )

    def fitted_to(runs: RunsByArm) -> DownstreamFit:
        return fit_downstream(
            checkpoint_tables(runs, labels, score), labels, residuals=residuals, ratio=ratio
        )

    short = [name for name, runs in fitted.items() if held.get(name) and len(runs) < MIN_RUNS]
    if short:
        raise UsageError(
            f"{short[0]} has {len(fitted[short[0]])} scored runs besides those held out; a task law needs at "
            f"least {MIN_RUNS}."
        )
    without = fitted_to(fitted) if held else None
    fit = without if without is not None and held_out is not None else fitted_to(groups)
    compared: list[tuple[ScoredRun, HeldOutScore]] = []
    if without is not None:
        compared = [
            (run, without.hold_out(name, run.flops, score(run)))
            for name, runs in held.items()
            for run in runs
        ]
    return Forecast(
        groups,
        {} if held_out is None else held,
        tuple(labels),
        is_core,
        fit,
        tuple(compared),
        tuple(targets),
        GPT3_CORE if is_core else {},
    )


def _score(run: ScoredRun, tasks: Sequence[str], is_core: bool) -> float:
    return float(run.core["core22"]) if is_core else run.mean_centered(tasks)
