"""Configuration of the optimizer, without torch: a run spec holds it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from steepen.errors import MAX_WHOLE, UsageError, nearest
from steepen.utils.codec import Checked, Range
from steepen.utils.imports import object_name
from steepen.utils.values import Count, Decay

if TYPE_CHECKING:
    from collections.abc import Callable

Orthogonalization = Literal["newton-schulz", "polar-express"]
# Optimizer state of cores that growth adds. Specs store these values, so their names stay:
# "copy": all state of the core they are a copy of; "zero": momentum zero, second moment copied;
# "fresh": no state, as before a parameter's first step.
GrowthState = Literal["copy", "zero", "fresh"]
VarianceReduction = Literal["none", "row", "row-or-column"]
CautiousDecay = Literal["none", "matrices", "all"]
EmbeddingPrecision = Literal["fp32", "bf16"]

# Built-in optimizers of the block matrices, with the bytes of state they keep per fp32 parameter.
STATE_BYTES: dict[str, int] = {"muon": 4, "adamw": 8}
CUSTOM_STATE_BYTES = 8  # assumed of a custom optimizer: two fp32 moments


class OptimizerHyperparameters(Protocol):
    """Hyperparameters used by optimizers; `steepen.recipe.hyperparameters` has all of a recipe's."""

    @property
    def learning_rate(self) -> float:
        """Peak learning rate of the block matrices and vectors."""
        ...

    @property
    def embedding_lr(self) -> float:
        """Peak learning rate of the input embedding."""
        ...

    @property
    def head_lr(self) -> float:
        """Peak learning rate of lm_head."""
        ...

    @property
    def weight_decay(self) -> float:
        """Decoupled weight decay, multiplied by the learning rate."""
        ...

    @property
    def beta1(self) -> float:
        """AdamW's decay of the first moment."""
        ...

    @property
    def beta2(self) -> float:
        """AdamW's decay of the second moment."""
        ...

    @property
    def adam_eps(self) -> float:
        """AdamW's epsilon."""
        ...


@dataclass(frozen=True)
class OptimizerConfig(Checked):
    """Which optimizer steps the block matrices, and settings of it that the paper leaves open.

    The defaults are the optimizer of the paper's authors; the paper only says "Muon". `kind` is "muon",
    "adamw" (block matrices too: the paper's Adam ladders), or a custom optimizer: the "module:attribute" of a
    factory, or the factory itself (see `steepen.optim.custom_optimizer`). `named` returns whole
    configurations: the authors' optimizer, plain Muon, NorMuon, AdamW.
    """

    kind: str = "muon"
    momentum: Decay = 0.95
    momentum_start: Decay | None = 0.85  # rise linearly from here to `momentum`; None: constant
    momentum_warmup_steps: Count = 300
    nesterov: bool = True
    row_normalize: bool = True  # divide each row of the update direction by its norm (MuonEq-R)
    orthogonalization: Orthogonalization = "polar-express"
    orthogonalization_steps: Annotated[int, Range(1, 1000)] = 5
    # NorMuon: divide the orthogonalized update by its running RMS, keeping the matrix's Frobenius norm; per
    # row, or ("row-or-column") per row where rows ≥ columns and else per column.
    variance_reduction: VarianceReduction = "row-or-column"
    variance_beta2: Decay = 0.95
    cautious_decay: CautiousDecay = "matrices"  # decay a weight only where the update already shrinks it
    shape_scaled_decay: bool = True  # Muon: decay at lr·max(1, rows/columns)^½, as the update, instead of lr
    # Gradient norm to clip at; off in the paper.
    clip: Annotated[float, Range(0, 1e9, above=True)] | None = None
    growth_state: GrowthState = "fresh"  # optimizer state of the cores that growth adds
    # "bf16": weight, gradient and moments of the embedding are rounded to bf16, as the authors store them.
    embedding_precision: EmbeddingPrecision = "fp32"

    if TYPE_CHECKING:

        def __init__(
            self,
            kind: str | Callable[..., Any] = "muon",
            momentum: float = 0.95,
            momentum_start: float | None = 0.85,
            momentum_warmup_steps: int = 300,
            nesterov: bool = True,
            row_normalize: bool = True,
            orthogonalization: Orthogonalization = "polar-express",
            orthogonalization_steps: int = 5,
            variance_reduction: VarianceReduction = "row-or-column",
            variance_beta2: float = 0.95,
            cautious_decay: CautiousDecay = "matrices",
            shape_scaled_decay: bool = True,
            clip: float | None = None,
            growth_state: GrowthState = "fresh",
            embedding_precision: EmbeddingPrecision = "fp32",
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", object_name(self.kind, "optimizer"))
        super().__post_init__()
        if self.kind not in STATE_BYTES and not self.is_custom:
            raise UsageError(
                f"optimizer.kind = {self.kind!r} is not known: use {nearest(self.kind, STATE_BYTES)}, "
                'or "module:attribute" for a custom optimizer.'
            )

    @staticmethod
    def find(name: str) -> OptimizerConfig:
        """A configuration by name, or a custom optimizer by `module:factory`."""
        return OptimizerConfig(kind=name) if ":" in name else OptimizerConfig.named(name)

    @staticmethod
    def named(name: str) -> OptimizerConfig:
        """A configuration by name: "authors", "muon", "normuon" or "adamw"."""
        if name not in OPTIMIZERS:
            raise UsageError(f"the optimizer {name!r} is not known: use {nearest(name, OPTIMIZERS)}.")
        return OPTIMIZERS[name]

    def momentum_at(self, step: int) -> float:
        """Muon's momentum coefficient at a step, counted from 0."""
        if self.momentum_start is None:
            return self.momentum
        progress = min(step / self.momentum_warmup_steps, 1.0)
        return self.momentum_start + (self.momentum - self.momentum_start) * progress

    @property
    def is_custom(self) -> bool:
        """Whether `kind` names a factory outside this package."""
        return ":" in self.kind

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state per parameter of a block matrix, for memory estimates."""
        return STATE_BYTES.get(self.kind, CUSTOM_STATE_BYTES)


# Momentum 0.95 from the first step, Newton–Schulz, plain decay at lr·wd, growth that copies state.
MUON = OptimizerConfig(
    momentum_start=None,
    row_normalize=False,
    orthogonalization="newton-schulz",
    variance_reduction="none",
    cautious_decay="none",
    shape_scaled_decay=False,
    growth_state="copy",
)
OPTIMIZERS: dict[str, OptimizerConfig] = {
    "authors": OptimizerConfig(),  # the default
    "muon": MUON,
    "normuon": replace(MUON, variance_reduction="row"),
    "adamw": replace(MUON, kind="adamw"),
}


ScheduleName = Literal["wsd", "linear", "cosine"]


@dataclass(frozen=True)
class LRScheduleConfig(Checked):
    """Form of the learning rate; warm-up and warm-down lengths are tuned hyperparameters.

    `name`: "wsd" (warm-up, stable, decay) is constant until its linear warm-down; "linear" and "cosine" fall
    from the end of the warm-up to the last step, whatever the recipe's warm-down.

    The defaults are those of the paper's authors. With `decay_to_zero` the warm-down falls from exactly 1 at
    its first step to exactly 0 at the last step; without, the last step has 1/(warm-down steps) of the peak.
    For `rewarm_steps` steps from growth on, every rate is multiplied by (steps since growth)/rewarm_steps.
    """

    decay_to_zero: bool = True
    rewarm_steps: Annotated[int, Range(0, MAX_WHOLE)] = 40
    name: ScheduleName = "wsd"
