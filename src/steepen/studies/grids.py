"""What each study sweeps. The defaults are the paper's grids; a preset may shrink them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from steepen.model.arms import find_arm
from steepen.optim.config import OptimizerConfig
from steepen.recipe.hyperparameters import full_name
from steepen.utils.validate import require, require_positive

MAX_DEPTH = 10_000
MAX_POINTS = 1_000  # of a grid


def require_unique(owner: Any, name: str) -> None:
    """Require a non-empty list without repeats."""
    value = getattr(owner, name)
    good = bool(value) and len(set(value)) == len(value)
    require(good, type(owner).__name__, name, list(value), "a list without repeats, of at least one")


def require_depths(owner: Any, name: str) -> None:
    """Require depths of at least 1 in rising order."""
    require_unique(owner, name)
    value = getattr(owner, name)
    good = list(value) == sorted(value) and value[0] >= 1 and value[-1] <= MAX_DEPTH
    require(good, type(owner).__name__, name, list(value), f"depths from 1 to {MAX_DEPTH:,} in rising order")


def require_numbers(owner: Any, name: str, low: float, high: float, minimum: int) -> None:
    """Require at least `minimum` different numbers in [low, high]."""
    require_unique(owner, name)
    value = getattr(owner, name)
    good = len(value) >= minimum and all(low <= number <= high for number in value)
    accepted = f"at least {minimum} different numbers in [{low:g}, {high:g}]"
    require(good, type(owner).__name__, name, list(value), accepted)


@dataclass(frozen=True)
class AllocationGrid:
    """Core sizes at several stored depths, for the base tokens (Appendix "Allocating Blocks…")."""

    depths: tuple[int, ...] = (6, 8, 10, 12)

    def __post_init__(self) -> None:
        require_depths(self, "depths")
        require(self.depths[0] >= 3, "AllocationGrid", "depths", self.depths, "of at least 3: P, C and D")


@dataclass(frozen=True)
class PassesGrid:
    """Passes K in ladders of fixed tokens and at anchors of fixed compute."""

    passes: tuple[int, ...] = (1, 2, 3, 4, 6)
    depths: tuple[int, ...] = (6, 8, 10, 12, 14)
    budgets: int = 6  # common budgets at which the fixed-token ladders are compared
    anchors: tuple[int, ...] = (8, 9, 10, 11, 12)
    anchor_tpp: tuple[float, ...] = (5.0, 10.0, 20.0, 40.0)  # tokens per stored parameter at K = 1
    transfer_passes: tuple[int, ...] = (2, 4, 8)  # at which hyperparameters are swept, tokens fixed
    transferred: tuple[str, ...] = (
        "learning_rate",
        "weight_decay",
        "output_multiplier",
        "residual_multiplier",
        "injection_weight",
    )

    def __post_init__(self) -> None:
        require_numbers(self, "transfer_passes", 1, 64, 2)
        object.__setattr__(self, "transferred", tuple(map(full_name, self.transferred)))
        require_unique(self, "transferred")
        for name in self.transferred:
            known = name in ChainGrid.sweeps and name not in ("schedule", "adam")
            require(known, "PassesGrid", "transferred", name, "hyperparameters that have multiples")
        require_numbers(self, "passes", 1, 64, 3)
        require_depths(self, "depths")
        require_depths(self, "anchors")
        require_numbers(self, "anchor_tpp", 1e-3, 1e6, 1)
        require_positive(self, ("budgets",), MAX_POINTS)


@dataclass(frozen=True)
class GrowthTargetGrid:
    """Targets of growth from two passes. Each budget is that of growing to 4 passes at one of `fractions`."""

    targets: tuple[int, ...] = (3, 4, 6, 8)
    fractions: tuple[float, ...] = (0.15, 0.3, 0.5)  # with larger ones target 3 cannot spend the budget

    def __post_init__(self) -> None:
        require_numbers(self, "targets", 3, 64, 2)
        require_numbers(self, "fractions", 1e-3, 1, 1)


@dataclass(frozen=True)
class GrowthTimingGrid:
    """ρ at anchor depths and budgets; the budget is named by TPP without growth.

    ρ = 0 is the arm that the growing one starts as, with the tokens that the budget buys.
    """

    depths: tuple[int, ...] = (8, 9, 10)
    tpp: tuple[float, ...] = (4.0, 6.0, 10.0, 16.0, 24.0, 40.0)
    rho: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)

    def __post_init__(self) -> None:
        require_depths(self, "depths")
        require_numbers(self, "tpp", 1e-3, 1e6, 1)
        require_numbers(self, "rho", 0, 1, 3)


@dataclass(frozen=True)
class ChainGrid:
    """Chain tuning. `points` below 8 keeps only the settings nearest to the current one."""

    rounds: int = 2
    points: int = 8
    threshold: float = 1e-3
    sweeps: tuple[str, ...] = (
        "learning_rate",
        "embedding_lr_multiplier",
        "head_lr_multiplier",
        "residual_multiplier",
        "output_multiplier",
        "injection_weight",
        "weight_decay",
        "embedding_init_std",
        "init_scale",
        "schedule",
        "adam",
    )

    def __post_init__(self) -> None:
        require_positive(self, ("rounds",), MAX_POINTS)
        require(3 <= self.points <= 8, "ChainGrid", "points", self.points, "from 3 to 8")
        require(0 <= self.threshold <= 100, "ChainGrid", "threshold", self.threshold, "from 0 to 100")
        object.__setattr__(self, "sweeps", tuple(map(full_name, self.sweeps)))
        require_unique(self, "sweeps")
        for name in self.sweeps:
            known = name in ChainGrid.sweeps
            require(known, "ChainGrid", "sweeps", name, f"one of {', '.join(ChainGrid.sweeps)}")


@dataclass(frozen=True)
class TppGrid:
    """Each budget is the FLOPs of a depth at `reference_tpp` tokens per parameter, for `budget_arm`.

    The depths of a budget's runs are that depth plus `offsets`. The budgets are the same for all arms, unless
    `budget_arm` is None: then they are each arm's own.
    """

    budgets: tuple[int, ...] = (8, 9, 10, 11, 12)
    reference_tpp: float = 7.0
    offsets: tuple[int, ...] = (-2, -1, 0, 1, 2)
    budget_arm: str | None = "vanilla"

    def __post_init__(self) -> None:
        if self.budget_arm is not None:
            find_arm(self.budget_arm)
        require_depths(self, "budgets")
        require_numbers(self, "offsets", -64, 64, 3)
        good = 0 < self.reference_tpp <= 1e6
        require(good, "TppGrid", "reference_tpp", self.reference_tpp, "positive and at most 1e6")
        smallest = self.budgets[0] + min(self.offsets)
        require(smallest >= 1, "TppGrid", "offsets", list(self.offsets), "leaving every depth at least 1")


@dataclass(frozen=True)
class GrowthFractionGrid:
    """ρ at three anchors, each at its stage-2 budget; ρ = 0 is the arm it starts as."""

    depths: tuple[int, ...] = (8, 9, 10)
    rho: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)

    def __post_init__(self) -> None:
        require_depths(self, "depths")
        require_numbers(self, "rho", 0, 1, 3)


@dataclass(frozen=True)
class LrRuleGrid:
    """Multiples of the base values at a few sizes."""

    depths: tuple[int, ...] = (8, 9, 10)
    multiples: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    hyperparameters: tuple[str, ...] = (
        "learning_rate",
        "output_multiplier",
        "residual_multiplier",
        "weight_decay",
    )
    screen_depths: tuple[int, ...] = (8, 10, 12)

    def __post_init__(self) -> None:
        require_depths(self, "depths")
        require_depths(self, "screen_depths")
        require(len(self.depths) >= 2, "LrRuleGrid", "depths", self.depths, "at least two, to fit a drift")
        require_numbers(self, "multiples", 1e-3, 1e3, 3)
        require(1.0 in self.multiples, "LrRuleGrid", "multiples", self.multiples, "with 1 among them")
        object.__setattr__(self, "hyperparameters", tuple(map(full_name, self.hyperparameters)))
        require(
            "learning_rate" in self.hyperparameters,
            "LrRuleGrid",
            "hyperparameters",
            self.hyperparameters,
            "with learning_rate among them",
        )
        require_unique(self, "hyperparameters")


@dataclass(frozen=True)
class ExtrapolateGrid:
    """The arm and depth held out of every fit; multipliers are projected to multiples of its compute."""

    arm: str = "untied-grow"
    depth: int = 26
    project: tuple[float, ...] = (1.0, 1e4)

    def __post_init__(self) -> None:
        require_positive(self, ("depth",), MAX_DEPTH)
        require_numbers(self, "project", 1e-6, 1e12, 1)


@dataclass(frozen=True)
class DataConstrainedGrid:
    """Depth × passes × weight decay on a pool that is repeated."""

    depths: tuple[int, ...] = (6, 8, 10, 12, 14, 16, 18)
    passes: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12)
    control_passes: tuple[int, ...] = (1, 2, 3, 4, 6)
    decays: tuple[float, ...] = (0.05, 0.2, 0.4, 0.8, 1.2, 1.6)
    decay: float = 0.8  # where it is held fixed
    epochs: tuple[int, ...] = (1, 4, 10)  # regimes; the last is the grid's
    budgets: int = 6

    def __post_init__(self) -> None:
        require_depths(self, "depths")
        require_numbers(self, "passes", 1, 64, 3)
        require_numbers(self, "control_passes", 1, 64, 3)
        require_numbers(self, "decays", 1e-9, 1e3, 3)
        require_numbers(self, "epochs", 1, 1000, 1)
        require_positive(self, ("budgets",), MAX_POINTS)
        one = 1 in self.passes and 1 in self.control_passes
        require(one, "DataConstrainedGrid", "passes", self.passes, "with 1 among them: gains are over K = 1")
        inside = self.decay in self.decays
        require(inside, "DataConstrainedGrid", "decay", self.decay, f"one of decays {list(self.decays)}")


@dataclass(frozen=True)
class AblationGrid:
    """The optimizer ablation: each optimizer is tuned for the arm, then its ladder is compared with Muon's.

    `optimizers` maps names (or `module:factory`) to the learning rate at which tuning starts; `tuned` are the
    sweeps of stage 1. Tokens per parameter and the learning-rate exponent are fitted for each.
    """

    optimizers: tuple[tuple[str, float], ...] = (("adamw", 0.003),)
    optimizer_arm: str = "deep-vanilla"
    tuned: tuple[str, ...] = ("learning_rate", "weight_decay", "adam")

    def __post_init__(self) -> None:
        for name, rate in self.optimizers:
            if ":" not in name:
                OptimizerConfig.named(name)
            accepted = "with a learning rate that is positive and at most 1e9"
            require(0 < rate <= 1e9, "AblationGrid", "optimizers", (name, rate), accepted)
        ChainGrid(sweeps=self.tuned)  # rejects an unknown sweep
        object.__setattr__(self, "tuned", tuple(map(full_name, self.tuned)))
        first = self.tuned[:1] == ("learning_rate",)
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
