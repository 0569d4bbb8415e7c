"""Analyse ladders of several arms: laws, a verdict for each arm, multipliers, hold-outs and warnings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from steepen.errors import UsageError
from steepen.laws.fits.compute_law import (
    ArmLaw,
    ComputeFit,
    FitSettings,
    Loss,
    ReferenceLaw,
    default_c0,
    law_dict,
)
from steepen.laws.fits.joint_method import fit_joint
from steepen.laws.fits.paper_method import fit_paper
from steepen.laws.fits.solver import Array
from steepen.laws.hypotheses.diagnostics import (
    SharedIrreducibleLoss,
    collect_warnings,
    lack_of_fit,
    shared_irreducible_loss,
)
from steepen.laws.hypotheses.nested_models import DecisionRule, holm_levels, verdict_label
from steepen.laws.hypotheses.noise_checks import CHECK_LEVEL
from steepen.laws.hypotheses.variance_components import held_out_weights, with_rung_component
from steepen.laws.ladder import Ladder, check_ladders
from steepen.laws.verdict.compare import Comparison, compare
from steepen.laws.verdict.evidence import Verdict
from steepen.laws.verdict.holdout import HeldOutLoss, score_hold_outs
from steepen.laws.verdict.judge import judge_arm
from steepen.laws.verdict.multipliers import (
    INTERPOLATIONS,
    Interpolate,
    Multiplier,
    fitted_multipliers,
    interpolated_multipliers,
)
from steepen.utils.process_pool import map_in_processes

MethodChoice = Literal["both", "joint", "paper"]


@dataclass(frozen=True)
class AnalysisRequest:
    """Settings of an analysis.

    `method` is how the compute law is fitted: `joint`, `paper`, or `both` (the joint fit comes first).
    `loss` and `reference_law` are settings of the paper's method (`FitSettings`), `interpolate` of measured
    multipliers. `level` is the family-wise error rate, of the whole table with `adjust` (Holm) and of each
    arm without it; `margin` is the largest |Δγ|/γ of a constant gain, `draws` the number of bootstrap
    draws, `budget` a further compute to predict at. `lr_regret` is the loss penalty of a learning rate off by
    a factor of 2 (`regret` of a sweep), with which tolerated penalties are also given as factors.
    """

    reference: str
    method: MethodChoice = "both"
    loss: Loss = "raw-huber"
    reference_law: ReferenceLaw = "regression"
    interpolate: Interpolate = "raw-loss"
    c0: float | None = None
    confidence: float = 0.90
    noise: float | None = None
    level: float = 0.05
    adjust: bool = True
    margin: float = 0.025
    draws: int = 2000
    seed: int = 0
    budget: float | None = None
    extrapolate: bool = False
    lr_regret: float | None = None
    unit: str = "FLOPs"  # of the ladders' x axis, for sentences

    def __post_init__(self) -> None:
        if self.method not in ("both", "joint", "paper"):
            raise UsageError(f"method is {self.method!r}; choose both, joint or paper.")
        if self.interpolate not in INTERPOLATIONS:
            raise UsageError(
                f"interpolate is {self.interpolate!r}; choose one of {', '.join(INTERPOLATIONS)}."
            )
        if not 0 < self.level < 0.5:
            raise UsageError(f"level is {self.level}; give a fraction between 0 and 0.5, such as 0.05.")
        if self.draws < 100:
            raise UsageError(f"draws is {self.draws}; a bootstrap needs at least 100.")
        if self.margin <= 0:
            raise UsageError(
                f"margin is {self.margin}; give a fraction of γ greater than zero, such as 0.025."
            )
        if self.lr_regret is not None and not self.lr_regret > 0:
            raise UsageError(f"lr_regret is {self.lr_regret}; give a loss greater than zero.")
        if self.budget is not None and not self.budget > 0:
            raise UsageError(f"budget is {self.budget}; give FLOPs greater than zero.")

    @property
    def rule(self) -> DecisionRule:
        """The rule that turns test results into verdicts."""
        return DecisionRule(self.level, self.margin, self.noise, self.loss == "log-mse")


@dataclass(frozen=True)
class LadderAnalysis:
    """The fit of each method, a verdict and multipliers for each arm, scored hold-outs and warnings."""

    request: AnalysisRequest
    fits: dict[str, ComputeFit]
    verdicts: dict[str, Verdict]
    multipliers: dict[str, tuple[Multiplier, ...]]
    hold_out: tuple[HeldOutLoss, ...]
    p_lack_of_fit: float | None
    shared_irreducible_loss: SharedIrreducibleLoss
    warnings: tuple[str, ...]

    @property
    def primary_fit(self) -> ComputeFit:
        """The joint fit, or the paper's if only that was requested."""
        return self.fits.get("joint") or self.fits["paper"]

    @property
    def one_e_rejected(self) -> bool:
        """Whether the data reject the joint fit's one E for all arms: its laws are then not extrapolated."""
        return "joint" in self.fits and _rejected(self.shared_irreducible_loss, self.request.level)

    def drawn_law(self, arm: str) -> ArmLaw:
        """The law that figures draw: of the primary fit, or the arm's own where one E for all is rejected.

        The intervals are those of the primary fit.
        """
        law = self.primary_fit.arms[arm]
        if not self.one_e_rejected:
            return law
        place, count = list(self.primary_fit.arms).index(arm), len(self.primary_fit.arms)
        e, log_a, gamma = (float(value) for value in self.shared_irreducible_loss.theta[place::count])
        return replace(
            law,
            e=replace(law.e, value=e),
            log_a=replace(law.log_a, value=log_a),
            gamma=replace(law.gamma, value=gamma),
        )

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and numbers, for JSON (`to_json` writes infinities and NaN as null)."""
        arms: dict[str, Any] = {}
        for name, law in self.primary_fit.arms.items():
            verdict = self.verdicts.get(name)
            arms[name] = {
                **law_dict(law),
                "verdict": verdict.word if verdict else "reference",
                "growth": verdict.growth if verdict else None,
                "by_what": verdict.by_what if verdict else None,
                "p_growth": verdict.p_slope if verdict else None,
                "growth_per_decade": verdict.growth_per_decade if verdict else None,
                "level": verdict.level if verdict else None,
                "claim": verdict.claim if verdict else None,
                "by_what_claim": verdict.by_what_claim if verdict else None,
                "fragile": list(verdict.fragile) if verdict else [],
                "demoted": verdict.demoted and asdict(verdict.demoted) if verdict else None,
                "unadjusted": verdict
                and verdict_label(verdict.unadjusted_growth, verdict.unadjusted_by_what),
                "sentence": verdict.sentence if verdict else "the reference",
                "delta_gamma": verdict.delta_gamma if verdict else 0.0,
                "delta_gamma_interval": list(verdict.delta_gamma_interval) if verdict else [0.0, 0.0],
                "p_shared_irreducible_loss": self.shared_irreducible_loss.by_arm.get(name),
                "verdict_detail": verdict.to_dict() if verdict else None,
                "multipliers": [asdict(m) for m in self.multipliers.get(name, ())],
                **{method: law_dict(fit.arms[name]) for method, fit in self.fits.items()},
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
        """Verdicts, laws, hold-outs and warnings as text."""
        parts = [verdict.summary() for verdict in self.verdicts.values()]
        parts += [fit.summary() for fit in self.fits.values()]
        parts += [
            f"held out {h.arm} at {h.flops:.3g}: {h.observed:.4f} against {h.forecast:.4f}, error"
            f" {h.error:+.4f}"
            f" ({h.error_in_sigma:+.1f}σ, {h.compute_factor:.2f}× in compute)"
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
    workers: int = 1,
) -> LadderAnalysis:
    """Fit the laws, judge every arm against the reference, and score the held-out rungs.

    `progress` is called with an arm's name when its verdict is done. `workers` processes judge the arms; the
    results do not depend on it.
    """
    methods = ("joint", "paper") if request.method == "both" else (request.method,)
    base = FitSettings(
        reference=request.reference, loss=request.loss, c0=request.c0, reference_law=request.reference_law,
        confidence=request.confidence, noise=request.noise,
    )  # fmt: skip
    check_ladders(ladders, request.reference)
    weighted = with_rung_component(ladders, request.c0 or default_c0(ladders[request.reference]))
    reference = ladders[request.reference]
    others = [ladder for name, ladder in ladders.items() if name != request.reference]
    comparing = partial(
        _compare,
        reference=reference,
        settings=base,
        rule=request.rule,
        arms=len(others) if request.adjust else 1,
    )
    compared = {one.arm.arm: one for one in map_in_processes(comparing, others, workers)}
    # A stated noise that the scatter about any verdict's laws contradicts is not used for the fits either.
    contradicted = any(one.p_scatter < CHECK_LEVEL for one in compared.values())
    noise = None if contradicted else request.noise
    fits: dict[str, ComputeFit] = {}
    not_fitted: list[str] = []
    for method in methods:
        try:
            fits[method] = fit_compute(weighted, replace(base, method=method, noise=noise))
        except UsageError as error:
            if method != "paper" or "joint" not in fits:
                raise
            not_fitted.append(f"the paper's method is left out. {error}")
    primary = fits.get("joint") or fits["paper"]
    levels = [request.level] * len(compared)
    if request.adjust:
        levels = holm_levels([one.tests for one in compared.values()], request.rule)
    verdicts: dict[str, Verdict] = {}
    multipliers: dict[str, tuple[Multiplier, ...]] = {}
    judging = partial(_judge, request=request, settings=base, arms=len(compared) if request.adjust else 1)
    judged = map_in_processes(judging, list(zip(compared.values(), levels, strict=True)), workers)
    for name, verdict in zip(compared, judged, strict=True):
        verdicts[name] = verdict
        found = interpolated_multipliers(
            weighted[request.reference],
            weighted[name],
            sigma=verdicts[name].sigma,
            confidence=request.confidence,
            seed=request.seed,
            interpolate=request.interpolate,
        )
        if verdicts[name].rejected("exponent"):
            # Both methods share E between the arms, which the data reject.
            found += [
                m for m in verdicts[name].leading_multipliers if request.extrapolate or not m.extrapolated
            ]
        else:
            at = _multiplier_flops(reference, request)
            for fit in fits.values():
                found += fitted_multipliers(
                    fit, name, at, extrapolate=request.extrapolate, leads=fit is primary
                )
        multipliers[name] = tuple(found)
        if progress is not None:
            progress(name)
    p_lack_of_fit = lack_of_fit(ladders, primary)
    shared = shared_irreducible_loss(ladders, primary)
    separate = weighted if "joint" in fits and _rejected(shared, request.level) else None
    held_out = hold_out or {}
    precisions = held_out_weights(held_out, ladders, weighted, primary.sigma)
    return LadderAnalysis(
        request=request,
        fits=fits,
        verdicts=verdicts,
        multipliers=multipliers,
        hold_out=score_hold_outs(primary, held_out, verdicts, separate, precisions),
        p_lack_of_fit=p_lack_of_fit,
        shared_irreducible_loss=shared,
        warnings=(
            *not_fitted,
            *collect_warnings(ladders, primary, p_lack_of_fit, shared, request.level, request.unit),
        ),
    )


def _rejected(shared: SharedIrreducibleLoss, level: float) -> bool:
    """Whether one E for all arms is rejected."""
    return shared.p is not None and shared.p < level


def _compare(
    arm: Ladder, reference: Ladder, settings: FitSettings, rule: DecisionRule, arms: int
) -> Comparison:
    return compare(reference, arm, settings, rule, arms)


def _judge(
    task: tuple[Comparison, float], request: AnalysisRequest, settings: FitSettings, arms: int
) -> Verdict:
    comparison, level = task
    return judge_arm(
        comparison,
        settings,
        level=level,
        arms=arms,
        draws=request.draws,
        seed=request.seed,
        budget=request.budget,
        lr_regret=request.lr_regret,
        unit=request.unit,
    )


def _multiplier_flops(reference: Ladder, request: AnalysisRequest) -> Array:
    """Where fitted multipliers are evaluated: the reference's rungs, and the budget when extrapolating."""
    budget = [request.budget] if request.budget is not None and request.extrapolate else []
    return np.concatenate([reference.flops, budget])
