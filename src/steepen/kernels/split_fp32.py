"""A matrix in fp32 stored as its rounding to bf16, which GEMMs read, and what the rounding left."""

# Triton kernels are untyped.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from steepen.kernels.triton_backend import tl, triton


@dataclass(frozen=True)
class SplitFp32:
    """An fp32 matrix, of which GEMMs read the rounding to bf16: `halves` is (2, rows, width) in bf16.

    The first half is the value rounded to bf16 (ties away from zero). The second holds, as int16, what is to
    be added to the first half's bits, followed by 16 zeros, to give all 32 bits. So nothing is lost, and the
    rounded copy takes no memory and no pass of its own. NaN is NaN in both.
    """

    halves: Tensor

    @property
    def rounded(self) -> Tensor:
        """The matrix in bf16."""
        return self.halves.select(0, 0)

    @property
    def storage(self) -> Tensor:
        """The same memory as an fp32 tensor (rows, width), whose elements mean nothing."""
        return self.halves.view(-1).view(torch.float32).view(self.halves.shape[1:])

    @staticmethod
    def empty(rows: int, width: int, device: torch.device) -> SplitFp32:
        """An uninitialized matrix."""
        return SplitFp32(torch.empty(2, rows, width, dtype=torch.bfloat16, device=device))

    @staticmethod
    def split(x: Tensor) -> SplitFp32:
        """Split an fp32 matrix."""
        bits = torch.where(x.isnan(), torch.nan, x).view(torch.int32)
        high = (bits + (1 << 15)) >> 16
        halves = torch.stack([high, bits - (high << 16)]).to(torch.int16)
        return SplitFp32(halves.view(torch.bfloat16))

    def join(self) -> Tensor:
        """The fp32 matrix."""
        high, low = self.halves.view(torch.int16).int()
        return ((high << 16) + low).view(torch.float32)


def joined(x: Tensor | SplitFp32) -> Tensor:
    """The matrix as a tensor."""
    return x.join() if isinstance(x, SplitFp32) else x


QUIET_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def load_split(pointer, offset, half, mask):
    """fp32 values of a `SplitFp32` at a pointer to int16, whose halves have `half` elements."""
    high = tl.load(pointer + offset, mask=mask, other=0).to(tl.int32)
    low = tl.load(pointer + half + offset, mask=mask, other=0).to(tl.int32)
    return ((high << 16) + low).to(tl.float32, bitcast=True)


@triton.jit
def store_split(pointer, x, offset, half, mask):
    """Store fp32 values as a `SplitFp32`."""
    is_nan = x != x  # noqa: PLR0124
    bits = tl.where(is_nan, QUIET_NAN, x.to(tl.int32, bitcast=True))  # another NaN might round to a number
    high = (bits + 32768) >> 16
    tl.store(pointer + offset, high.to(tl.int16), mask=mask)
    tl.store(pointer + half + offset, (bits - (high << 16)).to(tl.int16), mask=mask)
