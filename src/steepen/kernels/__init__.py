"""The few operations worth a kernel of their own, each twice: plain torch, and Triton for a GPU.

`eager` and `fused` hold functions of the same names that compute the same; `eager8` and `fused8` those that
also round to eight bits what a product takes. `kernels_for` chooses.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from steepen.kernels import eager, eager8


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether this is a GPU that Triton compiles bf16 for, and Triton is here (torch for CUDA brings it)."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def kernels_for(x: Tensor, *, eight: bool = False) -> ModuleType:
    """The implementation for tensors like x: Triton on a GPU that has it, plain torch elsewhere.

    With `eight`, the one whose products are in eight bits: what they take is a `Twice`.
    """
    if has_kernels(x.device):
        return importlib.import_module("steepen.kernels.fused8" if eight else "steepen.kernels.fused")
    return eager8 if eight else eager
