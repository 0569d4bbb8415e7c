"""`arms` and `best-passes`: the arms with their sizes, and the best number of core passes at a size."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from steepen.requests.request import Request, function
from steepen.results.arms import ArmsResult, BestPassesResult
from steepen.utils.codec import option
from steepen.utils.values import Depth, Numbers


@dataclass(frozen=True)
class Arms(Request[ArmsResult]):
    """List the arms, with their size at a depth.

    Any number of passes K is an arm too: loop-3, untied-4, tied-vanilla-6, untied-vanilla-3. The paper's
    names of ablations are accepted wherever an arm is named. A custom arm is named module:attribute. Every
    arm takes options of its block (vanilla+kv_heads=4) and stages of growth, with the fractions of tokens
    at which they begin: untied-2+passes=2-4-6@0.5-0.8, vanilla+blocks=1-all@0.3, vanilla+width=0.5-1@0.4,
    vanilla+context=0.25-1@0.5, vanilla+experts=1-8@0.5. The figure shows the blocks that the eight main arms
    execute.
    """

    examples = ("steepen arms --depth 12",)
    figure = tables = True

    depth: Depth = option("Nominal depth ℓ; the width is 128·ℓ.", 8)

    def run(self) -> ArmsResult:
        """The table of arms."""
        from steepen.model.arms import ARMS

        return ArmsResult(self.depth, tuple(ARMS.values()))


@dataclass(frozen=True)
class BestPasses(Request[BestPassesResult]):
    """The best number of core passes K* at a fixed size, with its expansion and tokens per parameter.

    At a fixed size more passes mean fewer tokens; the law X_K* = c·TPP^p of the expansion says how far to go.
    It does not say whether a larger model would be better.
    """

    examples = ("steepen best-passes --depth 10 --tpp 6,20",)
    tables = True

    depth: Depth = option("Nominal depth of the size, at least 3.", 8)
    tpp: Numbers = option(
        "Tokens per stored parameter that the compute buys at one pass; with commas.", (6.0, 12.0, 24.0, 48.0)
    )
    _: KW_ONLY
    family: Literal["tied", "untied", "both"] = option("tied, untied or both.", "both")
    study: str | None = option("A finished `passes` study whose laws to use instead of the paper's.")
    studies: Path = option("Directory of all studies.", Path("studies"))

    def run(self) -> BestPassesResult:
        """K* of each family at each number of tokens per parameter."""
        from steepen.recipe.passes_law import TIED_PASSES, UNTIED_PASSES
        from steepen.studies.design.passes import laws_of_study

        laws = (TIED_PASSES, UNTIED_PASSES) if self.study is None else laws_of_study(self.study, self.studies)
        wanted = [law for law in laws if self.family == "both" or law.tied == (self.family == "tied")]
        return BestPassesResult([law.at(self.depth, tpp) for law in wanted for tpp in self.tpp])


arms = function(Arms)
best_passes = function(BestPasses)
