"""A matrix in eight bits, with a scale for each row, beside what it was rounded from; and one yet to be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ACTIVATION = torch.float8_e4m3fn  # four bits of precision, up to 448; weights too
GRADIENT = torch.float8_e4m3fn  # each row has a scale of its own, so bits serve better than range
LOGITS = torch.float8_e5m2  # for the gradient of logits: three bits, a range that holds a softmax's tails
TINY = 1e-30  # the least a row's largest number counts for, so that a row of zeros has a scale


@dataclass(frozen=True)
class RowwiseFp8:
    """`small` times `scale` (a column, fp32) is `exact`, rounded; None where no one needs the exact one."""

    exact: Tensor | None
    small: Tensor
    scale: Tensor

    def __getitem__(self, rows: slice) -> RowwiseFp8:
        """Some of the rows."""
        return RowwiseFp8(
            None if self.exact is None else self.exact[rows], self.small[rows], self.scale[rows]
        )


@dataclass(frozen=True)
class TensorwisePending:
    """A matrix yet to be rounded to eight bits, and the one scale (fp32, no dimensions) that fits it."""

    exact: Tensor
    size: Tensor


def exact(x: Tensor | RowwiseFp8 | TensorwisePending) -> Tensor:
    """The matrix before it was rounded to eight bits, where it was."""
    if isinstance(x, Tensor):
        return x
    assert x.exact is not None, "this matrix was kept in eight bits only"
    return x.exact


def most(dtype: torch.dtype) -> float:
    """The largest number of a type."""
    return torch.finfo(dtype).max
