"""`Answer`, what a study returns: findings, typed verdicts and fits, tables, and panels for the report."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from steepen.laws.fits.compute_law import ArmLaw
from steepen.laws.fits.drift import AffineLaw, Drift
from steepen.laws.fits.isoflop import IsoflopFit, PowerLawFit
from steepen.laws.verdict.evidence import Verdict
from steepen.recipe.recipe_file import RecipeFile
from steepen.results.panel import Axis, Panel, Role, Scale, Series
from steepen.results.table import Table
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.utils.codec import from_builtins, to_builtins

__all__ = [
    "Answer",
    "Axis",
    "Fit",
    "Panel",
    "Role",
    "Scale",
    "Series",
    "Study",
    "StudyFit",
    "StudyVerdict",
    "Table",
]

# JSON cannot represent these; they are written as strings inside verdicts and fits.
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class StudyVerdict:
    """A verdict on one ladder, with its arm, variant and part of the study."""

    verdict: Verdict
    arm: str  # the arm's name; `verdict.arm` is the ladder's label
    variant: str = ""  # as in `Series`
    part: str = ""  # which part of the study judged it
    primary: bool = True  # False: beside the main verdict, as per second beside per FLOP

    @property
    def measure(self) -> str:
        """What the ladders are compared by: "per FLOP" or "per second"."""
        return "per second" if self.verdict.unit == "seconds" else "per FLOP"


Fit: TypeAlias = ArmLaw | IsoflopFit | Drift | AffineLaw | PowerLawFit


@dataclass(frozen=True)
class StudyFit:
    """A fitted law, and what it describes."""

    fit: Fit
    quantity: str  # what the law gives: "loss", "tokens per parameter", a hyperparameter …
    against: str  # what it is a law of: "FLOPs", "seconds", "stored parameters" …
    arm: str  # the arm, or the family of arms
    variant: str = ""
    part: str = ""
    method: str = ""  # "joint" or "paper", where there are two


@dataclass(frozen=True)
class Answer:
    """A study's answer. `findings` are sentences beside the verdicts, which state themselves."""

    study: str
    question: str
    section: str  # of the paper
    findings: tuple[str, ...]
    values: dict[str, Any]  # every number under its name, as JSON values
    verdicts: tuple[StudyVerdict, ...] = ()
    fits: tuple[StudyFit, ...] = ()
    recipes: tuple[RecipeFile, ...] = ()  # of a study that fits recipes, one for each arm
    panels: tuple[Panel, ...] = ()
    tables: tuple[Table, ...] = ()
    warnings: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()  # of borrowed and untuned recipes: the report says them at the top
    method: tuple[str, ...] = ()  # how it was measured, one sentence each
    runs: tuple[str, ...] = field(default=())  # hashes of all its runs

    def to_dict(self) -> dict[str, Any]:
        """JSON values. NaN and infinities in verdicts and fits are "NaN", "Infinity" and "-Infinity"."""
        value = to_builtins(self)
        for name in ("verdicts", "fits"):
            value[name] = _encode_non_finite(value[name])
        return value

    @staticmethod
    def from_dict(value: Any) -> Answer:
        """Inverse of `to_dict`; raises UsageError naming a wrong field."""
        if isinstance(value, dict):
            given = {str(key): item for key, item in value.items()}
            typed = {k: _decode_non_finite(given[k]) for k in ("verdicts", "fits") if k in given}
            value = {**given, **typed}
        return from_builtins(Answer, value, "answer")


# A study yields a batch of specs and is sent their records, in the same order, until it returns its answer.
# A record is None if the run diverged and the study accepts that as a result.
Study: TypeAlias = Generator[Sequence[RunSpec], Sequence[RunRecord | None], Answer]


def _encode_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _encode_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encode_non_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _decode_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decode_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode_non_finite(item) for item in value]
    return NON_FINITE.get(value, value) if isinstance(value, str) else value
