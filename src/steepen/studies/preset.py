"""A preset: the model sizes, data and grids of a study, read from a YAML file and checked on loading."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

import yaml

from steepen.errors import UsageError, nearest, show
from steepen.model.arm import Arm
from steepen.model.arms import find_arm
from steepen.model.config import ModelOptions
from steepen.model.shape import SizeRule
from steepen.optim.config import EmbeddingPrecision, LRScheduleConfig
from steepen.recipe.flops import FlopCount
from steepen.recipe.hyperparameters import Hyperparameters, full_name
from steepen.recipe.paper_tables import recipe_of
from steepen.recipe.recipe import Recipe
from steepen.runs.spec import Precision
from steepen.studies.grids import Depths, Grids
from steepen.utils.codec import Distinct, check_fields, decode, from_builtins
from steepen.utils.files import read_text
from steepen.utils.validate import require
from steepen.utils.values import Depth, Seed, Tokens
from steepen.utils.yaml_io import load_yaml

PRESETS_DIRECTORY = Path(__file__).parent / "presets"
ALL_ARMS = "all"


@dataclass(frozen=True)
class RecipeOverride:
    """What a preset changes in the paper's recipe for one arm (`all`: for every arm, before its own).

    In a file the changes stand beside the arm: `{arm: all, learning_rate: 0.16, tpp: 4}`. They are named as
    the fields of `Hyperparameters` (or by the paper's codes) and `CHANGEABLE` ones of `Recipe`.
    """

    arm: str
    changes: dict[str, Any] = field(default_factory=dict[str, Any], metadata={"rest": True})
    CHANGEABLE: ClassVar[tuple[str, ...]] = ("learning_rate_exponent", "tpp", "rho")

    def __post_init__(self) -> None:
        if self.arm != ALL_ARMS:
            object.__setattr__(self, "arm", find_arm(self.arm).name)  # one of its names
        recipe = get_type_hints(Recipe)
        hints = get_type_hints(Hyperparameters) | {name: recipe[name] for name in self.CHANGEABLE}
        given: dict[str, Any] = {}
        for key, value in self.changes.items():
            name, where = full_name(key), f"the preset's recipe of {self.arm}"
            if name not in hints:
                raise UsageError(f"{where} has no field {show(key)}; the nearest are {nearest(key, hints)}.")
            if name in given:
                raise UsageError(f"{where} has {name!r} twice, once as {show(key)}.")
            if value is not None:
                given[name] = decode(hints[name], value, f"{where}: {name}")
        object.__setattr__(self, "changes", given)
        self.apply(recipe_of(find_arm("vanilla")))  # rejects a bad value, whichever arms are studied

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe with these values put in."""
        rest = {name: value for name, value in self.changes.items() if name in self.CHANGEABLE}
        base = {name: value for name, value in self.changes.items() if name not in rest}
        if "learning_rate" in base:
            rest["learning_rate_base"] = None  # the preset's anchor replaces the paper's for an arm
        if "rho" in rest:
            rest["growth_law"] = None
        if "rho" in rest or "tpp" in rest:
            rest["listed_rho"] = ()  # listed for the paper's own tokens per parameter
        return replace(recipe, base=replace(recipe.base, **base), **rest)


@dataclass(frozen=True)
class ArmRungs:
    """Depths at which one arm's ladder is measured, where they differ from the preset's."""

    arm: str
    depths: Depths

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "arm", find_arm(self.arm).name)


