"""Hyperparameters: the fourteen columns of the paper's base table, and how the arms differ in them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields

from steepen.model.config import Multipliers
from steepen.model.shape import require


@dataclass(frozen=True)
class Hyperparameters:
    """What is tuned. Names are the paper's, in lower case (Table "Base-tuned hyperparameters…")."""

    glr: float  # global learning rate: the matrices'
    elrm: float  # embedding learning rate = glr · elrm
    hlrm: float  # head learning rate = glr · hlrm
    rm: float  # residual multiplier
    om: float  # output multiplier
    alpha: float  # injection weight α; without effect where nothing is injected
    wd: float  # weight decay
    wte: float  # standard deviation of the embedding at the start
    uis: float  # scale of the input matrices at the start
    wu: int  # warm-up steps
    wdr: float  # share of steps in the warm-down
    beta1: float
    beta2: float
    eps: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            require(number, "Hyperparameters", field.name, value, "a finite number")
        for name in ("glr", "eps"):
            self._require(name, getattr(self, name) > 0, "positive")
        for name in ("elrm", "hlrm", "wd", "wte", "uis", "wu"):
            self._require(name, getattr(self, name) >= 0, "zero or positive")
        self._require("wu", int(self.wu) == self.wu, "a whole number of steps")
        self._require("wdr", 0 <= self.wdr <= 1, "a share in [0, 1]")
        for name in ("beta1", "beta2"):
            self._require(name, 0 <= getattr(self, name) < 1, "in [0, 1)")

    def _require(self, name: str, holds: bool, accepted: str) -> None:
        require(holds, "Hyperparameters", name, getattr(self, name), accepted)

    @property
    def multipliers(self) -> Multipliers:
        """The factors the network needs."""
        return Multipliers(residual=self.rm, output=self.om, injection=self.alpha)

    @property
    def embedding_lr(self) -> float:
        """Peak learning rate of the input embedding."""
        return self.glr * self.elrm

    @property
    def head_lr(self) -> float:
        """Peak learning rate of lm_head."""
        return self.glr * self.hlrm

    def to_dict(self) -> dict[str, float]:
        """Field by field."""
        return asdict(self)
