"""The kernels' plain twins: what each computes, in torch's own operations, in any precision."""

from __future__ import annotations
