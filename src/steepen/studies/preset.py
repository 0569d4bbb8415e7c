"""A preset: the model sizes, data and grids of a study, read from a YAML file and checked on loading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import yaml

from steepen.errors import UsageError
from steepen.model.arm import Arm
from steepen.model.arms import find_arm
from steepen.model.shape import SizeRule
from steepen.optim.config import LRScheduleConfig
from steepen.recipe.flops import FlopCount
from steepen.recipe.hyperparameters import PAPER_CODES, Hyperparameters
from steepen.recipe.paper_tables import recipe_of
from steepen.recipe.recipe import Recipe
from steepen.runs.spec import Precision
from steepen.studies.grids import MAX_DEPTH, Grids, require_depths, require_unique
from steepen.utils.codec import from_builtins
from steepen.utils.files import read_text
from steepen.utils.validate import require, require_count, require_positive
from steepen.utils.yaml_io import load_yaml

PRESETS_DIRECTORY = Path(__file__).parent / "presets"
ALL_ARMS = "all"


@dataclass(frozen=True)
class RecipeOverride:
    """What a preset changes in the paper's recipe for one arm (`all`: for every arm, before its own)."""

    arm: str
    learning_rate: float | None = None
    embedding_lr_multiplier: float | None = None
    head_lr_multiplier: float | None = None
    residual_multiplier: float | None = None
    output_multiplier: float | None = None
    injection_weight: float | None = None
    weight_decay: float | None = None
    embedding_init_std: float | None = None
    init_scale: float | None = None
    warmup_steps: int | None = None
    warmdown_fraction: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    adam_eps: float | None = None
    learning_rate_exponent: float | None = None
    tpp: float | None = None
    rho: float | None = None
    ALIASES: ClassVar[Mapping[str, str]] = PAPER_CODES

    def __post_init__(self) -> None:
        if self.arm != ALL_ARMS:
            object.__setattr__(self, "arm", find_arm(self.arm).name)  # one of its names
        self.apply(recipe_of(find_arm("vanilla")))  # rejects a bad value, whichever arms are studied

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe with these values put in."""
        given = {
            f.name: value
            for f in fields(self)
            if f.name != "arm" and (value := getattr(self, f.name)) is not None
        }
        names = {f.name for f in fields(Hyperparameters)}
        base = replace(recipe.base, **{name: value for name, value in given.items() if name in names})
        rest = {name: value for name, value in given.items() if name not in names}
        if "learning_rate" in given:
            rest["learning_rate_base"] = None  # the preset's anchor replaces the paper's for an arm
        if "rho" in given:
            rest["growth_law"] = None
        if "rho" in given or "tpp" in given:
            rest["listed_rho"] = ()  # listed for the paper's own tokens per parameter
        return replace(recipe, base=base, **rest)


@dataclass(frozen=True)
class ArmRungs:
    """Depths at which one arm's ladder is measured, where they differ from the preset's."""

    arm: str
    depths: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "arm", find_arm(self.arm).name)
        require_depths(self, "depths")


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
    batch_tokens: int
    base_depth: int  # where hyperparameters are tuned and the learning rate is anchored
    base_tokens: int  # the paper's 1B tokens of stage 1 and of the fixed-token sweeps
    rungs: tuple[int, ...]
    arms: tuple[str, ...]
    grids: Grids
    base_steps: int | None = None  # exact length of those runs; None: base_tokens, rounded to steps
    max_tokens: int | None = None  # of the source
    suggested_data: tuple[str, ...] = ()  # sources large enough, where `source` is None
    seeds: tuple[int, ...] = (0,)
    validation_tokens: int = 1_048_576
    precision: Precision = "bf16"
    lr_schedule: LRScheduleConfig = field(default_factory=LRScheduleConfig)
    sweep_flops: FlopCount = "total"  # what budgets of sweeps count; the paper's leave attention out
    recipes: tuple[RecipeOverride, ...] = ()
    arm_rungs: tuple[ArmRungs, ...] = ()
    reference: str = "vanilla"
    sample_every: int | None = None  # steps between texts that every run generates while it trains
    sample_prompts: tuple[str, ...] = ()  # what they continue; none: the start of a document

    def __post_init__(self) -> None:
        for name in ("sample_every", "base_steps", "max_tokens"):
            require_count("Preset", name, getattr(self, name))
        require_positive(self, ("batch_tokens", "base_tokens", "validation_tokens"))
        require_positive(self, ("base_depth",), MAX_DEPTH)
        self.size_rule(128)  # rejects a bad aspect, head or context
        require(
            self.batch_tokens % self.context == 0, "Preset", "batch_tokens", self.batch_tokens,
            f"a multiple of the context ({self.context})",
        )  # fmt: skip
        for name in ("rungs", "seeds", "arms"):
            require_unique(self, name)
        require_depths(self, "rungs")
        inside = all(0 <= seed < 2**63 for seed in self.seeds)
        require(inside, "Preset", "seeds", self.seeds, "from 0 to 2^63 − 1")
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
