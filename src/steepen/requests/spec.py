"""`spec`: everything that decides the result of one run. `train` has the same fields.

`plan` shares the size and budget (`RunSize`).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from steepen.errors import UsageError
from steepen.requests.request import Request, function
from steepen.training.train_options import EXECUTION, Steps
from steepen.utils.codec import HelpPanel, Option, Range
from steepen.utils.values import Depth, Flops, Fraction, Seed, Tokens

if TYPE_CHECKING:
    from steepen.model.arm import Arm
    from steepen.model.shape import SizeRule
    from steepen.recipe.recipe import Recipe
    from steepen.recipe.recipe_choice import RecipeChoice


# Panels of --help.
RUN = HelpPanel("Run")
SIZE = HelpPanel("Size and budget")

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

    recipe: tuple[str | Path, ...] = RUN(
        "Recipe: paper (the default), paper-fixed-rho, paper-affine-rho, paper-constant-lr, or a recipe "
        "file. Repeatable.",
        (),
    )
    tokens: float | None = SIZE("Tokens to train on. Default: the recipe's.", limits=Range(1, 10**15))
    flops: Flops | None = SIZE("Compute budget, instead of `tokens`.")
    rho: Fraction | None = SIZE("Fraction of tokens after growth. Default: the recipe's.")
    tpp: float | None = SIZE(
        "Tokens per initial stored parameter. Default: the recipe's.", limits=Range(1e-6, 1e9)
    )
    context: Width = SIZE("Context length in tokens.", 2048)
    batch_tokens: int | None = SIZE("Tokens per step. Default: 524,288.", limits=Range(1, 10**15))
    aspect: Width = SIZE("Width per unit of depth.", 128)
    head_dim: int = SIZE("Width of an attention head.", 128, Range(2, 10**8))
    mlp_multiple: Width = SIZE("Round the MLP width up to a multiple of this.", 256)
    base_depth: Width | None = SIZE("Depth at which the base learning rate applies. Default: 8.")

    def size_rule(self, **vocabulary: int) -> SizeRule:
        """Nominal depth → width, heads and MLP width; `vocabulary` has further fields of the rule."""
        from steepen.model.shape import SizeRule

        return SizeRule(self.aspect, self.head_dim, self.mlp_multiple, self.context, **vocabulary)

    def recipe_choice(self) -> RecipeChoice:
        """The recipes that were named, and tokens per parameter."""
        from steepen.recipe.recipe_choice import choose_recipes

        return choose_recipes(list(map(str, self.recipe)), self.tpp)

    def recipe_changes(self) -> dict[str, int]:
        """Fields of the recipe that were given."""
        given = {"batch_tokens": self.batch_tokens, "base_depth": self.base_depth}
        return {name: value for name, value in given.items() if value is not None}

    def recipe_of(self, arm: Arm) -> Recipe:
        """The recipe of an arm; raises UsageError if the recipe files are for other arms."""
        choice = self.recipe_choice()
        choice.require_file_for(arm)
        return replace(choice.of(arm), **self.recipe_changes())


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from steepen.data import Dataset
    from steepen.runs.spec import RunSpec

    # What Python accepts; it is stored as KEY=VALUE texts.
    Changes: TypeAlias = Mapping[str, Any] | Sequence[str]
else:
    Changes = tuple[str, ...]

DATA = HelpPanel("Data")
VALIDATION_TOKENS = 10_000_000  # of the paper's runs


@dataclass(frozen=True, kw_only=True)
class SpecFields(RunSize):
    """The fields of a spec besides arm and depth."""

    changes: Changes = RUN(
        "Change a hyperparameter or option, by name or the paper's code: `changes` learning_rate=0.03, "
        "`changes` GLR=0.03, `changes` model.softcap=15. Repeatable.",
        (),
        flag="--set",
        metavar="KEY=VALUE",
        python='Also a dict: {"learning_rate": 0.03}.',
    )
    optimizer: Any = RUN("muon (the default), adamw, or module:factory.", python="Also the factory.")
    seed: Seed = RUN("Seed of weights, data order and random passes.", 0)
    stop_after: Steps | None = SIZE(
        "Train only the first so many steps; learning rate and growth follow the whole schedule."
    )
    pool_tokens: Tokens | None = DATA(
        "Use only this many unique tokens. With `epochs` and without `tokens`, `flops` or `tpp`, the run is "
        "that many epochs long. Default: 1.01 times the run's tokens."
    )
    pool: Literal["prefix", "sample"] = DATA(
        "prefix: the first tokens of the data; sample: `pool_tokens` at random, else all.", "prefix"
    )
    windows: Literal["recut", "fixed"] = DATA(
        "recut: every epoch shuffles the documents and cuts them into windows anew; fixed: the windows are "
        "cut once and shuffled every epoch.",
        "recut",
    )
    epochs: int | None = DATA("Maximum number of epochs. Default: 1.", limits=Range(1, 10**6))
    validation_tokens: Tokens | None = DATA(
        "Validation tokens. Default: 10M or what the data has, in whole batches."
    )
    precision: Literal["auto", "bf16", "fp32", "fp8"] = EXECUTION(
        "Precision of the GEMMs: bf16, fp32, fp8 (a GPU with fp8 tensor cores; evaluated in bf16), or auto: "
        "bf16 on a GPU, fp32 on a CPU. Part of the spec: each is another run.",
        "bf16",
    )  # on every device: a rung has one hash, that of a study with preset paper, on any machine

    def settings(self) -> list[str]:
        """What is changed in the spec, as `override` takes it."""
        from steepen.utils.imports import object_name

        found = [] if self.optimizer is None else [f"optimizer={object_name(self.optimizer, 'optimizer')}"]
        found += [*self.changes]
        return found if self.stop_after is None else [*found, f"stop_after={self.stop_after}"]

    def make_spec(
        self, dataset: Dataset, arm: Any, depth: int, device: str = "auto"
    ) -> tuple[RunSpec, tuple[str, ...]]:
        """The spec of a run on prepared data, and the planner's warnings."""
        from steepen.model.arms import find_arm
        from steepen.recipe.planner import make_plan
        from steepen.runs.spec import DataConfig, RunSpec, override, whole_validation_tokens

        found, choice = find_arm(arm), self.recipe_choice()
        recipe = self.recipe_of(found)
        size = self.size_rule(vocabulary=dataset.padded_vocabulary, real_vocabulary=dataset.vocabulary)
        data = DataConfig(dataset.identity, self.pool_tokens, self.epochs or 1, self.pool, self.windows)
        tokens = self.tokens
        if self.pool_tokens and self.epochs and self.tpp is tokens is self.flops is None:
            # Both say how long the run is: so many epochs of whole batches.
            steps = data.max_steps(self.pool_tokens, size.context, recipe.batch_tokens)
            tokens = float(max(1, steps) * recipe.batch_tokens)
        plan = make_plan(
            found, depth=depth, size_rule=size, recipe=recipe, tokens=tokens, flops=self.flops, rho=self.rho
        )
        validation_tokens = self.validation_tokens or whole_validation_tokens(
            VALIDATION_TOKENS, dataset.validation_tokens, size.context, recipe.batch_tokens
        )
        run = RunSpec.from_plan(
            plan.run, data, validation_tokens=validation_tokens, seed=self.seed,
            precision=choose_precision(self.precision, device),
        )  # fmt: skip
        return override(run, [*choice.settings(found), *self.settings()]), plan.warnings


def choose_precision(name: str, device: str) -> str:
    """Resolve "auto" to bf16 on a GPU and fp32 on a CPU."""
    if name != "auto":
        return name
    if device == "auto":
        from steepen.training.device import find_device

        device = find_device("auto").type
    return "bf16" if device.startswith("cuda") else "fp32"


def open_data(data: Any) -> Dataset:
    """Prepared data: as given, or opened."""
    from steepen.data import Dataset

    if data is None:
        raise UsageError("`data` is missing: give a directory made by `steepen data prepare`.")
    return data if isinstance(data, Dataset) else Dataset.open(data)


@dataclass(frozen=True)
class Spec(SpecFields, Request["RunSpec"]):
    """Make the specification of one run on prepared data: everything that decides its result.

    On the command line `steepen train --write-spec` makes it.
    """

    arm: ArmField
    depth: Annotated[Depth, Option("Nominal depth ℓ; the width is aspect·ℓ.", RUN)]
    data: DataField
    _: KW_ONLY

    def run(self) -> RunSpec:
        """The spec."""
        return self.make_spec(open_data(self.data), self.arm, self.depth)[0]


spec = function(Spec)
