"""A preset: the model sizes, data and grids of a study, read from a YAML file and checked on loading."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar, get_type_hints

import yaml

from steepen.errors import UsageError, nearest, require, show
from steepen.model.arm import Arm
from steepen.model.arms import find_arm
from steepen.model.config import ModelOptions
from steepen.model.shape import SizeRule
from steepen.optim.config import EmbeddingPrecision, LRScheduleConfig, OptimizerConfig
from steepen.recipe.flops import FlopCount
from steepen.recipe.hyperparameters import Hyperparameters, full_name
from steepen.recipe.paper_tables import recipe_of
from steepen.recipe.recipe import Recipe
from steepen.runs.spec import Pool, Precision
from steepen.studies.registry import STUDIES
from steepen.utils.codec import Checked, Distinct, OneOf, Range, decode, from_builtins
from steepen.utils.files import read_text
from steepen.utils.values import Depth, Fraction, Seed, Tokens
from steepen.utils.yaml_io import load_yaml

SWEEPS = STUDIES["chain-tuning"].parts  # in the order of the authors' code
SWEPT = tuple(name for name in SWEEPS if name not in ("schedule", "adam"))  # these vary several settings
NAMES = tuple(one.name for one in fields(Hyperparameters))

Depths: TypeAlias = Annotated[tuple[Depth, ...], Distinct(1, rising=True)]
Passes: TypeAlias = Annotated[int, Range(1, 64)]
PassCounts: TypeAlias = Annotated[tuple[Passes, ...], Distinct(3)]
Fractions: TypeAlias = Annotated[tuple[Fraction, ...], Distinct(3)]
Tpp: TypeAlias = Annotated[float, Range(1e-3, 1e6)]
Tpps: TypeAlias = Annotated[tuple[Tpp, ...], Distinct(1)]
Points: TypeAlias = Annotated[int, Range(1, 1_000)]
Hyperparameter: TypeAlias = Annotated[str, OneOf(SWEPT, full_name)]
Sweeps: TypeAlias = Annotated[tuple[Annotated[str, OneOf(SWEEPS, full_name)], ...], Distinct(1)]


G = TypeVar("G")


@dataclass(frozen=True)
class AllocationGrid(Checked):
    """Core sizes at several stored depths, for the base tokens (Appendix "Allocating Blocks…")."""

    # At least 3: prelude, core and coda.
    depths: Annotated[tuple[Annotated[int, Range(3, 10_000)], ...], Distinct(1, rising=True)] = (6, 8, 10, 12)


@dataclass(frozen=True)
class PassesGrid(Checked):
    """Passes K in ladders of fixed tokens and at anchors of fixed compute."""

    passes: PassCounts = (1, 2, 3, 4, 6)
    depths: Depths = (6, 8, 10, 12, 14)
    budgets: Points = 6  # common budgets at which the fixed-token ladders are compared
    anchors: Depths = (8, 9, 10, 11, 12)
    anchor_tpp: Tpps = (5.0, 10.0, 20.0, 40.0)  # tokens per stored parameter at K = 1
    # Where hyperparameters are swept, tokens fixed, and which.
    transfer_passes: Annotated[tuple[Passes, ...], Distinct(2)] = (2, 4, 8)
    transferred: Annotated[tuple[Hyperparameter, ...], Distinct(1)] = (
        "learning_rate", "weight_decay", "output_multiplier", "residual_multiplier", "injection_weight",
    )  # fmt: skip


@dataclass(frozen=True)
class GrowthTargetGrid(Checked):
    """Targets of growth from two passes. Each budget is that of growing to 4 passes at one of `fractions`."""

    targets: Annotated[tuple[Annotated[int, Range(3, 64)], ...], Distinct(2)] = (3, 4, 6, 8)
    # With larger fractions target 3 cannot spend the budget.
    fractions: Annotated[tuple[Annotated[float, Range(1e-3, 1)], ...], Distinct(1)] = (0.15, 0.3, 0.5)


@dataclass(frozen=True)
class GrowthTimingGrid(Checked):
    """ρ at anchor depths and budgets; the budget is named by TPP without growth.

    ρ = 0 is the arm that the growing one starts as, with the tokens that the budget buys.
    """

    depths: Depths = (8, 9, 10)
    tpp: Tpps = (4.0, 6.0, 10.0, 16.0, 24.0, 40.0)
    rho: Fractions = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


@dataclass(frozen=True)
class ChainGrid(Checked):
    """Chain tuning. `points` below 8 keeps only the settings nearest to the current one."""

    rounds: Points = 2
    points: Annotated[int, Range(3, 8)] = 8
    threshold: Annotated[float, Range(0, 100)] = 1e-3
    sweeps: Sweeps = SWEEPS


@dataclass(frozen=True)
class TppGrid(Checked):
    """Each budget is the FLOPs of a depth at `reference_tpp` tokens per parameter, for `budget_arm`.

    The depths of a budget's runs are that depth plus `offsets`. The budgets are the same for all arms, unless
    `budget_arm` is None: then they are each arm's own.
    """

    budgets: Depths = (8, 9, 10, 11, 12)
    reference_tpp: Tpp = 7.0
    offsets: Annotated[tuple[Annotated[int, Range(-64, 64)], ...], Distinct(3)] = (-2, -1, 0, 1, 2)
    budget_arm: str | None = "vanilla"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget_arm is not None:
            find_arm(self.budget_arm)
        smallest = self.budgets[0] + min(self.offsets)
        require(smallest >= 1, "TppGrid", "offsets", list(self.offsets), "leaving every depth at least 1")


@dataclass(frozen=True)
class GrowthFractionGrid(Checked):
    """ρ at three anchors, each at its stage-2 budget; ρ = 0 is the arm it starts as."""

    depths: Depths = (8, 9, 10)
    rho: Fractions = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


@dataclass(frozen=True)
class LrRuleGrid(Checked):
    """Multiples of the base values at a few sizes, at least two to fit a drift."""

    depths: Annotated[tuple[Depth, ...], Distinct(2, rising=True)] = (8, 9, 10)
    multiples: Annotated[tuple[Annotated[float, Range(1e-3, 1e3)], ...], Distinct(3)] = (0.25, 0.5, 1, 2, 4)
    hyperparameters: Annotated[tuple[Annotated[str, OneOf(NAMES, full_name)], ...], Distinct(1)] = (
        "learning_rate", "output_multiplier", "residual_multiplier", "weight_decay",
    )  # fmt: skip
    screen_depths: Depths = (8, 10, 12)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1.0 in self.multiples, "LrRuleGrid", "multiples", self.multiples, "with 1 among them")
        names, accepted = self.hyperparameters, "with learning_rate among them"
        require("learning_rate" in names, "LrRuleGrid", "hyperparameters", names, accepted)


@dataclass(frozen=True)
class ExtrapolateGrid(Checked):
    """The arm and depth held out of every fit; multipliers are projected to multiples of its compute."""

    arm: str = "untied-grow"
    depth: Depth = 26
    project: Annotated[tuple[Annotated[float, Range(1e-6, 1e12)], ...], Distinct(1)] = (1.0, 1e4)


@dataclass(frozen=True)
class DataConstrainedGrid(Checked):
    """Depth × passes × weight decay on a pool that is repeated."""

    depths: Depths = (6, 8, 10, 12, 14, 16, 18)
    passes: PassCounts = (1, 2, 3, 4, 6, 8, 12)
    control_passes: PassCounts = (1, 2, 3, 4, 6)
    decays: Annotated[tuple[Annotated[float, Range(1e-9, 1e3)], ...], Distinct(3)] = (
        0.05, 0.2, 0.4, 0.8, 1.2, 1.6,
    )  # fmt: skip
    decay: float = 0.8  # where it is held fixed
    epochs: Annotated[tuple[Points, ...], Distinct(1)] = (1, 4, 10)  # regimes; the last is the grid's
    budgets: Points = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        one = 1 in self.passes and 1 in self.control_passes
        require(one, "DataConstrainedGrid", "passes", self.passes, "with 1 among them: gains are over K = 1")
        inside = self.decay in self.decays
        require(inside, "DataConstrainedGrid", "decay", self.decay, f"one of decays {list(self.decays)}")


@dataclass(frozen=True)
class AblationGrid(Checked):
    """The optimizer ablation: each optimizer is tuned for the arm, then its ladder is compared with Muon's.

    `optimizers` maps names (or `module:factory`) to the learning rate at which tuning starts; `tuned` are the
    sweeps of stage 1. Tokens per parameter and the learning-rate exponent are fitted for each.
    """

    optimizers: tuple[tuple[str, Annotated[float, Range(1e-12, 1e9)]], ...] = (("adamw", 0.003),)
    optimizer_arm: str = "deep-vanilla"
    tuned: Sweeps = ("learning_rate", "weight_decay", "adam")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, _ in self.optimizers:
            if ":" not in name:
                OptimizerConfig.named(name)
        first = self.tuned[0] == "learning_rate"
        require(first, "AblationGrid", "tuned", self.tuned, "sweeps that begin with learning_rate")


@dataclass(frozen=True)
class Grids:
    """One grid per study that sweeps something."""

    allocation: AllocationGrid = field(default_factory=AllocationGrid)
    passes: PassesGrid = field(default_factory=PassesGrid)
    growth_target: GrowthTargetGrid = field(default_factory=GrowthTargetGrid)
    growth_timing: GrowthTimingGrid = field(default_factory=GrowthTimingGrid)
    chain: ChainGrid = field(default_factory=ChainGrid)
    tpp: TppGrid = field(default_factory=TppGrid)
    growth_fraction: GrowthFractionGrid = field(default_factory=GrowthFractionGrid)
    lr_rule: LrRuleGrid = field(default_factory=LrRuleGrid)
    ablations: AblationGrid = field(default_factory=AblationGrid)
    extrapolate: ExtrapolateGrid = field(default_factory=ExtrapolateGrid)
    data_constrained: DataConstrainedGrid = field(default_factory=DataConstrainedGrid)
    others: dict[str, Any] = field(
        default_factory=dict[str, Any], metadata={"rest": True}
    )  # of later studies

    def __post_init__(self) -> None:
        own = [one.name for one in fields(self) if one.name != "others"]
        for name in self.others:
            if name.replace("_", "-") not in STUDIES:
                raise UsageError(f"grids has no field {show(name)}; the nearest are {nearest(name, own)}.")

    def of(self, kind: type[G], name: str) -> G:
        """The grid of a study that keeps its class in its own file; the class's defaults without an entry."""
        return from_builtins(kind, self.others.get(name, {}), f"grids.{name}")


