"""The studies by name: what each asks, which options it takes, and the function that is it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from steepen.errors import UsageError, nearest
from steepen.studies.answer import Study
from steepen.studies.context import StudyContext
from steepen.studies.data_constrained import study as constrained
from steepen.studies.design import passes
from steepen.studies.design.allocation import allocation
from steepen.studies.design.growth_target import growth_target
from steepen.studies.design.growth_timing import growth_timing
from steepen.studies.ladders import ablations
from steepen.studies.ladders.extrapolate import extrapolate
from steepen.studies.ladders.ladder import ladder
from steepen.studies.stages import lr_rule, transfer
from steepen.studies.stages.chain_tuning import chain_tuning
from steepen.studies.stages.fit_recipe import fit_recipe
from steepen.studies.stages.growth_fraction import growth_fraction
from steepen.studies.stages.tpp import tpp
from steepen.studies.study_names import ASKS


@dataclass(frozen=True)
class StudyEntry:
    """A study as a command line knows it."""

    name: str
    function: Callable[..., Study]
    adaptive: bool = False  # what it asks for later depends on what came out
    gaps: bool = True  # a run that diverges is a result of the sweep, not a failure of the study
    parts: tuple[str, ...] = ()

    @property
    def asks(self) -> str:
        """Its question in a line."""
        return ASKS[self.name]

    @property
    def options(self) -> list[str]:
        """The options it takes besides the context."""
        return [name for name in inspect.signature(self.function).parameters if name != "context"]

    def start(self, context: StudyContext, given: dict[str, Any]) -> Study:
        """The generator, with the options that were given; one it does not take is refused."""
        for name in given:
            if name not in self.options:
                takes = ", ".join(map(_flag, self.options))
                raise UsageError(
                    f"{self.name} does not take {_flag(name)}; of these options it takes {takes}."
                )
        return self.function(context, **given)


STUDIES = {
    study.name: study
    for study in (
        StudyEntry("ladder", ladder, gaps=False),
        StudyEntry("fit-recipe", fit_recipe, adaptive=True),
        StudyEntry("chain-tuning", chain_tuning, adaptive=True),
        StudyEntry("tpp", tpp),
        StudyEntry("growth-fraction", growth_fraction),
        StudyEntry("lr-rule", lr_rule.lr_rule, adaptive=True, parts=lr_rule.PARTS),
        StudyEntry("allocation", allocation),
        StudyEntry("passes", passes.passes, parts=passes.PARTS),
        StudyEntry("growth-target", growth_target),
        StudyEntry("growth-timing", growth_timing),
        StudyEntry("transfer", transfer.transfer, gaps=False, parts=transfer.PARTS),
        StudyEntry("ablations", ablations.ablations, gaps=False, parts=ablations.PARTS),
        StudyEntry("extrapolate", extrapolate, adaptive=True, gaps=False),
        StudyEntry("data-constrained", constrained.data_constrained, parts=constrained.PARTS),
    )
}


def _flag(option: str) -> str:
    """An option as it is written on a command line."""
    return "--" + {"parts": "part", "source": "from"}.get(option, option).replace("_", "-")


def find_study(name: str) -> StudyEntry:
    """A study by name."""
    key = name.strip().lower().replace("_", "-")
    if key not in STUDIES:
        raise UsageError(
            f"there is no study {name!r}; the nearest are {nearest(key, STUDIES)} "
            "(`steepen study --help` lists all)."
        )
    return STUDIES[key]
