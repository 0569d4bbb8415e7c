"""`power`: how often a planned ladder answers right, and the cheapest ladder with a target power."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from steepen.errors import UsageError
from steepen.requests.request import Option, Request, function
from steepen.results.power import PowerResult
from steepen.utils.codec import Range
from steepen.utils.console import spinner
from steepen.utils.values import Confidence, Flops, Level, Noise

# Panels of --help.
LADDER = "Planned ladder"
LAWS = "Assumed laws"
TESTS = "Tests and search"

HIGHEST = 1.01e20  # of the paper's ladders


@dataclass(frozen=True)
class Power(Request[PowerResult]):
    """Estimate the power of a planned ladder, and find the cheapest one.

    The plan is simulated, and what `steepen fit` would answer is counted. Two targets of the search:
    growth, the gain grows with compute; exponent, it is also shown to grow by a larger exponent and not by a
    lower E, which takes far more compute. Defaults are the ladder and the Vanilla law of the paper.
    """

    examples = (
        "steepen power --delta-gamma 0.0027 --noise 1e-3",
        "steepen power --delta-gamma 0.01 --rungs 6 --span 3 --seeds 2 --no-search",
    )
    figure = tables = True

    delta_gamma: Annotated[float, Range(-1, 1), Option("Expected difference in exponent, e.g. 0.0027.")]
    _: KW_ONLY
    rungs: Annotated[int, Range(3, 1_000), Option("Rungs of each ladder.", LADDER)] = 8
    lowest: Annotated[Flops, Option("FLOPs of the lowest rung.", LADDER)] = 3.25e17
    highest: Annotated[
        Flops | None, Option("FLOPs of the highest rung. Default: 1.01e20, or by `span`.", LADDER)
    ] = None
    span: Annotated[
        float | None,
        Range(0.01, 40),
        Option("Decades from lowest to highest, instead of `highest`.", LADDER),
    ] = None
    noise: Annotated[Noise, Option("Standard deviation of a run's loss.", LADDER)] = 1e-3
    lack_of_fit: Annotated[
        float,
        Range(0, 100),
        Option("Standard deviation of a rung about its law, whatever its seeds.", LADDER),
    ] = 0.0
    seeds: Annotated[int, Range(1, 1_000), Option("Seeds (runs) per rung.", LADDER)] = 1
    gamma: Annotated[float, Range(0.001, 10), Option("The reference's exponent γ.", LAWS)] = 0.1113
    irreducible_loss: Annotated[
        float, Range(0, 1_000), Option("The irreducible loss E, the same for both arms.", LAWS)
    ] = 1.83
    constant: Annotated[float, Range(1e-6, 1e6), Option("A of the reference, for C0 = 1e18 FLOPs.", LAWS)] = (
        1.5
    )
    multiplier: Annotated[
        float, Range(1e-3, 1e3), Option("The arm's compute multiplier at the lowest rung.", LAWS)
    ] = 1.1
    level: Annotated[Level, Option("Family-wise significance level of each question.", TESTS)] = 0.05
    margin: Annotated[
        float, Range(0, 10), Option("Largest |Δγ|/γ that still counts as a constant gain.", TESTS)
    ] = 0.025
    comparisons: Annotated[
        int,
        Range(1, 10_000),
        Option("Arms that are compared with the reference and share the level (Holm).", TESTS),
    ] = 1
    goal: Annotated[Confidence, Option("Target power of the cheapest ladder.", TESTS)] = 0.90
    search: Annotated[bool, Option("Search for the cheapest ladder.", TESTS)] = True
    draws: Annotated[int, Range(1, 1_000_000), Option("Simulated pairs of ladders.", TESTS)] = 1000

    def check(self) -> None:
        """Reject two ways to say where the ladder ends."""
        if self.span is not None and self.highest is not None:
            raise UsageError("give `highest` or `span`, not both.")

    def run(self) -> PowerResult:
        """Simulate the plan, then search."""
        from steepen.laws.power import TARGETS, LadderPlan, cheapest_ladder, simulate_power

        top = self.highest or (HIGHEST if self.span is None else self.lowest * 10**self.span)
        plan = LadderPlan(
            delta_gamma=self.delta_gamma, rungs=self.rungs, lowest=self.lowest, highest=top, noise=self.noise,
            lack_of_fit=self.lack_of_fit,
                        seeds=self.seeds, gamma=self.gamma, irreducible_loss=self.irreducible_loss,
            constant=self.constant, multiplier=self.multiplier, level=self.level, margin=self.margin,
            arms=self.comparisons,
        )  # fmt: skip
        with spinner("simulating ladders"):
            power = simulate_power(plan, self.draws)
            targets = TARGETS if self.search and self.delta_gamma != 0 else ()
            found = [cheapest_ladder(plan, target, self.goal, draws=self.draws) for target in targets]
        return PowerResult(power, tuple(found))


power = function(Power)
