"""The Triton kernels, under the names their plain twins have in `eager`."""

from __future__ import annotations

from steepen.kernels.momentum import decay_and_add, momentum_into
from steepen.kernels.symmetric import gram, symmetric_polynomial

__all__ = ["decay_and_add", "gram", "momentum_into", "symmetric_polynomial"]
