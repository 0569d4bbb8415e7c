"""The Triton kernels, under the names their plain twins have in `eager`."""

from __future__ import annotations

from steepen.kernels.cross_entropy import cross_entropy_
from steepen.kernels.eager import normed, quantise_activation, quantise_gradient, size_of, whole
from steepen.kernels.fused_linear_cross_entropy import has_odds, odds
from steepen.kernels.gram import gram, symmetric_polynomial
from steepen.kernels.muon_update import decay_and_add, momentum_into, normalised
from steepen.kernels.norm import (
    add_rms_norm,
    embed_norm,
    embed_norm_backward_,
    norm_inject,
    norm_inject_backward,
    rms_norm,
    rms_norm_backward,
)
from steepen.kernels.rotary import rotate_norm_, rotate_norm_backward
from steepen.kernels.swiglu import swiglu, swiglu_backward_

__all__ = [
    "add_rms_norm",
    "cross_entropy_",
    "decay_and_add",
    "embed_norm",
    "embed_norm_backward_",
    "gram",
    "has_odds",
    "momentum_into",
    "norm_inject",
    "norm_inject_backward",
    "normalised",
    "normed",
    "odds",
    "quantise_activation",
    "quantise_gradient",
    "rms_norm",
    "rms_norm_backward",
    "rotate_norm_",
    "rotate_norm_backward",
    "size_of",
    "swiglu",
    "swiglu_backward_",
    "symmetric_polynomial",
    "whole",
]
