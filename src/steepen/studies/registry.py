"""The studies by name, and custom ones by `module:function`. Imports no study until it is used."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from steepen.errors import UsageError, nearest
from steepen.utils.imports import import_object, object_name

if TYPE_CHECKING:
    from steepen.studies.answer import Study
    from steepen.studies.context import StudyContext

FLAGS = {"parts": "part", "source": "from"}  # options whose name on the command line differs


@dataclass(frozen=True)
class StudyEntry:
    """A row of the registry. `target` is the study's function as `module:function`."""

    name: str
    target: str
    question: str = ""
    adaptive: bool = False  # later runs depend on earlier results
    accept_diverged: bool = True  # a diverged run is a result of the sweep, not a failure of the study
    parts: tuple[str, ...] = ()

    @property
    def function(self) -> Callable[..., Study]:
        """The study: a generator function whose first argument is the `StudyContext`."""
        found = import_object(self.target, "study", own={entry.target for entry in STUDIES.values()})
        if not callable(found):
            raise UsageError(f"the study {self.target!r} is not a function.")
        return cast("Callable[..., Study]", found)

    @property
    def options(self) -> list[str]:
        """The options of the study: its function's arguments after the context."""
        return list(inspect.signature(self.function).parameters)[1:]

    def start(self, context: StudyContext, options: dict[str, Any]) -> Study:
        """The study's generator; an option it does not take is rejected."""
        for name in options:
            if name not in self.options:
                accepted = ", ".join(map(_flag, self.options)) or "none"
                raise UsageError(
                    f"{self.name} does not take {_flag(name)}; of these options it takes {accepted}."
                )
        return self.function(context, **options)

    def check(self, context: StudyContext, options: dict[str, Any]) -> None:
        """Reject wrong options and recipes of other arms: run the study up to its first batch of runs."""
        next(self.start(context, options))
        if STUDIES.get(self.name) is self:  # a custom study may ask for recipes later
            context.choice.require_asked()


_PACKAGE = "steepen.studies"
STUDIES: dict[str, StudyEntry] = {
    study.name: study
    for study in (
        StudyEntry(
            "ladder", f"{_PACKAGE}.ladders.ladder:ladder",
            "Which arms scale better, and is it exponent or constant?", accept_diverged=False,
        ),
        StudyEntry(
            "fit-recipe", f"{_PACKAGE}.stages.fit_recipe:fit_recipe",
            "Fit a compute-optimal recipe for one arm (stages 1 to 4), for `ladder --recipe`.", adaptive=True,
        ),
        StudyEntry(
            "chain-tuning", f"{_PACKAGE}.stages.chain_tuning:chain_tuning",
            "Stage 1: the best hyperparameters at the base size.", adaptive=True,
        ),
        StudyEntry(
            "tpp", f"{_PACKAGE}.stages.tpp:tpp",
            "Stage 2: the best tokens per parameter, and whether they drift with scale.",
        ),
        StudyEntry(
            "growth-fraction", f"{_PACKAGE}.stages.growth_fraction:growth_fraction",
            "Stage 3: the fraction of tokens after growth.",
        ),
        StudyEntry(
            "lr-rule", f"{_PACKAGE}.stages.lr_rule:lr_rule",
            "Stage 4: how the learning rate must change with size.", adaptive=True,
            parts=("drift", "screen"),
        ),
        StudyEntry(
            "allocation", f"{_PACKAGE}.design.allocation:allocation",
            "Which fraction of the blocks belongs in the core?",
        ),
        StudyEntry(
            "passes", f"{_PACKAGE}.design.passes:passes", "How many core passes?",
            parts=("tokens", "anchor", "hyperparameters"),
        ),
        StudyEntry(
            "growth-target", f"{_PACKAGE}.design.growth_target:growth_target",
            "To how many passes should a network grow?",
        ),
        StudyEntry(
            "growth-timing", f"{_PACKAGE}.design.growth_timing:growth_timing",
            "When should a network grow, and how does that scale?",
        ),
        StudyEntry(
            "transfer", f"{_PACKAGE}.stages.transfer:transfer", "What does another arm's recipe cost?",
            accept_diverged=False, parts=("probe", "ladder"),
        ),
        StudyEntry(
            "ablations", f"{_PACKAGE}.ladders.ablations:ablations",
            "Which design choices account for the gains?", adaptive=True,
            parts=("operator", "allocation", "shape", "width-only", "width-and-depth", "optimizer", "growth",
                   "random", "hyperparameters", "constant"),
        ),
        StudyEntry(
            "extrapolate", f"{_PACKAGE}.ladders.extrapolate:extrapolate",
            "Does the fitted law predict a held-out rung?", adaptive=True, accept_diverged=False,
        ),
        StudyEntry(
            "data-constrained", f"{_PACKAGE}.data_constrained:data_constrained",
            "On repeated data: more parameters or more passes?", parts=("grid", "regimes", "controls"),
        ),
    )
}  # fmt: skip


def find_study(study: str | Callable[..., Study]) -> StudyEntry:
    """A study by name, a custom one by `module:function`, or a function itself.

    A custom study is stopped by a run that diverges.
    """
    if callable(study) or ":" in study:
        target = object_name(study, "study")
        name = target.rpartition(":")[2].rpartition(".")[2].replace("_", "-")
        entry = StudyEntry(name, target, adaptive=True, accept_diverged=False)
        entry.function  # noqa: B018  (rejects a name that cannot be imported)
        return entry
    key = study.strip().lower().replace("_", "-")
    if key not in STUDIES:
        raise UsageError(
            f"there is no study {study!r}; the nearest are {nearest(key, STUDIES)} "
            "(`steepen study --help` lists all). A custom study is named module:function."
        )
    return STUDIES[key]


def choose_parts(study: str, parts: Sequence[str], default: Sequence[str] = ()) -> list[str]:
    """The parts of a study that are asked for, in its order; without any, its default ones, or all."""
    known = STUDIES[study].parts
    for part in parts:
        if part not in known:
            raise UsageError(
                f"`parts` names {part!r}, which {study} lacks; the nearest are {nearest(part, known)}."
            )
    return [part for part in known if part in (parts or default or known)]


def _flag(option: str) -> str:
    return "--" + FLAGS.get(option, option).replace("_", "-")