@dataclass(frozen=True)
class Preset:
    """Scale of a study: model sizes, data, batch size, arms and sweep grids."""

    name: str
    about: str
    aspect: int
    head_dim: int
    mlp_multiple: int
    context: int
    tokenizer: str  # of the data that is prepared where none is given
    source: str | None  # what is prepared then; None: data must be given, e.g. one of `suggested_data`
    batch_tokens: Tokens
    base_depth: Depth  # where hyperparameters are tuned and the learning rate is anchored
    base_tokens: Tokens  # the paper's 1B tokens of stage 1 and of the fixed-token sweeps
    rungs: Depths
    arms: Annotated[tuple[str, ...], Distinct(1)]
    grids: Grids
    base_steps: Tokens | None = None  # exact length of those runs; None: base_tokens, rounded to steps
    max_tokens: Tokens | None = None  # of the source
    suggested_data: tuple[str, ...] = ()  # sources large enough, where `source` is None
    seeds: Annotated[tuple[Seed, ...], Distinct(1)] = (0,)
    validation_tokens: Tokens = 1_048_576
    precision: Precision = "bf16"
    lr_schedule: LRScheduleConfig = field(default_factory=LRScheduleConfig)
    options: ModelOptions = field(default_factory=ModelOptions)
    # fp32: weight decay reaches rare rows too; bf16, as the authors store it, rounds their decay away.
    embedding_precision: EmbeddingPrecision = "fp32"
    sweep_flops: FlopCount = "total"  # what budgets of sweeps count; the paper's leave attention out
    recipes: tuple[RecipeOverride, ...] = ()
    arm_rungs: tuple[ArmRungs, ...] = ()
    reference: str = "vanilla"
    sample_every: Tokens | None = None  # steps between texts that every run generates while it trains
    sample_prompts: tuple[str, ...] = ()  # what they continue; none: the start of a document

    def __post_init__(self) -> None:
        check_fields(self)
        self.size_rule(128)  # rejects a bad aspect, head or context
        whole = self.batch_tokens % self.context == 0
        accepted = f"a multiple of the context ({self.context})"
        require(whole, "Preset", "batch_tokens", self.batch_tokens, accepted)
        for arm in (*self.arms, self.reference):
            find_arm(arm)

    @property
    def fixed_tokens(self) -> int:
        """Tokens of stage 1 and of the fixed-token sweeps."""
        return self.base_tokens if self.base_steps is None else self.base_steps * self.batch_tokens

    def size_rule(self, vocabulary: int, real_vocabulary: int | None = None) -> SizeRule:
        """Rule from depth to width, heads and MLP width; `vocabulary` is padded."""
        return SizeRule(
            self.aspect, self.head_dim, self.mlp_multiple, self.context, vocabulary, real_vocabulary
        )

    def at_own_scale(self, recipe: Recipe) -> Recipe:
        """A recipe at this preset's batch and base depth."""
        return replace(recipe, batch_tokens=self.batch_tokens, base_depth=self.base_depth, measured=None)

    def recipe(self, arm: Arm) -> Recipe:
        """The paper's recipe for an arm, at this preset's batch and base, with its overrides."""
        recipe = self.at_own_scale(recipe_of(arm))
        for name in (ALL_ARMS, arm.recipe, arm.name):  # an ablation follows its parent's
            for override in self.recipes:
                if override.arm == name:
                    recipe = override.apply(recipe)
        return recipe

    def depths(self, arm: Arm) -> tuple[int, ...]:
        """The rungs of an arm's ladder."""
        own = [entry.depths for entry in self.arm_rungs if entry.arm == arm.name]
        return own[0] if own else self.rungs


def preset_names() -> list[str]:
    """The names of the presets that come with steepen."""
    return [name for name in ("tiny", "mini", "paper") if (PRESETS_DIRECTORY / f"{name}.yaml").exists()]


def load_preset(name: str) -> Preset:
    """A preset by name, or from a custom YAML file."""
    path = PRESETS_DIRECTORY / f"{name}.yaml" if name in preset_names() else Path(name)
    if not path.is_file():
        raise UsageError(f"there is no preset {name!r}; use {', '.join(preset_names())}, or a YAML file.")
    try:
        value: Any = load_yaml(read_text(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"the preset {path} could not be read: {str(error).splitlines()[0]}.") from error
    if isinstance(value, dict):
        value = {"name": path.stem, **value}
    return from_builtins(Preset, value, f"preset {path.stem}")
