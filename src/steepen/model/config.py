"""Model configuration apart from its size: multipliers, and details of the network.

The defaults are what the paper's authors did, where that is known (docs/architectures.md has the table).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from steepen.utils.codec import Checked, Range

FP32_EPSILON = 1.1920929e-07
StreamPrecision = Literal["bf16", "fp32"]
FirstPass = Literal["prelude", "boundary"]
InitBound = Literal["width", "fan_in"]
Multiplier: TypeAlias = Annotated[float, Range(-1e9, 1e9)]
Positive: TypeAlias = Annotated[float, Range(0, 1e12, above=True)]


@dataclass(frozen=True)
class Multipliers(Checked):
    """Constant multipliers on weights, not trained (Appendix "Multipliers")."""

    residual: Multiplier = 1.0  # RM: attention-out and MLP-down
    output: Multiplier = 1.0  # OM: lm_head
    injection: Multiplier = 1.0  # α of the boundary operator


@dataclass(frozen=True)
class ModelOptions(Checked):
    """Details that the paper does not state, or that its authors did otherwise."""

    # Explicit because the embedding starts at a standard deviation of 0.005: an implicit eps would matter.
    norm_eps: Positive = FP32_EPSILON
    rope_base: Annotated[float, Range(1, 1e12, above=True)] = 10_000.0
    qk_scale: Positive = 1.0  # on top of 1/sqrt(head_dim)
    softcap: Positive | None = None  # logits → softcap·tanh(logits/softcap)
    # Precision of the residual stream and its gradient where the GEMMs are in bf16 or fp8; the attention and
    # MLP branches are in bf16 either way.
    residual_stream: StreamPrecision = "fp32"
    # Input of the first core pass: e itself, or the boundary operator with h₀ = 0 (α·e if it injects).
    first_pass: FirstPass = "prelude"
    padded_softmax: bool = False  # whether ids that only pad the vocabulary get a logit
    # UIS is the bound of the uniform initialization times √width, or its standard deviation times √fan_in.
    init_bound: InitBound = "width"
    rope_table: StreamPrecision = "fp32"  # the authors round cosines and sines to bf16
