"""The studies by name: what each asks, which options it takes, and the function that is it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from steepen.errors import UsageError, nearest
from steepen.studies import ablations, lr_rule, passes, transfer
from steepen.studies import data_constrained as constrained
from steepen.studies.allocation import allocation
from steepen.studies.answer import Study
from steepen.studies.bench import Bench
from steepen.studies.chain_tuning import chain_tuning
from steepen.studies.extrapolate import extrapolate
from steepen.studies.fit_recipe import fit_recipe
from steepen.studies.growth_fraction import growth_fraction
from steepen.studies.growth_target import growth_target
from steepen.studies.growth_timing import growth_timing
from steepen.studies.ladder import ladder
from steepen.studies.tpp import tpp


@dataclass(frozen=True)
class Listed:
    """A study as a command line knows it."""

    name: str
    asks: str  # one line
    function: Callable[..., Study]
    gaps: bool = True  # a run that diverges is a result of the sweep, not a failure of the study
    parts: tuple[str, ...] = ()

    @property
    def options(self) -> list[str]:
        """The options it takes besides the bench."""
        return [name for name in inspect.signature(self.function).parameters if name != "bench"]

    def start(self, bench: Bench, given: dict[str, Any]) -> Study:
        """The generator, with the options that were given; one it does not take is refused."""
        for name in given:
            if name not in self.options:
                takes = ", ".join(f"--{option.rstrip('s') if option == 'parts' else option}".replace("_", "-")
                                  for option in self.options) or "none of them"  # fmt: skip
                option = "part" if name == "parts" else name.replace("_", "-")
                raise UsageError(f"{self.name} does not take --{option}; of the options of studies it takes {takes}.")
        return self.function(bench, **given)


STUDIES = {
    study.name: study
    for study in (
        Listed("ladder", "Which arms scale better, and is it exponent or constant?", ladder, gaps=False),
        Listed("fit-recipe", "The four stages in order for an arm; writes a recipe file.", fit_recipe),
        Listed("chain-tuning", "Stage 1: the best hyperparameters at the base size.", chain_tuning),
        Listed("tpp", "Stage 2: the best tokens per parameter, and whether it drifts.", tpp),
        Listed("growth-fraction", "Stage 3: the share of tokens after growth.", growth_fraction),
        Listed("lr-rule", "Stage 4: how the learning rate must change with size.", lr_rule.lr_rule,
               parts=lr_rule.PARTS),
        Listed("allocation", "Which share of the blocks belongs in the core?", allocation),
        Listed("passes", "How many core passes, at fixed tokens and at fixed compute?", passes.passes,
               parts=passes.PARTS),
        Listed("growth-target", "To how many passes should a network grow?", growth_target),
        Listed("growth-timing", "When should it grow, and which law does that follow?", growth_timing),
        Listed("transfer", "What does another arm's recipe cost?", transfer.transfer, gaps=False,
               parts=transfer.PARTS),
        Listed("ablations", "Operator, allocation, shape, width-only, optimizer, random, recipe.",
               ablations.ablations, gaps=False, parts=ablations.PARTS),
        Listed("extrapolate", "Does the fitted law predict a held-out rung?", extrapolate, gaps=False),
        Listed("data-constrained", "Parameters or passes, when data are repeated?",
               constrained.data_constrained, parts=constrained.PARTS),
    )
}  # fmt: skip


def find_study(name: str) -> Listed:
    """A study by name."""
    key = name.strip().lower().replace("_", "-")
    if key not in STUDIES:
        raise UsageError(
            f"there is no study {name!r}; the nearest are {nearest(key, STUDIES)} "
            "(`steepen study --help` lists all)."
        )
    return STUDIES[key]
