"""The Triton kernels, under the names their plain twins have in `eager`."""

from __future__ import annotations

from steepen.kernels.symmetric import gram, symmetric_polynomial

__all__ = ["gram", "symmetric_polynomial"]
