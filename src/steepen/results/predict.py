"""The loss that fitted compute laws predict at any compute, with intervals for one run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from steepen.errors import UsageError
from steepen.results.result import Result
from steepen.results.table import Column
from steepen.utils.formatting import format_flops, percent

if TYPE_CHECKING:
    from steepen.laws.analysis import LadderAnalysis
    from steepen.laws.ladder import Ladder


@dataclass(frozen=True)
class PredictedLoss:
    """The predicted loss of a run of an arm; `decades_beyond` its ladder, negative within it."""

    arm: str
    flops: Annotated[float, Column("at", format_flops)]
    loss: Annotated[float, Column(format=".4f")]
    low: Annotated[float, Column(format=".4f")]
    high: Annotated[float, Column(format=".4f")]
    decades_beyond: Annotated[float, Column("decades beyond", ".1f")]
    confidence: Annotated[float, Column(shown=False)]


@dataclass(frozen=True, eq=False, repr=False)
class Predictions(Result):
    """Predicted losses; `unit` is that of their compute."""

    predicted: tuple[PredictedLoss, ...]
    unit: str

    @property
    def rows(self) -> tuple[PredictedLoss, ...]:
        """One row per arm and compute."""
        return self.predicted

    def headline(self) -> str:
        """What is predicted, and how sure."""
        return f"predicted loss of one run, {percent(self.predicted[0].confidence)} interval"

    def headings(self) -> dict[str, str]:
        """With the unit of compute."""
        return {"flops": f"at ({self.unit})"}


def predict(
    analysis: LadderAnalysis, ladders: dict[str, Ladder], flops: float | Iterable[float]
) -> Predictions:
    """The loss of every arm at one or more computes, by the law that figures draw.

    The interval covers the law's error and the noise of a run.
    """
    from steepen.laws.verdict.holdout import forecast_loss

    fit, judge, found = analysis.primary_fit, analysis.judge, list[PredictedLoss]()
    at = [float(flops)] if isinstance(flops, int | float) else [float(one) for one in flops]
    if not at or not all(math.isfinite(one) and one > 0 for one in at):
        raise UsageError(f"cannot predict at {flops!r}; give {analysis.request.unit} greater than zero.")
    for arm in fit.arms:
        for one in at:
            loss, error = forecast_loss(fit, judge, arm, one, judge.run_variance(one))
            reach, beyond = fit.quantile * error, math.log10(one / float(ladders[arm].flops[-1]))
            found.append(
                PredictedLoss(arm, one, loss, loss - reach, loss + reach, beyond, fit.settings.confidence)
            )
    return Predictions(tuple(found), analysis.request.unit)
