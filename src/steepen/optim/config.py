"""Configuration of the optimizer, without torch: a run spec holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from steepen.errors import UsageError, nearest
from steepen.utils.imports import object_name
from steepen.utils.validate import require, require_positive

if TYPE_CHECKING:
    from collections.abc import Callable

Orthogonalisation = Literal["newton-schulz", "polar-express"]
GrowthState = Literal["copy", "zero", "fresh"]

# Built-in optimizers of the block matrices, with the bytes of state they keep per fp32 parameter.
STATE_BYTES: dict[str, int] = {"muon": 4, "adamw": 8}
CUSTOM_STATE_BYTES = 8  # assumed of a custom optimizer: two fp32 moments


class OptimizerHyperparameters(Protocol):
    """The tuned numbers that an optimizer reads; `steepen.recipe.hyperparameters` has all of a recipe's."""

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
class OptimizerConfig:
    """Which optimizer steps the block matrices, and settings of it that the paper leaves open.

    `kind` is "muon", "adamw" (block matrices too: the paper's Adam ladders), or a custom optimizer: the
    "module:attribute" of a factory, or the factory itself (see `steepen.optim.custom`).
    """

    kind: str = "muon"
    momentum: float = 0.95
    nesterov: bool = True
    orthogonalisation: Orthogonalisation = "newton-schulz"
    orthogonalisation_steps: int = 5
    neuron_norm: bool = False  # NorMuon: divide each row of the update by its running RMS
    neuron_beta2: float = 0.95
    cautious_decay: bool = False  # decay a weight only where the update already shrinks it
    clip: float | None = None  # gradient norm to clip at; off in the paper
    growth_state: GrowthState = "copy"  # optimizer state of the cores that growth adds

    if TYPE_CHECKING:

        def __init__(
            self,
            kind: str | Callable[..., Any] = "muon",
            momentum: float = 0.95,
            nesterov: bool = True,
            orthogonalisation: Orthogonalisation = "newton-schulz",
            orthogonalisation_steps: int = 5,
            neuron_norm: bool = False,
            neuron_beta2: float = 0.95,
            cautious_decay: bool = False,
            clip: float | None = None,
            growth_state: GrowthState = "copy",
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", object_name(self.kind, "optimizer"))
        if self.kind not in STATE_BYTES and not self.is_custom:
            raise UsageError(
                f"optimizer.kind = {self.kind!r} is not known: use {nearest(self.kind, STATE_BYTES)}, "
                'or "module:attribute" for a custom optimizer.'
            )
        for name in ("momentum", "neuron_beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, "optimizer", name, value, "in [0, 1)")
        require_positive(self, ("orthogonalisation_steps",))
        require(self.clip is None or self.clip > 0, "optimizer", "clip", self.clip, "positive or null")

    @property
    def is_custom(self) -> bool:
        """Whether `kind` names a factory outside this package."""
        return ":" in self.kind

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state per parameter of a block matrix, for memory estimates."""
        return STATE_BYTES.get(self.kind, CUSTOM_STATE_BYTES)
