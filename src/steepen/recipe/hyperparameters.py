"""Tuned hyperparameters: the fourteen columns of the paper's base table, and their codes (GLR, ELRM, …)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import ClassVar

from steepen.errors import require
from steepen.model.config import Multipliers

# The paper's codes: accepted wherever a hyperparameter is named, and shown beside its name.
PAPER_CODES: dict[str, str] = {
    "glr": "learning_rate",
    "elrm": "embedding_lr_multiplier",
    "hlrm": "head_lr_multiplier",
    "rm": "residual_multiplier",
    "om": "output_multiplier",
    "alpha": "injection_weight",
    "wd": "weight_decay",
    "wte": "embedding_init_std",
    "uis": "init_scale",
    "wu": "warmup_steps",
    "wdr": "warmdown_fraction",
    "eps": "adam_eps",
}


def full_name(name: str) -> str:
    """Field name of a hyperparameter from its name or the paper's code: GLR, glr → learning_rate."""
    return PAPER_CODES.get(name.lower(), name)


def paper_code(name: str) -> str | None:
    """The paper's code of a hyperparameter, in capitals: learning_rate → GLR; None if it has none."""
    return next((code.upper() for code, field in PAPER_CODES.items() if field == name), None)


def with_paper_code(name: str) -> str:
    """A hyperparameter's name with the paper's code: "learning_rate (GLR)"."""
    code = paper_code(name)
    return f"{name} ({code})" if code else name


@dataclass(frozen=True)
class Hyperparameters:
    """Tuned hyperparameters (Table "Base-tuned hyperparameters…"); a comment gives the paper's code."""

    learning_rate: float  # GLR: of the block matrices
    embedding_lr_multiplier: float  # ELRM: embedding learning rate ÷ learning_rate
    head_lr_multiplier: float  # HLRM: head learning rate ÷ learning_rate
    residual_multiplier: float  # RM: on attention-out and MLP-down
    output_multiplier: float  # OM: on the logits
    injection_weight: float  # α of the boundary operator; no effect where nothing is injected
    weight_decay: float  # WD
    embedding_init_std: float  # WTE: standard deviation
    init_scale: float  # UIS: of the matrices that read the residual stream
    warmup_steps: int  # WU
    warmdown_fraction: float  # WDR: fraction of the steps
    beta1: float
    beta2: float
    adam_eps: float
    ALIASES: ClassVar[Mapping[str, str]] = PAPER_CODES

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            require(number, "Hyperparameters", field.name, value, "a finite number")
            require(abs(value) <= 1e9, "Hyperparameters", field.name, value, "at most 1e9 in magnitude")
        for name in ("learning_rate", "adam_eps"):
            self._require(name, getattr(self, name) > 0, "positive")
        for name in (
            "embedding_lr_multiplier",
            "head_lr_multiplier",
            "weight_decay",
            "embedding_init_std",
            "init_scale",
            "warmup_steps",
        ):
            self._require(name, getattr(self, name) >= 0, "zero or positive")
        self._require("warmup_steps", int(self.warmup_steps) == self.warmup_steps, "a whole number of steps")
        self._require("warmdown_fraction", 0 <= self.warmdown_fraction <= 1, "a fraction in [0, 1]")
        for name in ("beta1", "beta2"):
            self._require(name, 0 <= getattr(self, name) < 1, "in [0, 1)")

    def _require(self, name: str, holds: bool, accepted: str) -> None:
        require(holds, "Hyperparameters", name, getattr(self, name), accepted)

    @property
    def multipliers(self) -> Multipliers:
        """The multipliers of the network's forward pass."""
        return Multipliers(
            residual=self.residual_multiplier, output=self.output_multiplier, injection=self.injection_weight
        )

    @property
    def embedding_lr(self) -> float:
        """Peak learning rate of the input embedding."""
        return self.learning_rate * self.embedding_lr_multiplier

    @property
    def head_lr(self) -> float:
        """Peak learning rate of lm_head."""
        return self.learning_rate * self.head_lr_multiplier

    def to_dict(self) -> dict[str, float]:
        """Values by field name."""
        return asdict(self)
