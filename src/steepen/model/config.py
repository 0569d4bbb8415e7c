"""Model configuration apart from its size: multipliers, and options that the paper leaves open."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from steepen.utils.validate import require

FP32_EPSILON = 1.1920929e-07
StreamPrecision = Literal["bf16", "fp32"]


@dataclass(frozen=True)
class Multipliers:
    """Constant multipliers on weights, not trained (Appendix "Multipliers")."""

    residual: float = 1.0  # RM: attention-out and MLP-down
    output: float = 1.0  # OM: lm_head
    injection: float = 1.0  # α of the boundary operator

    def __post_init__(self) -> None:
        for name in ("residual", "output", "injection"):
            value = getattr(self, name)
            require(math.isfinite(value), "Multipliers", name, value, "a finite number")


@dataclass(frozen=True)
class ModelOptions:
    """Options that the paper does not state."""

    # Explicit because the embedding starts at a standard deviation of 0.005: an implicit eps would matter.
    norm_eps: float = FP32_EPSILON
    rope_base: float = 10_000.0
    qk_scale: float = 1.0  # on top of 1/sqrt(head_dim)
    softcap: float | None = None  # logits → softcap·tanh(logits/softcap)
    # Precision of the residual stream and its gradient where the GEMMs are in bf16 or fp8; the attention and
    # MLP branches are in bf16 either way.
    residual_stream: StreamPrecision = "bf16"

    def __post_init__(self) -> None:
        known = self.residual_stream in get_args(StreamPrecision)
        require(known, "ModelOptions", "residual_stream", self.residual_stream, "bf16 or fp32")
        for name, bound in (("norm_eps", 0), ("rope_base", 1), ("qk_scale", 0), ("softcap", 0)):
            value = getattr(self, name)
            valid = (value is None and name == "softcap") or (value is not None and bound < value < math.inf)
            require(valid, "ModelOptions", name, value, f"finite and greater than {bound}")
