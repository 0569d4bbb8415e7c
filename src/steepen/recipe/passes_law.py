"""The best number of passes at a fixed size: expansion against tokens per parameter (Appendix "TPP…").

The expansion X_K (E_K in the paper) is the compute-active parameters at K passes over those at one. At the
best K the paper fits X_K* = c·TPP^p, with TPP the tokens per stored parameter that the same compute buys at
one pass. K* and the tokens per parameter at K* follow, because X_K and the stored parameters are straight
lines in K.
"""

from __future__ import annotations

from dataclasses import dataclass

from steepen.errors import UsageError
from steepen.model.arms import family_arm
from steepen.model.shape import SizeRule
from steepen.recipe.flops import compute_active_parameters, stored_parameters


@dataclass(frozen=True)
class PassesLaw:
    """X_K* = coefficient · TPP^exponent, for tied or untied cores."""

    tied: bool
    coefficient: float
    exponent: float

    def expansion(self, tpp: float) -> float:
        """X_K* at these tokens per parameter of one pass; at least 1, which is one pass."""
        return max(1.0, self.coefficient * tpp**self.exponent)

    def at(self, depth: int, tpp: float, size_rule: SizeRule | None = None) -> BestPasses:
        """K*, X_K* and TPP at K* for a depth; `tpp` is of one pass at the same compute."""
        if not 0 < tpp <= 1e9:
            raise UsageError(f"tokens per parameter are {tpp:g}; they must be positive and at most 1e9.")
        arm = family_arm("loop" if self.tied else "untied", 2)
        shape = arm.shape(depth, size_rule)
        active = [compute_active_parameters(arm, shape, k) for k in (1, 2)]
        stored = [stored_parameters(arm, shape, k) for k in (1, 2)]
        expansion = self.expansion(tpp)
        passes = 1 + (expansion - 1) / (active[1] / active[0] - 1)
        size = 1 + (passes - 1) * (stored[1] / stored[0] - 1)
        return BestPasses(
            self.tied, depth, tpp, passes, expansion, tpp / (expansion * size), stored[0] * tpp / expansion
        )


@dataclass(frozen=True)
class BestPasses:
    """The best number of passes of a depth at the compute that `tpp` buys with one pass."""

    tied: bool
    depth: int
    tpp: float
    passes: float  # K*, a mean: whole numbers on both sides are within its error
    expansion: float  # X_K*
    tpp_at_best: float  # tokens per stored parameter at K*
    tokens: float  # at K*, at the same compute


# Equation "recurrence-expansion-fit".
TIED_PASSES = PassesLaw(True, 0.82, 0.15)
UNTIED_PASSES = PassesLaw(False, 0.83, 0.15)
