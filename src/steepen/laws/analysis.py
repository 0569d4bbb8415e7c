"""From ladders to everything this room can say about them: laws, verdicts, multipliers, hold-outs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from steepen.errors import UsageError
from steepen.laws.fits.compute_law import ComputeFit, FitSettings, Loss, law_dict
from steepen.laws.fits.joint_method import fit_joint
from steepen.laws.fits.paper_method import fit_paper
from steepen.laws.fits.solver import Array
from steepen.laws.hypotheses.diagnostics import (
    SharedIrreducibleLoss,
    collect_warnings,
    lack_of_fit,
    shared_irreducible_loss,
)
from steepen.laws.hypotheses.nested_models import DecisionRule
from steepen.laws.ladder import Ladder, check_ladders
from steepen.laws.verdict.evidence import Verdict
from steepen.laws.verdict.holdout import HoldOut, score_hold_outs
from steepen.laws.verdict.judge import judge_arm
from steepen.laws.verdict.multipliers import Multiplier, fitted_multipliers, interpolated_multipliers

MethodChoice = Literal["both", "joint", "paper"]


@dataclass(frozen=True)
class AnalysisRequest:
    """What to do with the ladders. `method` names the laws to report; `both` heads its list with the joint
    one.
    """

    reference: str
    method: MethodChoice = "both"
    loss: Loss = "huber"
    c0: float | None = None
    confidence: float = 0.90
    noise: float | None = None
    level: float = 0.05
    margin: float = 0.025
    draws: int = 2000
    seed: int = 0
    budget: float | None = None
    extrapolate: bool = False
    unit: str = "FLOPs"  # what the ladders are measured along, for the sentences

    def __post_init__(self) -> None:
        if self.method not in ("both", "joint", "paper"):
            raise UsageError(f"method is {self.method!r}; choose both, joint or paper.")
        if not 0 < self.level < 0.5:
            raise UsageError(f"level is {self.level}; give a share between 0 and 0.5, such as 0.05.")
        if self.draws < 100:
            raise UsageError(f"draws is {self.draws}; a bootstrap needs at least 100.")
        if self.margin <= 0:
            raise UsageError(f"margin is {self.margin}; give a share of γ greater than zero, such as 0.025.")
        if self.budget is not None and not self.budget > 0:
            raise UsageError(f"budget is {self.budget}; give FLOPs greater than zero.")

    @property
    def rule(self) -> DecisionRule:
        """How verdicts are reached."""
        return DecisionRule(self.level, self.margin, self.noise, self.loss == "log-mse")


@dataclass(frozen=True)
class LadderAnalysis:
    """Laws by each way asked for, a verdict per arm, multipliers by each method, scored hold-outs and
    warnings.
    """

    request: AnalysisRequest
    fits: dict[str, ComputeFit]
    verdicts: dict[str, Verdict]
    multipliers: dict[str, tuple[Multiplier, ...]]
    hold_out: tuple[HoldOut, ...]
    p_lack_of_fit: float | None
    shared_irreducible_loss: SharedIrreducibleLoss
    warnings: tuple[str, ...]

    @property
    def primary_fit(self) -> ComputeFit:
        """The fit whose numbers come first: the joint one unless only the paper's was asked for."""
        return self.fits.get("joint") or self.fits["paper"]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; infinite or undefined numbers become null when written by `to_json`."""
        arms: dict[str, Any] = {}
        for name, law in self.primary_fit.arms.items():
            verdict = self.verdicts.get(name)
            arms[name] = {
                **law_dict(law),
                "verdict": verdict.word if verdict else "reference",
                "sentence": verdict.sentence if verdict else "the reference",
                "delta_gamma": verdict.delta_gamma if verdict else 0.0,
                "delta_gamma_interval": list(verdict.delta_gamma_interval) if verdict else [0.0, 0.0],
                "p_shared_irreducible_loss": self.shared_irreducible_loss.by_arm.get(name),
                "verdict_detail": verdict.to_dict() if verdict else None,
                "multipliers": [asdict(m) for m in self.multipliers.get(name, ())],
                **{way: law_dict(fit.arms[name]) for way, fit in self.fits.items()},
            }
        return {
            "law": "compute",
            "form": "loss = e + exp(log_a) * (flops / c0) ** -gamma",
            "reference": self.request.reference,
            "method": self.primary_fit.settings.method,
            "settings": asdict(self.request),
            "c0": self.primary_fit.c0,
            "sigma": self.primary_fit.sigma,
            "degrees_of_freedom": self.primary_fit.degrees_of_freedom,
            "arms": arms,
            "hold_out": [asdict(h) for h in self.hold_out],
            "p_lack_of_fit": self.p_lack_of_fit,
            "p_shared_irreducible_loss": self.shared_irreducible_loss.p,
            "warnings": list(self.warnings),
        }

    def summary(self) -> str:
        """Everything as text."""
        parts = [fit.summary() for fit in self.fits.values()]
        parts += [verdict.summary() for verdict in self.verdicts.values()]
        parts += [
            f"held out {h.arm} at {h.flops:.3g}: {h.observed:.4f} against {h.forecast:.4f}, miss"
            f" {h.miss:+.4f}"
            f" ({h.miss_sigma:+.1f}σ, {h.compute_factor:.2f}× in compute)"
            for h in self.hold_out
        ]
        return "\n".join([*parts, *(f"warning: {warning}" for warning in self.warnings)])


def fit_compute(ladders: dict[str, Ladder], settings: FitSettings) -> ComputeFit:
    """Fit L(C) = E + A·(C/C0)^−γ to every arm by `settings.method`."""
    check_ladders(ladders, settings.reference)
    return fit_joint(ladders, settings) if settings.method == "joint" else fit_paper(ladders, settings)


def analyse(
    ladders: dict[str, Ladder],
    request: AnalysisRequest,
    hold_out: dict[str, Ladder] | None = None,
    progress: Callable[[str], None] | None = None,
) -> LadderAnalysis:
    """Fit the laws, judge every arm against the reference, and score what was held out.

    `progress` is called with an arm's name once it has been judged.
    """
    ways = ("joint", "paper") if request.method == "both" else (request.method,)
    base = FitSettings(
        reference=request.reference, loss=request.loss, c0=request.c0,
        confidence=request.confidence, noise=request.noise,
    )  # fmt: skip
    fits: dict[str, ComputeFit] = {way: fit_compute(ladders, replace(base, method=way)) for way in ways}
    head = fits.get("joint") or fits["paper"]
    reference = ladders[request.reference]
    verdicts: dict[str, Verdict] = {}
    multipliers: dict[str, tuple[Multiplier, ...]] = {}
    for name, ladder in ladders.items():
        if name == request.reference:
            continue
        verdicts[name] = judge_arm(
            reference,
            ladder,
            base,
            request.rule,
            draws=request.draws,
            seed=request.seed,
            budget=request.budget,
            unit=request.unit,
        )
        found = interpolated_multipliers(
            reference, ladder, sigma=verdicts[name].sigma, confidence=request.confidence, seed=request.seed
        )
        for fit in fits.values():
            found += fitted_multipliers(
                fit, name, _points(reference, request), extrapolate=request.extrapolate
            )
        multipliers[name] = tuple(found)
        if progress is not None:
            progress(name)
    scores = (
        [_with_readings(h, verdicts, head.c0) for h in score_hold_outs(head, hold_out)] if hold_out else []
    )
    p_lack = lack_of_fit(ladders, head)
    floors = shared_irreducible_loss(ladders, head)
    return LadderAnalysis(
        request, fits, verdicts, multipliers, tuple(scores), p_lack, floors,
        collect_warnings(ladders, head, p_lack, floors, request.level),
    )  # fmt: skip


def _points(reference: Ladder, request: AnalysisRequest) -> Array:
    further = [request.budget] if request.budget is not None and request.extrapolate else []
    return np.concatenate([reference.flops, further])


def _with_readings(held: HoldOut, verdicts: dict[str, Verdict], c0: float) -> HoldOut:
    """What the exponent and the floor reading each forecast for a held-out run of an arm."""
    verdict = verdicts.get(held.arm)
    if verdict is None:
        return held
    x = np.log(held.flops / c0)
    forecasts = {
        name: float(r.e[1] + np.exp(r.log_a[1] - r.gamma[1] * x))
        for name, r in verdict.hypotheses.items()
        if name in ("exponent", "irreducible")
    }
    return replace(held, forecast_by_hypothesis=forecasts)
