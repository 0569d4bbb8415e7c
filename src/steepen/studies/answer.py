"""`Answer`, what a study returns: findings, typed verdicts and fits, tables, and panels for the report."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from steepen.laws.fits.compute_law import ArmLaw
from steepen.laws.fits.isoflop import IsoflopFit, PowerLawFit
from steepen.laws.verdict.evidence import Verdict
from steepen.recipe.recipe_choice import RecipeFile
from steepen.results.panel import Axis, Panel, Role, Series
from steepen.results.table import Table
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.studies.drift import AffineLaw, Drift
from steepen.studies.verdict_row import VerdictRow, verdict_row
from steepen.utils.codec import from_builtins, to_builtins
from steepen.utils.json_io import json_safe

__all__ = [
    "Answer",
    "Axis",
    "Draft",
    "Fit",
    "Panel",
    "Role",
    "Series",
    "Study",
    "StudyFit",
    "StudyVerdict",
    "Table",
    "Work",
]
T = TypeVar("T")

# JSON cannot represent these; they are strings inside verdicts and fits.
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
    def row(self) -> VerdictRow:
        """What tables and pages show of it."""
        return verdict_row(self.verdict, self.arm)


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
    runs: tuple[str, ...] = ()  # hashes of the runs of a ladder that a law is fitted to


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

    @property
    def primary_verdicts(self) -> list[StudyVerdict]:
        """The verdicts that answer the study's question, without those beside them (per second)."""
        return [judged for judged in self.verdicts if judged.primary]

    def recipe_files(self, folder: Path) -> dict[Path, RecipeFile]:
        """The fitted recipes by file: recipe.yaml, or recipe-ARM.yaml where there are several."""
        one = len(self.recipes) == 1
        return {folder / ("recipe.yaml" if one else f"recipe-{file.arm}.yaml"): file for file in self.recipes}

    def to_dict(self) -> dict[str, Any]:
        """JSON values. NaN and infinities in verdicts and fits are "NaN", "Infinity" and "-Infinity"."""
        value = to_builtins(self)
        # JSON has no word for what is not finite; `json.dumps` writes such numbers as in NON_FINITE.
        return value | {k: json.loads(json.dumps(value[k]), parse_constant=str) for k in ("verdicts", "fits")}

    @staticmethod
    def from_dict(value: Any) -> Answer:
        """Inverse of `to_dict`; raises UsageError naming a wrong field."""
        if isinstance(value, dict):
            given = {str(key): item for key, item in value.items()}
            value = given | {k: _decoded(given[k]) for k in ("verdicts", "fits") if k in given}
        return from_builtins(Answer, value, "answer")


# A part of a study yields a batch of specs and is sent their records, in the same order, until it returns.
# A record is None if the run diverged and the study accepts that as a result.
Work: TypeAlias = Generator[Sequence[RunSpec], Sequence[RunRecord | None], T]
Study: TypeAlias = Work[Answer]


@dataclass
class Draft:
    """An answer in the making: the parts of a study, its arms and its stages add to one."""

    findings: list[str] = field(default_factory=list[str])
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    verdicts: list[StudyVerdict] = field(default_factory=list[StudyVerdict])
    fits: list[StudyFit] = field(default_factory=list[StudyFit])
    recipes: list[RecipeFile] = field(default_factory=list[RecipeFile])
    panels: list[Panel] = field(default_factory=list[Panel])
    tables: list[Table] = field(default_factory=list[Table])
    warnings: list[str] = field(default_factory=list[str])
    cautions: list[str] = field(default_factory=list[str])
    method: list[str] = field(default_factory=list[str])
    runs: list[str] = field(default_factory=list[str])

    def add(self, other: Draft | Answer, part: str = "") -> None:
        """Append what another has found; verdicts and fits are marked with the part they belong to."""
        for one in fields(self):
            own, added = getattr(self, one.name), getattr(other, one.name)
            if isinstance(own, dict):
                own.update({part: added} if part else added)
            else:
                marked = part and one.name in ("verdicts", "fits")
                own.extend(replace(item, part=part) for item in added) if marked else own.extend(added)

    def answer(self, study: str, question: str, section: str) -> Answer:
        """The finished answer: every run once, without tables that have no rows."""
        lists = {one.name: tuple(getattr(self, one.name)) for one in fields(self) if one.name != "values"}
        lists["tables"] = tuple(table for table in self.tables if table.rows)
        lists |= {name: tuple(dict.fromkeys(lists[name])) for name in ("cautions", "runs")}
        return Answer(study, question, section, values=json_safe(self.values), **lists)


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decoded(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(_decoded, value))
    return NON_FINITE.get(value, value) if isinstance(value, str) else value
