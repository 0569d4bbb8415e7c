"""The few operations worth a kernel of their own, each twice: plain torch, and Triton for a GPU.

`eager` and `fused` hold functions of the same names that compute the same; `kernels_for` chooses.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

from torch import Tensor

from steepen.kernels import eager


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed (CUDA builds of torch bring it)."""
    return importlib.util.find_spec("triton") is not None


def kernels_for(x: Tensor) -> ModuleType:
    """The implementation for tensors like x: Triton on a GPU that has it, plain torch elsewhere."""
    if x.is_cuda and has_triton():
        return importlib.import_module("steepen.kernels.fused")
    return eager
