"""The size and budget of one run: what `plan`, `spec` and `train` share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from steepen.utils.codec import Option, Range
from steepen.utils.values import Depth, Flops, Fraction

if TYPE_CHECKING:
    from steepen.model.arm import Arm
    from steepen.model.shape import SizeRule
    from steepen.recipe.recipe import Recipe
    from steepen.recipe.recipe_choice import RecipeChoice

# Panels of --help.
RUN = "Run"
SIZE = "Size and budget"

ArmField: TypeAlias = Annotated[
    Any,
    Option(
        "Arm: listed by `steepen arms`, loop-K, untied-K, or module:attribute.",
        RUN,
        python="Also an Arm, or the class of a block.",
    ),
]
DepthField: TypeAlias = Annotated[Depth | None, Option("Nominal depth ℓ; the width is aspect·ℓ.", RUN)]
DataField: TypeAlias = Annotated[
    Any,
    Option("Data directory made by `steepen data prepare`.", RUN, metavar="<path>", python="Also a Dataset."),
]
Width: TypeAlias = Annotated[int, Range(1, 10**8)]


@dataclass(frozen=True, kw_only=True)
class RunSize:
    """The fields of a verb that sizes one run by a recipe."""

    recipe: Annotated[
        tuple[str | Path, ...],
        Option(
            "Recipe: paper (the default), paper-fixed-rho, paper-affine-rho, paper-constant-lr, or a recipe "
            "file. Repeatable.",
            RUN,
        ),
    ] = ()
    tokens: Annotated[
        float | None, Range(1, 10**15), Option("Tokens to train on. Default: the recipe's.", SIZE)
    ] = None
    flops: Annotated[Flops | None, Option("Compute budget, instead of `tokens`.", SIZE)] = None
    rho: Annotated[
        Fraction | None, Option("Fraction of tokens after growth. Default: the recipe's.", SIZE)
    ] = None
    tpp: Annotated[
        float | None,
        Range(1e-6, 1e9),
        Option("Tokens per initial stored parameter. Default: the recipe's.", SIZE),
    ] = None
    context: Annotated[Width, Option("Context length in tokens.", SIZE)] = 2048
    batch_tokens: Annotated[
        int | None, Range(1, 10**15), Option("Tokens per step. Default: 524,288.", SIZE)
    ] = None
    aspect: Annotated[Width, Option("Width per unit of depth.", SIZE)] = 128
    head_dim: Annotated[int, Range(2, 10**8), Option("Width of an attention head.", SIZE)] = 128
    mlp_multiple: Annotated[Width, Option("Round the MLP width up to a multiple of this.", SIZE)] = 256
    base_depth: Annotated[
        Width | None, Option("Depth at which the base learning rate applies. Default: 8.", SIZE)
    ] = None

    def size_rule(self, **vocabulary: int) -> SizeRule:
        """Nominal depth → width, heads and MLP width; `vocabulary` has further fields of the rule."""
        from steepen.model.shape import SizeRule

        return SizeRule(self.aspect, self.head_dim, self.mlp_multiple, self.context, **vocabulary)

    def recipe_choice(self) -> RecipeChoice:
        """The recipes that were named, and tokens per parameter."""
        from steepen.recipe.recipe_choice import choose_recipes

        return choose_recipes([str(one) for one in self.recipe], self.tpp)

    def recipe_changes(self) -> dict[str, int]:
        """Fields of the recipe that were given."""
        given = {"batch_tokens": self.batch_tokens, "base_depth": self.base_depth}
        return {name: value for name, value in given.items() if value is not None}

    def recipe_of(self, arm: Arm) -> Recipe:
        """The recipe of an arm; raises UsageError if the recipe files are for other arms."""
        choice = self.recipe_choice()
        choice.require_file_for(arm)
        return replace(choice.of(arm), **self.recipe_changes())
