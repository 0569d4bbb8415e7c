"""The paper's recipe tables, as data."""

from __future__ import annotations

from dataclasses import replace

from steepen.errors import UsageError, nearest
from steepen.model.arm import Arm
from steepen.recipe.hyperparameters import Hyperparameters
from steepen.recipe.recipe import GrowthLaw, Recipe

# Table "Base-tuned hyperparameters by architecture", with the digits of the authors' command lines: powers of
# √2 times the values that chain tuning starts from. The paper prints three decimals, and a dash for α where
# nothing is injected; the 1 here has no effect.
BASE: dict[str, Hyperparameters] = {
    "vanilla": Hyperparameters(
        learning_rate=0.04, embedding_lr_multiplier=0.452548339959, head_lr_multiplier=0.11313708499,
        residual_multiplier=0.25, output_multiplier=0.5, injection_weight=1.0, weight_decay=0.0707106781187,
        embedding_init_std=0.00707106781187, init_scale=0.0625, warmup_steps=40, warmdown_fraction=0.6,
        beta1=0.8, beta2=0.95, adam_eps=1e-10,
    ),
    "deep-vanilla": Hyperparameters(
        learning_rate=0.04, embedding_lr_multiplier=0.16, head_lr_multiplier=0.0565685424949,
        residual_multiplier=0.5, output_multiplier=1.0, injection_weight=1.0, weight_decay=0.1,
        embedding_init_std=0.005, init_scale=0.5, warmup_steps=5, warmdown_fraction=0.8,
        beta1=0.8, beta2=0.99, adam_eps=1e-8,
    ),
    "operator-1": Hyperparameters(
        learning_rate=0.04, embedding_lr_multiplier=0.905096679919, head_lr_multiplier=0.08,
        residual_multiplier=0.5, output_multiplier=1.0, injection_weight=1.0, weight_decay=0.05,
        embedding_init_std=0.11313708499, init_scale=0.353553390593, warmup_steps=0, warmdown_fraction=0.8,
        beta1=0.8, beta2=0.98, adam_eps=1e-10,
    ),
    "loop-2": Hyperparameters(
        learning_rate=0.04, embedding_lr_multiplier=0.32, head_lr_multiplier=0.11313708499,
        residual_multiplier=0.25, output_multiplier=1.0, injection_weight=0.707106781187, weight_decay=0.05,
        embedding_init_std=0.02, init_scale=0.0441941738242, warmup_steps=40, warmdown_fraction=1.0,
        beta1=0.8, beta2=0.95, adam_eps=1e-10,
    ),
    "untied-2": Hyperparameters(
        learning_rate=0.04, embedding_lr_multiplier=0.16, head_lr_multiplier=0.16,
        residual_multiplier=0.25, output_multiplier=1.0, injection_weight=1.0, weight_decay=0.0707106781187,
        embedding_init_std=0.01, init_scale=0.353553390593, warmup_steps=40, warmdown_fraction=1.0,
        beta1=0.8, beta2=0.99, adam_eps=1e-8,
    ),
}  # fmt: skip

# How the authors store what these recipes train, as `--set` takes it. Weight decay moves a bf16 weight by less
# than half of its last digit, so rows of the embedding that get no large update keep their size.
AUTHORS_STORAGE = ("optimizer.embedding_precision=bf16", "model.rope_table=bf16")

# Where chain tuning starts (Table "Tuning Grid for Chain Tuning", column "Initial HP").
INITIAL = Hyperparameters(0.04, 0.02, 0.02, 0.5, 1.0, 1.0, 0.1, 0.08, 0.25, 40, 0.4, 0.8, 0.95, 1e-10)

# TPP of the interior optima in the authors' sweeps, to which the paper fits its two laws.
TIED_GROWTH = GrowthLaw(0.902, 0.216, measured_tpp=(3.35, 21.6))
UNTIED_GROWTH = GrowthLaw(0.883, 0.103, measured_tpp=(4.37, 22.6))

# ρ at each depth of the reported growth ladders, from the authors' command lines (the paper prints its law).
UNTIED_GROW_RHO = (
    (6, 0.40), (8, 0.29), (10, 0.25), (12, 0.27), (14, 0.24), (16, 0.23), (18, 0.25), (26, 0.23),
)  # fmt: skip
LOOP_GROW_RHO = ((6, 0.25), (8, 0.18), (10, 0.14), (12, 0.15), (14, 0.14), (16, 0.12), (18, 0.13))

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
        BASE["untied-2"], learning_rate_exponent=-0.6, tpp=8, measured=(6, 26),
        listed_rho=UNTIED_GROW_RHO, growth_law=UNTIED_GROWTH,
    ),
    "loop-grow": Recipe(
        BASE["loop-2"], learning_rate_exponent=-0.5, tpp=7, measured=(6, 18),
        listed_rho=LOOP_GROW_RHO, growth_law=TIED_GROWTH,
    ),
}  # fmt: skip

# Tokens per parameter of ablation ladders that differ from their parent's, from the authors' measurements.
ABLATION_TPP = {
    "loop-2-no-coda-injection": 7.0,
    "loop-2-nci-2-c-3": 7.0,
    "untied-2-norm-only": 7.0,
    "deeper-vanilla": 8.0,
    "width-only-deep-vanilla": 7.0,
    "width-only-untied-2": 7.0,
}


# Depths of the reported ladders; the authors publish the command lines of all but deep-vanilla-grow.
LADDER_DEPTHS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(PAPER, (6, 8, 10, 12, 14, 16, 18)),
    "vanilla": (6, 8, 10, 12, 14, 16, 18, 20),
    "operator-1": (6, 8, 10, 12, 14, 16, 18, 20),
    "untied-grow": (6, 8, 10, 12, 14, 16, 18, 26),
}


# The constant-rate ladder of Loop-Grow has other tokens than its reported one: t_ref and ρ that give the
# authors' measured tokens and FLOPs.
CONSTANT_RATE_TPP = {"loop-grow": 9.0}
CONSTANT_RATE_RHO = {
    "loop-grow": ((6, 0.28), (8, 0.20), (10, 0.16), (12, 0.17), (14, 0.15), (16, 0.14), (18, 0.15)),
}


def with_constant_rate(arm: Arm, recipe: Recipe) -> Recipe:
    """The recipe with one learning rate for all sizes (Figure "Constant recipes").

    Where the tokens are still those of the paper's ladder, they become those of its constant-rate ladder.
    """
    recipe = replace(recipe, learning_rate_exponent=0.0)
    if arm.name in CONSTANT_RATE_TPP and recipe.listed_rho == PAPER[arm.recipe].listed_rho:
        return replace(
            recipe, tpp=CONSTANT_RATE_TPP[arm.name], listed_rho=CONSTANT_RATE_RHO[arm.name], measured=None
        )
    return recipe


def recipe_of(arm: Arm) -> Recipe:
    """The paper's recipe for an arm; an ablation follows its parent's, at its own tokens per parameter."""
    if arm.recipe not in PAPER:
        raise UsageError(
            f"arm {arm.name!r} follows the recipe of {arm.recipe!r}, which the paper does not give; "
            f"the nearest are {nearest(arm.recipe, PAPER)}."
        )
    recipe = PAPER[arm.recipe]
    return recipe.with_tpp(ABLATION_TPP.get(arm.name, recipe.tpp))