PRESETS, PRESETS_DIRECTORY = ("tiny", "mini", "paper"), Path(__file__).parent / "presets"
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
class ArmRungs(Checked):
    """Depths at which one arm's ladder is measured, where they differ from the preset's."""

    arm: str
    depths: Depths

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "arm", find_arm(self.arm).name)


@dataclass(frozen=True)
class Preset(Checked):
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
    # What a run draws from, where a study sets no pool: the first tokens, as many as it needs, or all.
    pool: Pool = "prefix"
    precision: Precision = "bf16"
    lr_schedule: LRScheduleConfig = field(default_factory=LRScheduleConfig)
    options: ModelOptions = field(default_factory=ModelOptions)
    # fp32: weight decay reaches rare rows too; bf16, as the authors store it, rounds their decay away.
    embedding_precision: EmbeddingPrecision = "fp32"
    sweep_flops: FlopCount = "total"  # what budgets of sweeps count; the paper's leave attention out
    recipes: tuple[RecipeOverride, ...] = ()
    arm_rungs: tuple[ArmRungs, ...] = ()
    reference: str = "vanilla"
    # Warm-down, as a fraction of the steps, of sweeps over tokens and growth whose runs share first steps.
    branches: Fraction | None = None
    sample_every: Tokens | None = None  # steps between texts that every run generates while it trains
    sample_prompts: tuple[str, ...] = ()  # what they continue; none: the start of a document

    def __post_init__(self) -> None:
        super().__post_init__()
        self.size_rule(128)  # rejects a bad aspect, head or context
        whole = self.batch_tokens % self.context == 0
        accepted = f"a multiple of the context ({self.context})"
        require(whole, "Preset", "batch_tokens", self.batch_tokens, accepted)
        name = self.lr_schedule.name
        good = self.branches is None or (0 < self.branches < 1 and name == "wsd")
        accepted = f"between 0 and 1, with the schedule wsd (it is {name})"
        require(good, "Preset", "branches", self.branches, accepted)
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


def load_preset(name: str) -> Preset:
    """A preset by name, or from a custom YAML file; with changed fields: `mini+context=1024`."""
    base, *changes = [name] if Path(name).is_file() else name.split("+")
    path = PRESETS_DIRECTORY / f"{base}.yaml" if base in PRESETS else Path(base)
    if not path.is_file():
        raise UsageError(f"there is no preset {base!r}; use {', '.join(PRESETS)}, or a YAML file.")
    fields: dict[str, Any] = {"name": "+".join([path.stem, *changes])}
    try:
        value: Any = load_yaml(read_text(path))
        changed = {key: load_yaml(text) for key, _, text in (one.partition("=") for one in changes)}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"the preset {path} could not be read: {str(error).splitlines()[0]}.") from error
    if isinstance(value, dict):
        value = {**value, **fields, **changed} if changes else {**fields, **value}
    return from_builtins(Preset, value, f"preset {path.stem}")
