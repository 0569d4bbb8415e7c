"""The Triton kernels, under the names their plain twins have in `eager`."""

from __future__ import annotations
