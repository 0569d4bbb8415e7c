"""Model configuration apart from its size: multipliers, and details of the network.

The defaults are what the paper's authors did, where that is known (docs/architectures.md has the table).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from steepen.errors import require

FP32_EPSILON = 1.1920929e-07
StreamPrecision = Literal["bf16", "fp32"]
FirstPass = Literal["prelude", "boundary"]
InitBound = Literal["width", "fan_in"]


@dataclass(frozen=True)
class Multipliers:
    """Constant multipliers on weights, not trained (Appendix "Multipliers")."""

    residual: float = 1.0  # RM: attention-out and MLP-down
    output: float = 1.0  # OM: lm_head
    injection: float = 1.0  # α of the boundary operator

    def __post_init__(self) -> None:
        for name in ("residual", "output", "injection"):
            value = getattr(self, name)
            require(abs(value) <= 1e9, "Multipliers", name, value, "from -1e9 to 1e9")


@dataclass(frozen=True)
class ModelOptions:
    """Details that the paper does not state, or that its authors did otherwise."""

    # Explicit because the embedding starts at a standard deviation of 0.005: an implicit eps would matter.
    norm_eps: float = FP32_EPSILON
    rope_base: float = 10_000.0
    qk_scale: float = 1.0  # on top of 1/sqrt(head_dim)
    softcap: float | None = None  # logits → softcap·tanh(logits/softcap)
    # Precision of the residual stream and its gradient where the GEMMs are in bf16 or fp8; the attention and
    # MLP branches are in bf16 either way.
    residual_stream: StreamPrecision = "fp32"
    # Input of the first core pass: e itself, or the boundary operator with h₀ = 0 (α·e if it injects).
    first_pass: FirstPass = "prelude"
    padded_softmax: bool = False  # whether ids that only pad the vocabulary get a logit
    # UIS is the bound of the uniform initialization times √width, or its standard deviation times √fan_in.
    init_bound: InitBound = "width"
    rope_table: StreamPrecision = "fp32"  # the authors round cosines and sines to bf16

    def __post_init__(self) -> None:
        for name, choices in (
            ("residual_stream", get_args(StreamPrecision)),
            ("first_pass", get_args(FirstPass)),
            ("init_bound", get_args(InitBound)),
            ("rope_table", get_args(StreamPrecision)),
        ):
            value = getattr(self, name)
            require(value in choices, "ModelOptions", name, value, " or ".join(choices))
        for name, bound in (("norm_eps", 0), ("rope_base", 1), ("qk_scale", 0), ("softcap", 0)):
            value = getattr(self, name)
            valid = (value is None and name == "softcap") or (value is not None and bound < value <= 1e12)
            require(valid, "ModelOptions", name, value, f"greater than {bound} and at most 1e12")
