"""RMSNorm and its way back, whose results are also written in eight bits for the product that takes them."""

# A launch takes options that the kernel's signature does not have.
# pyright: basic, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
from torch import Tensor

from steepen.kernels.eight_rows import room
from steepen.kernels.fp8 import ACTIVATION, GRADIENT, RowwiseFp8, most
from steepen.kernels.norm import rms_norm_backward_kernel, rms_norm_kernel
from steepen.kernels.row_launch import grid, tile


def _norm(x: Tensor, y: Tensor | None, eps: float) -> tuple[Tensor, RowwiseFp8, Tensor]:
    rows, width = x.shape
    total = x if y is None else torch.empty_like(x)
    n, rstd = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    small, scale = room(rows, width, ACTIVATION, x.device)
    size = tile(width)
    rms_norm_kernel[grid(rows, size)](
        x, x if y is None else y, total, n, rstd, small, scale, rows, width, eps,
        ADD=y is not None, MOST=most(ACTIVATION), **size,
    )  # fmt: skip
    return total, RowwiseFp8(n, small, scale), rstd


def rms_norm(x: Tensor, eps: float) -> tuple[RowwiseFp8, Tensor]:
    """As `eager8.rms_norm`."""
    return _norm(x, None, eps)[1:]


def add_rms_norm(x: Tensor, y: Tensor, eps: float) -> tuple[Tensor, RowwiseFp8, Tensor]:
    """As `eager8.add_rms_norm`."""
    return _norm(x, y, eps)


def rms_norm_backward(dn: Tensor, n: Tensor, rstd: Tensor, skip: Tensor | None = None) -> RowwiseFp8:
    """As `eager8.rms_norm_backward`."""
    rows, width = dn.shape
    dx = torch.empty_like(dn)
    small, scale = room(rows, width, GRADIENT, dn.device)
    size = tile(width)
    rms_norm_backward_kernel[grid(rows, size)](
        dn, n, rstd, dn if skip is None else skip, rstd, dx, small, scale, rows, width,
        SKIP=skip is not None, FACTOR=False, MOST=most(GRADIENT), **size,
    )  # fmt: skip
    return RowwiseFp8(dx, small, scale)
