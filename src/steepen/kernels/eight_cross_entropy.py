"""Cross-entropy whose gradient is also written in eight bits."""

from __future__ import annotations

from torch import Tensor

from steepen.kernels.cross_entropy import launch
from steepen.kernels.eight_rows import room
from steepen.kernels.fp8 import LOGITS, RowwiseFp8


def cross_entropy_(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, RowwiseFp8]:
    """As `eager8.cross_entropy_`."""
    rows, vocabulary = logits.shape
    small, sizes = room(rows, vocabulary, LOGITS, logits.device)
    return launch(logits, targets, scale, softcap, (small, sizes)), RowwiseFp8(logits, small, sizes)
