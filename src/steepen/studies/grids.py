"""What each study sweeps. The defaults are the paper's grids; a preset may shrink them.

A grid's fields are checked by their types when it is constructed; `__post_init__` adds what spans fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeAlias, TypeVar

from steepen.errors import UsageError, nearest, show
from steepen.model.arms import find_arm
from steepen.optim.config import OptimizerConfig
from steepen.recipe.hyperparameters import Hyperparameters, full_name
from steepen.studies.registry import STUDIES
from steepen.utils.codec import Distinct, OneOf, Range, check_fields, from_builtins
from steepen.utils.validate import require
from steepen.utils.values import Depth, Fraction

SWEPT = (
    "learning_rate", "embedding_lr_multiplier", "head_lr_multiplier", "residual_multiplier",
    "output_multiplier", "injection_weight", "weight_decay", "embedding_init_std", "init_scale",
)  # fmt: skip
NAMES = tuple(one.name for one in fields(Hyperparameters))
SWEEPS = (*SWEPT, "schedule", "adam")  # of chain tuning, in the order of the authors' code

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


class Grid:
    """Base of the grids: a bad value is rejected at construction."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class AllocationGrid(Grid):
    """Core sizes at several stored depths, for the base tokens (Appendix "Allocating Blocks…")."""

    # At least 3: prelude, core and coda.
    depths: Annotated[tuple[Annotated[int, Range(3, 10_000)], ...], Distinct(1, rising=True)] = (6, 8, 10, 12)


@dataclass(frozen=True)
class PassesGrid(Grid):
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
class GrowthTargetGrid(Grid):
    """Targets of growth from two passes. Each budget is that of growing to 4 passes at one of `fractions`."""

    targets: Annotated[tuple[Annotated[int, Range(3, 64)], ...], Distinct(2)] = (3, 4, 6, 8)
    # With larger fractions target 3 cannot spend the budget.
    fractions: Annotated[tuple[Annotated[float, Range(1e-3, 1)], ...], Distinct(1)] = (0.15, 0.3, 0.5)


@dataclass(frozen=True)
class GrowthTimingGrid(Grid):
    """ρ at anchor depths and budgets; the budget is named by TPP without growth.

    ρ = 0 is the arm that the growing one starts as, with the tokens that the budget buys.
    """

    depths: Depths = (8, 9, 10)
    tpp: Tpps = (4.0, 6.0, 10.0, 16.0, 24.0, 40.0)
    rho: Fractions = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


@dataclass(frozen=True)
class ChainGrid(Grid):
    """Chain tuning. `points` below 8 keeps only the settings nearest to the current one."""

    rounds: Points = 2
    points: Annotated[int, Range(3, 8)] = 8
    threshold: Annotated[float, Range(0, 100)] = 1e-3
    sweeps: Sweeps = SWEEPS


@dataclass(frozen=True)
class TppGrid(Grid):
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
class GrowthFractionGrid(Grid):
    """ρ at three anchors, each at its stage-2 budget; ρ = 0 is the arm it starts as."""

    depths: Depths = (8, 9, 10)
    rho: Fractions = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


@dataclass(frozen=True)
class LrRuleGrid(Grid):
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
class ExtrapolateGrid(Grid):
    """The arm and depth held out of every fit; multipliers are projected to multiples of its compute."""

    arm: str = "untied-grow"
    depth: Depth = 26
    project: Annotated[tuple[Annotated[float, Range(1e-6, 1e12)], ...], Distinct(1)] = (1.0, 1e4)


@dataclass(frozen=True)
class DataConstrainedGrid(Grid):
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
class AblationGrid(Grid):
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
