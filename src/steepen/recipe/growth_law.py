"""The paper's fitted rule for when to grow: TPP with growth against TPP without (Appendix "TPP…")."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from steepen.errors import UsageError, require
from steepen.model.arm import Arm
from steepen.model.shape import Shape
from steepen.recipe.flops import relative_costs
from steepen.utils.codec import Checked, Range

Tokens: TypeAlias = Annotated[float, Range(0, 1e9, above=True)]  # per parameter


@dataclass(frozen=True)
class GrowthLaw(Checked):
    """TPP at the best transition = a·TPP without growth + b (Equation "growth-affine")."""

    a: Annotated[float, Range(-1e9, 1e9)]
    b: Annotated[float, Range(-1e9, 1e9)]
    measured_tpp: tuple[Tokens, Tokens] | None = None  # TPP without growth of the optima it was fitted to

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.a != 0, "GrowthLaw", "a", self.a, "other than 0")
        low, high = self.measured_tpp or (1.0, 1.0)
        require(low <= high, "GrowthLaw", "measured_tpp", self.measured_tpp, "two rising numbers, or null")

    def expansion(self, tpp: float) -> float:
        """X_ρ*/X_2 (paper: E): the compute per token of the best transition over that without growth."""
        after = self.a * tpp + self.b
        return tpp / after if after else math.inf

    def tpp_without_growth(self, tpp: float) -> float:
        """TPP without growth at the compute that `tpp` tokens per parameter cost with the best growth."""
        return (tpp - self.b) / self.a

    def rho(self, arm: Arm, shape: Shape, tpp: float) -> float:
        """ρ*: the fraction of tokens after growth, for this shape's block allocation.

        `tpp` is without growth. Where the law gives no positive ρ (the paper's below a TPP of 2.2 tied, 0.9
        untied), its value at the lowest measured TPP is returned.
        """
        if self.measured_tpp is not None and not (tpp > 0 and self.expansion(tpp) > 1):
            tpp = self.measured_tpp[0]
        first, grown = relative_costs(arm, shape, arm.passes)
        if first == grown:
            raise UsageError(f"no law says when {arm.name} grows, whose matrices do not: give `rho`.")
        rho = (self.expansion(tpp) - first) / (grown - first)
        if not 0.0 < rho <= 1.0:
            raise UsageError(
                f"the growth law gives rho = {rho:.3g} at {tpp:g} tokens per parameter, which is not a "
                f"fraction: at depth {shape.depth} choose more tokens per parameter, or give `rho`."
            )
        return rho


# TPP of the interior optima in the authors' sweeps, to which the paper fits its two laws.
TIED_GROWTH = GrowthLaw(0.902, 0.216, measured_tpp=(3.35, 21.6))
UNTIED_GROWTH = GrowthLaw(0.883, 0.103, measured_tpp=(4.37, 22.6))
