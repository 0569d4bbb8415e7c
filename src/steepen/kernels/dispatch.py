"""The kernels for a device and precision: Triton on a GPU that has it, the torch reference elsewhere.

An operation has both forms in its module, under one name (`swiglu_reference`, `swiglu_triton`); here they
are found by that name. Callers see one signature per operation, with or without quantized outputs, so that
the fused forward and backward are written once for bf16 and fp8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from steepen.kernels import (
    cross_entropy,
    fp8,
    fused_linear_cross_entropy,
    gram,
    muon_update,
    norm,
    rotary,
    swiglu,
)
from steepen.kernels.fp8 import DeferredFp8, RowwiseFp8, TransposedFp8
from steepen.kernels.fused_linear_cross_entropy import LogitGradient
from steepen.kernels.split_fp32 import SplitFp32
from steepen.kernels.triton_backend import has_triton_kernels

MODULES = (norm, rotary, swiglu, cross_entropy, fused_linear_cross_entropy, gram, muon_update, fp8)
Form = Literal["reference", "triton"]

GemmOperand = Tensor | RowwiseFp8  # of a forward or dgrad GEMM
WgradOperand = Tensor | RowwiseFp8 | DeferredFp8 | TransposedFp8


@dataclass(frozen=True)
class Kernels:
    """Operations in the compute dtype; those with a trailing underscore overwrite their first argument.

    Each is the function of that name and a form in its module: `swiglu` is `swiglu.swiglu_reference` or
    `swiglu.swiglu_triton`, which say what it takes.
    """

    rms_norm: Callable[..., tuple[Tensor, Tensor]]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor, Tensor]]
    rms_norm_backward: Callable[..., Tensor]
    rms_norm_backward_split: Callable[..., tuple[Tensor | SplitFp32, Tensor]]
    norm_inject: Callable[[Tensor, Tensor, float, float], tuple[Tensor, Tensor]]
    norm_inject_backward: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    inject_norm: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    inject_norm_backward: Callable[..., tuple[Tensor | SplitFp32, Tensor, Tensor]]
    embed_norm: Callable[[Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor]]
    embed_norm_backward_: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    rotate_norm_: Callable[[Tensor, Tensor, float, int], Tensor]
    rotate_norm_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    swiglu_backward_: Callable[[Tensor, Tensor], Tensor]
    cross_entropy_: Callable[..., tuple[Tensor, Tensor]]
    supports_fused_linear_cross_entropy: Callable[[Tensor, Tensor], bool]
    fused_linear_cross_entropy: Callable[..., tuple[Tensor, LogitGradient | None]]
    gram: Callable[..., Tensor]
    symmetric_polynomial: Callable[..., Tensor]
    update_momentum: Callable[..., None]
    frobenius_normalize: Callable[[Tensor, float, float], Tensor]
    scale_matrices_: Callable[[Tensor, Tensor], None]
    apply_update: Callable[..., None]


@dataclass(frozen=True)
class BlockKernels:
    """The operations of a block whose results are GEMM operands: in the compute dtype, or quantized to fp8.

    `rms_norm_backward` returns the gradient of the residual stream and the operand made of it.
    `wgrad_scale`, `wgrad_activation` and `wgrad_normed` prepare saved activations for a wgrad GEMM: the scale
    is saved in the forward pass, the operand is made from it in the backward pass.
    """

    rms_norm: Callable[..., tuple[GemmOperand, Tensor]]
    add_rms_norm: Callable[..., tuple[Tensor, GemmOperand, Tensor]]
    rms_norm_backward: Callable[..., tuple[Tensor | SplitFp32, GemmOperand]]
    rotate_norm_: Callable[[Tensor, Tensor, float, int], Tensor]
    rotate_norm_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], GemmOperand]
    swiglu: Callable[[Tensor], GemmOperand]
    swiglu_backward_: Callable[[Tensor, Tensor], GemmOperand]
    quantize_activation: Callable[[Tensor], GemmOperand]
    quantize_gradient: Callable[[Tensor], GemmOperand]
    wgrad_scale: Callable[..., Tensor | None]  # of the operand that `quantize_activation` returned
    wgrad_activation: Callable[..., WgradOperand]
    wgrad_normed: Callable[[Tensor], WgradOperand]


@dataclass(frozen=True)
class Fp8GemmKernels:
    """Weight quantization, fp8 GEMMs, and the loss between those of the head."""

    quantize_weight_: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    gemm: Callable[..., Tensor]
    tensor_scale: Callable[[RowwiseFp8], Tensor]
    transpose_quantize: Callable[[RowwiseFp8 | DeferredFp8, Tensor], Tensor]
    wgrad_gemm: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    cross_entropy: Callable[..., tuple[Tensor, RowwiseFp8]]


def _operation(name: str, form: Form) -> Any:
    """The function of an operation: of `cross_entropy_`, cross_entropy_triton_ in the form "triton"."""
    own = f"{name.removesuffix('_')}_{form}{'_' * name.endswith('_')}"
    return next(vars(module)[own] for module in MODULES if own in vars(module))


def _kernels(form: Form) -> Kernels:
    return Kernels(**{field.name: _operation(field.name, form) for field in fields(Kernels)})


REFERENCE, TRITON = _kernels("reference"), _kernels("triton")


# Without quantization, GEMM operands are the tensors themselves and have no scale.
def _unchanged(x: Tensor) -> Tensor:
    return x


def _no_scale(x: Tensor) -> None:
    del x


def _ignore_scale(x: Tensor, scale: None) -> Tensor:
    del scale
    return x


def without_quantization(kernels: Kernels) -> BlockKernels:
    """Block kernels whose GEMM operands stay in the compute dtype."""
    return BlockKernels(
        rms_norm=kernels.rms_norm,
        add_rms_norm=kernels.add_rms_norm,
        rms_norm_backward=kernels.rms_norm_backward_split,
        rotate_norm_=kernels.rotate_norm_,
        rotate_norm_backward=kernels.rotate_norm_backward,
        swiglu=kernels.swiglu,
        swiglu_backward_=kernels.swiglu_backward_,
        quantize_activation=_unchanged,
        quantize_gradient=_unchanged,
        wgrad_scale=_no_scale,
        wgrad_activation=_ignore_scale,
        wgrad_normed=_unchanged,
    )


REFERENCE_BLOCK, TRITON_BLOCK = without_quantization(REFERENCE), without_quantization(TRITON)


def _fp8_block(form: Form) -> BlockKernels:
    return BlockKernels(
        rms_norm=_operation("rms_norm_fp8", form),
        add_rms_norm=_operation("add_rms_norm_fp8", form),
        rms_norm_backward=_operation("rms_norm_backward_fp8", form),
        rotate_norm_=_operation("rotate_norm_", form),
        rotate_norm_backward=_operation("rotate_norm_backward_fp8", form),
        swiglu=_operation("swiglu_fp8", form),
        swiglu_backward_=_operation("swiglu_backward_fp8", form),
        quantize_activation=_operation("quantize_activation", form),
        quantize_gradient=_operation("quantize_gradient", form),
        wgrad_scale=_operation("tensor_scale", form),
        wgrad_activation=fp8.defer_quantization,
        wgrad_normed=fp8.defer_quantization_of_norm,
    )


REFERENCE_FP8_BLOCK, TRITON_FP8_BLOCK = _fp8_block("reference"), _fp8_block("triton")

REFERENCE_FP8_GEMM = Fp8GemmKernels(
    quantize_weight_=fp8.quantize_weight_reference_,
    gemm=fp8.fp8_gemm_reference,
    tensor_scale=fp8.tensor_scale_reference,
    transpose_quantize=fp8.transpose_quantize_reference,
    wgrad_gemm=fp8.fp8_wgrad_gemm_reference,
    cross_entropy=cross_entropy.cross_entropy_fp8_reference,
)

TRITON_FP8_GEMM = Fp8GemmKernels(
    quantize_weight_=fp8.quantize_weight_triton_,
    gemm=fp8.fp8_gemm_cublas,
    tensor_scale=fp8.tensor_scale_triton,
    transpose_quantize=fp8.transpose_quantize_triton,
    wgrad_gemm=fp8.fp8_wgrad_gemm_cublas,
    cross_entropy=cross_entropy.cross_entropy_fp8_triton,
)


def kernels_for(x: Tensor) -> Kernels:
    """The kernels in the compute dtype for tensors on x's device."""
    return TRITON if has_triton_kernels(x.device) else REFERENCE


def block_kernels_for(x: Tensor, *, fp8: bool) -> BlockKernels:
    """The kernels of a block for tensors on x's device; with `fp8` their GEMM operands are quantized."""
    if has_triton_kernels(x.device):
        return TRITON_FP8_BLOCK if fp8 else TRITON_BLOCK
    return REFERENCE_FP8_BLOCK if fp8 else REFERENCE_BLOCK


def fp8_gemm_kernels_for(x: Tensor) -> Fp8GemmKernels:
    """The fp8 GEMM kernels for tensors on x's device."""
    return TRITON_FP8_GEMM if has_triton_kernels(x.device) else REFERENCE_FP8_GEMM
