"""The paper's fitted rule for when to grow: TPP with growth against TPP without (Appendix "TPP…")."""

from __future__ import annotations

from dataclasses import dataclass

from steepen.errors import UsageError
from steepen.model.arm import Arm
from steepen.model.shape import Shape
from steepen.recipe.flops import compute_active_parameters


@dataclass(frozen=True)
class GrowthLaw:
    """TPP at the best transition = a·TPP without growth + b (Equation "growth-affine")."""

    a: float
    b: float
    measured_tpp: tuple[float, float] | None = None  # TPP without growth of the optima it was fitted to

    def expansion(self, tpp: float) -> float:
        """X_ρ*/X_2 (paper: E): the compute per token of the best transition over that without growth."""
        return tpp / (self.a * tpp + self.b)

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
        first, last = arm.passes.initial, arm.passes.final
        full = compute_active_parameters(arm, shape, last) / compute_active_parameters(arm, shape, first)
        rho = (self.expansion(tpp) - 1.0) / (full - 1.0)
        if not 0.0 < rho <= 1.0:
            raise UsageError(
                f"the growth law gives rho = {rho:.3g} at {tpp:g} tokens per parameter, which is not a "
                f"fraction: at depth {shape.depth} choose more tokens per parameter, or give --rho."
            )
        return rho


# TPP of the interior optima in the authors' sweeps, to which the paper fits its two laws.
TIED_GROWTH = GrowthLaw(0.902, 0.216, measured_tpp=(3.35, 21.6))
UNTIED_GROWTH = GrowthLaw(0.883, 0.103, measured_tpp=(4.37, 22.6))
