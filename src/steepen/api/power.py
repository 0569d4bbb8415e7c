"""`steepen.power`: how often a planned ladder answers right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steepen.api.result import Result, new_axes
from steepen.utils.formatting import percent

if TYPE_CHECKING:
    from steepen.laws.power import CheapestLadder, LadderPlan, Power


def power(
    delta_gamma: float,
    *,
    rungs: int = 8,
    lowest: float = 3.25e17,
    highest: float = 1.01e20,
    noise: float = 1e-3,
    seeds: int = 1,
    goal: float = 0.90,
    search: bool = True,
    draws: int = 1000,
    arms: int = 1,
    **laws: float,
) -> PowerResult:
    """Simulate how often a planned ladder claims the right answers, and find the cheapest one that does.

    `delta_gamma` is the expected difference of exponents, `lowest` and `highest` are FLOPs of the end rungs,
    `noise` the standard deviation of a run's loss, `arms` the arms of the table, which share the level.
    Further laws are fields of `LadderPlan`: `gamma`, `irreducible_loss`, `constant`, `multiplier`, `level`,
    `margin`. `search=False` leaves the search out.
    """
    from steepen.laws.power import TARGETS, LadderPlan, cheapest_ladder, simulate_power

    plan = LadderPlan(
        delta_gamma=delta_gamma, rungs=rungs, lowest=lowest, highest=highest, noise=noise, seeds=seeds,
        arms=arms, **laws,
    )  # fmt: skip
    found = simulate_power(plan, draws)
    cheapest: list[CheapestLadder] = []
    if search and delta_gamma != 0:
        cheapest = [cheapest_ladder(plan, target, goal, draws=draws) for target in TARGETS]
    return PowerResult(found, tuple(cheapest))


@dataclass(frozen=True, eq=False, repr=False)
class PowerResult(Result):
    """Power of a planned ladder, and the cheapest ladder with a target power for each target."""

    power: Power
    cheapest: tuple[CheapestLadder, ...] = ()

    def headline(self) -> str:
        """The power of the two questions in one line."""
        plan = self.power.plan
        return (
            f"power at Δγ = {plan.delta_gamma:g}, {plan.rungs} rungs: growth {self.power.growth:.0%}, "
            f"exponent {self.power.verdict:.0%}"
        )

    def summary(self) -> str:
        """The power of the plan, and the cheapest ladders."""
        lines = [f"{self.headline()}; {self.power.plan.cost:.3g} FLOPs"]
        for one in self.cheapest:
            if one.plan is None:
                lines.append(f"no ladder in reach has {percent(one.goal)} power for {one.target}")
            else:
                lines.append(
                    f"{percent(one.goal)} power for {one.target}: {one.plan.rungs} rungs, "
                    f"{one.plan.seeds} seeds, to {one.plan.highest:.3g} FLOPs, "
                    f"{one.plan.cost:.3g} FLOPs in all"
                )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything as nested dicts and numbers, as `steepen power --json` prints it."""
        return {**self.power.to_dict(), "cheapest": {one.target: one.to_dict() for one in self.cheapest}}

    def to_rows(self) -> list[dict[str, Any]]:
        """The plan and the cheapest ladders, one row each."""
        return [
            _power_row("plan", self.power.plan, self.power),
            *(_power_row(f"cheapest for {one.target}", one.plan, one.power) for one in self.cheapest
              if one.plan is not None),
        ]  # fmt: skip

    def plot(self, ax: Any = None) -> Any:
        """Draw how often the plan gives each answer; returns the Axes."""
        ax = new_axes(ax)
        words = {word: share for word, share in self.power.verdict_fractions.items() if share > 0}
        ax.barh(list(words), list(words.values()))
        ax.set(xlim=(0, 1), xlabel="fraction of simulated ladders")
        return ax


def _power_row(name: str, plan: LadderPlan, power: Power | None) -> dict[str, Any]:
    return {
        "ladder": name,
        "rungs": plan.rungs,
        "seeds": plan.seeds,
        "lowest": plan.lowest,
        "highest": plan.highest,
        "cost_flops": plan.cost,
        "power_growth": power.growth if power else None,
        "power_exponent": power.verdict if power else None,
    }
