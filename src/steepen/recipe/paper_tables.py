"""The paper's recipe tables, as data."""

from __future__ import annotations

from steepen.errors import UsageError, nearest
from steepen.model.arm import Arm
from steepen.recipe.growth_law import TIED_GROWTH, UNTIED_GROWTH
from steepen.recipe.hyperparameters import Hyperparameters
from steepen.recipe.recipe import Recipe

# Table "Base-tuned hyperparameters by architecture". The paper prints a dash for α where nothing is injected;
# the 1 here has no effect.
BASE: dict[str, Hyperparameters] = {
    #                                GLR  ELRM   HLRM   RM    OM   α      WD     WTE    UIS    WU  WDR  β1   β2    ε
    "vanilla": Hyperparameters(0.04, 0.453, 0.113, 0.25, 0.5, 1.0, 0.071, 0.007, 0.063, 40, 0.6, 0.8, 0.95, 1e-10),
    "deep-vanilla": Hyperparameters(0.04, 0.16, 0.057, 0.5, 1.0, 1.0, 0.1, 0.005, 0.5, 5, 0.8, 0.8, 0.99, 1e-8),
    "operator-1": Hyperparameters(0.04, 0.905, 0.08, 0.5, 1.0, 1.0, 0.05, 0.113, 0.354, 0, 0.8, 0.8, 0.98, 1e-10),
    "loop-2": Hyperparameters(0.04, 0.32, 0.113, 0.25, 1.0, 0.707, 0.05, 0.02, 0.044, 40, 1.0, 0.8, 0.95, 1e-10),
    "untied-2": Hyperparameters(0.04, 0.16, 0.16, 0.25, 1.0, 1.0, 0.071, 0.01, 0.354, 40, 1.0, 0.8, 0.99, 1e-8),
}  # fmt: skip

# Where chain tuning starts (Table "Tuning Grid for Chain Tuning", column "Initial HP").
INITIAL = Hyperparameters(0.04, 0.02, 0.02, 0.5, 1.0, 1.0, 0.1, 0.08, 0.25, 40, 0.4, 0.8, 0.95, 1e-10)

# Table "Recipes used for the reported ladders". The growth arms inherit their fixed arm's base values.
PAPER: dict[str, Recipe] = {
    "vanilla": Recipe(BASE["vanilla"], learning_rate_exponent=-0.8, tpp=5, measured=(6, 20)),
    "deep-vanilla": Recipe(BASE["deep-vanilla"], learning_rate_exponent=-0.7, tpp=6, measured=(6, 18)),
    "operator-1": Recipe(BASE["operator-1"], learning_rate_exponent=-0.6, tpp=6, measured=(6, 20)),
    "loop-2": Recipe(BASE["loop-2"], learning_rate_exponent=-0.6, tpp=6, measured=(6, 18)),
    "untied-2": Recipe(BASE["untied-2"], learning_rate_exponent=-0.6, tpp=6, measured=(6, 18)),
    "deep-vanilla-grow": Recipe(
        BASE["deep-vanilla"], learning_rate_exponent=-0.8, tpp=6, measured=(6, 18), rho=0.5, learning_rate_base=0.036
    ),
    "untied-grow": Recipe(
        BASE["untied-2"], learning_rate_exponent=-0.6, tpp=8, measured=(6, 18), growth_law=UNTIED_GROWTH
    ),
    "loop-grow": Recipe(
        BASE["loop-2"], learning_rate_exponent=-0.5, tpp=7, measured=(6, 18), growth_law=TIED_GROWTH
    ),
}  # fmt: skip


def recipe_of(arm: Arm) -> Recipe:
    """The paper's recipe for an arm (an ablation follows its parent's)."""
    if arm.recipe not in PAPER:
        raise UsageError(
            f"arm {arm.name!r} follows the recipe of {arm.recipe!r}, which the paper does not give; "
            f"the nearest are {nearest(arm.recipe, PAPER)}."
        )
    return PAPER[arm.recipe]
