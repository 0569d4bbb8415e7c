"""The paper's fitted relations between passes, growth and tokens per parameter (Appendix "TPP…")."""

from __future__ import annotations

from dataclasses import dataclass

from steepen.errors import UsageError
from steepen.model.arm import Arm
from steepen.model.shape import Shape
from steepen.recipe.accounting import compute_active_parameters, expansion, stored_expansion


@dataclass(frozen=True)
class GrowthLaw:
    """TPP at the best transition = a·TPP without growth + b (Equation "growth-affine")."""

    a: float
    b: float

    def expansion(self, tpp: float) -> float:
        """E_ρ*/E_2: the compute per token of the best transition over that without growth."""
        return tpp / (self.a * tpp + self.b)

    def rho(self, arm: Arm, shape: Shape, tpp: float) -> float:
        """ρ*: the share of tokens after growth, for this shape's own block allocation."""
        first, last = arm.passes.initial, arm.passes.final
        full = compute_active_parameters(arm, shape, last) / compute_active_parameters(arm, shape, first)
        rho = (self.expansion(tpp) - 1.0) / (full - 1.0)
        if not 0.0 < rho <= 1.0:
            raise UsageError(
                f"the growth law gives rho = {rho:.3g} at {tpp:g} tokens per parameter, which is no share of "
                f"training: at depth {shape.depth} choose more tokens per parameter, or give --rho yourself."
            )
        return rho


TIED_GROWTH = GrowthLaw(0.902, 0.216)
UNTIED_GROWTH = GrowthLaw(0.883, 0.103)


@dataclass(frozen=True)
class PowerLaw:
    """scale · x^exponent."""

    scale: float
    exponent: float

    def at(self, x: float) -> float:
        """The value at x."""
        return self.scale * x**self.exponent


# E_K* and TPP_K* against the tokens per stored parameter of K = 1 at the same compute
# (Equations "recurrence-expansion-fit" and "recurrence-tpp-fit").
OPTIMAL_EXPANSION = {"tied": PowerLaw(0.82, 0.15), "untied": PowerLaw(0.83, 0.15)}
OPTIMAL_TPP = {"tied": PowerLaw(1.19, 0.85), "untied": PowerLaw(1.34, 0.74)}


def tpp_at_passes(arm: Arm, shape: Shape, tpp_one_pass: float, passes: int) -> float:
    """TPP_K = TPP_K1/(E_K·S_K) at equal compute (Equation "recurrence-tpp-identity")."""
    return tpp_one_pass / (expansion(arm, shape, passes) * stored_expansion(arm, shape, passes))


def optimal_passes(arm: Arm, shape: Shape, tpp_one_pass: float) -> float:
    """The (fractional) K whose expansion is the fitted optimum at this many tokens per parameter."""
    wanted = OPTIMAL_EXPANSION["tied" if arm.tied else "untied"].at(tpp_one_pass)
    per_pass = expansion(arm, shape, 2) - 1.0
    return 1.0 + (wanted - 1.0) / per_pass
