"""Tuned hyperparameters: the fourteen columns of the paper's base table, and their codes (GLR, ELRM, …)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar, TypeAlias

from steepen.model.config import Multiplier, Multipliers
from steepen.utils.codec import Checked, Range
from steepen.utils.values import Decay, Fraction

Positive: TypeAlias = Annotated[float, Range(0, 1e9, above=True)]
NotNegative: TypeAlias = Annotated[float, Range(0, 1e9)]

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
class Hyperparameters(Checked):
    """Tuned hyperparameters (Table "Base-tuned hyperparameters…"); a comment gives the paper's code."""

    learning_rate: Positive  # GLR: of the block matrices
    embedding_lr_multiplier: NotNegative  # ELRM: embedding learning rate ÷ learning_rate
    head_lr_multiplier: NotNegative  # HLRM: head learning rate ÷ learning_rate
    residual_multiplier: Multiplier  # RM: on attention-out and MLP-down
    output_multiplier: Multiplier  # OM: on the logits
    injection_weight: Multiplier  # α of the boundary operator; no effect where nothing is injected
    weight_decay: NotNegative  # WD
    embedding_init_std: NotNegative  # WTE: standard deviation
    init_scale: NotNegative  # UIS: of the matrices that read the residual stream
    warmup_steps: Annotated[int, Range(0, 10**9)]  # WU
    warmdown_fraction: Fraction  # WDR: fraction of the steps
    beta1: Decay
    beta2: Decay
    adam_eps: Positive
    ALIASES: ClassVar[Mapping[str, str]] = PAPER_CODES

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
