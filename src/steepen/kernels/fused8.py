"""The Triton kernels that also round to eight bits, under the names their plain twins have in `eager8`."""

from __future__ import annotations

from steepen.kernels.eager8 import normed, size_of, whole
from steepen.kernels.eight_cross_entropy import cross_entropy_
from steepen.kernels.eight_norm import add_rms_norm, rms_norm, rms_norm_backward
from steepen.kernels.eight_rotary import rotate_norm_backward
from steepen.kernels.eight_rows import quantise_activation, quantise_gradient
from steepen.kernels.eight_swiglu import swiglu, swiglu_backward_
from steepen.kernels.eight_turn import multiply_turned, turn
from steepen.kernels.eight_weight import multiply, quantise_weight_
from steepen.kernels.rotary import rotate_norm_

__all__ = [
    "add_rms_norm",
    "cross_entropy_",
    "multiply",
    "multiply_turned",
    "normed",
    "quantise_activation",
    "quantise_gradient",
    "quantise_weight_",
    "rms_norm",
    "rms_norm_backward",
    "rotate_norm_",
    "rotate_norm_backward",
    "size_of",
    "swiglu",
    "swiglu_backward_",
    "turn",
    "whole",
]
