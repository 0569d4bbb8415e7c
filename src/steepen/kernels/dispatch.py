"""The kernels for a device and precision: Triton on a GPU that has it, the torch reference elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from steepen.kernels import cross_entropy, fp8, gram, muon_update, norm, rotary, swiglu
from steepen.kernels import fused_linear_cross_entropy as linear_cross_entropy
from steepen.kernels.fp8 import DeferredFp8, RowwiseFp8
from steepen.kernels.fused_linear_cross_entropy import LogitGradient
from steepen.kernels.triton_backend import has_triton_kernels

GemmOperand = Tensor | RowwiseFp8  # of a forward or dgrad GEMM
WgradOperand = Tensor | RowwiseFp8 | DeferredFp8


class RmsNormBackward(Protocol):
    """See `norm.rms_norm_backward_reference`."""

    def __call__(
        self,
        dn: Tensor,
        n: Tensor,
        rstd: Tensor,
        residual_grad: Tensor | None = None,
        *,
        row_factor: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `norm.rms_norm_backward_reference`."""
        ...


class FusedLinearCrossEntropy(Protocol):
    """See `fused_linear_cross_entropy.fused_linear_cross_entropy_reference`."""

    def __call__(
        self,
        n: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float,
        softcap: float | None,
        vocabulary: int | None = None,
        *,
        gradient: bool,
    ) -> tuple[Tensor, LogitGradient | None]:
        """See `fused_linear_cross_entropy.fused_linear_cross_entropy_reference`."""
        ...


class Gram(Protocol):
    """See `gram.gram_reference`."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `gram.gram_reference`."""
        ...


class SymmetricPolynomial(Protocol):
    """See `gram.symmetric_polynomial_reference`."""

    def __call__(
        self, gram: Tensor, b: float, c: float, *, a: float = 0.0, out: Tensor | None = None
    ) -> Tensor:
        """See `gram.symmetric_polynomial_reference`."""
        ...


class Fp8Gemm(Protocol):
    """See `fp8.fp8_gemm_reference`."""

    def __call__(
        self,
        x: RowwiseFp8,
        weight: Tensor,
        weight_scale: Tensor,
        dtype: torch.dtype,
        *,
        fast_accumulation: bool,
    ) -> Tensor:
        """See `fp8.fp8_gemm_reference`."""
        ...


@dataclass(frozen=True)
class Kernels:
    """Operations in the compute dtype; those with a trailing underscore overwrite their first argument."""

    rms_norm: Callable[..., tuple[Tensor, Tensor]]  # see norm.rms_norm_reference
    add_rms_norm: Callable[..., tuple[Tensor, Tensor, Tensor]]  # see norm.add_rms_norm_reference
    rms_norm_backward: RmsNormBackward
    rms_norm_backward_rounded: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    norm_inject: Callable[[Tensor, Tensor, float, float], tuple[Tensor, Tensor]]
    norm_inject_backward: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    embed_norm: Callable[[Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor]]
    embed_norm_backward_: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    rotate_norm_: Callable[[Tensor, Tensor, float, int], Tensor]
    rotate_norm_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    swiglu_backward_: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    cross_entropy_: Callable[..., tuple[Tensor, Tensor]]  # see cross_entropy.cross_entropy_reference_
    supports_fused_linear_cross_entropy: Callable[[Tensor, Tensor], bool]
    fused_linear_cross_entropy: FusedLinearCrossEntropy
    gram: Gram
    symmetric_polynomial: SymmetricPolynomial
    update_momentum: Callable[..., None]  # see muon_update.update_momentum_reference
    frobenius_normalize: Callable[[Tensor, float, float], Tensor]
    scale_matrices_: Callable[[Tensor, Tensor], None]
    apply_update: Callable[..., None]  # see muon_update.apply_update_reference


@dataclass(frozen=True)
class BlockKernels:
    """The operations of a block whose results are GEMM operands: in the compute dtype, or quantized to fp8.

    `rms_norm_backward` returns the gradient of the residual stream and the operand made of it.
    `wgrad_scale`, `wgrad_activation` and `wgrad_normed` prepare saved activations for a wgrad GEMM: the scale
    is saved in the forward pass, the operand is made from it in the backward pass.
    """

    rms_norm: Callable[..., tuple[GemmOperand, Tensor]]  # see norm.rms_norm_reference
    add_rms_norm: Callable[..., tuple[Tensor, GemmOperand, Tensor]]  # see norm.add_rms_norm_reference
    rms_norm_backward: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, GemmOperand]]
    rotate_norm_: Callable[[Tensor, Tensor, float, int], Tensor]
    rotate_norm_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], GemmOperand]
    swiglu: Callable[[Tensor], GemmOperand]
    swiglu_backward_: Callable[
        ..., tuple[GemmOperand, GemmOperand]
    ]  # h is only accepted in the compute dtype
    cross_entropy_: Callable[..., tuple[Tensor, GemmOperand]]  # see cross_entropy.cross_entropy_reference_
    quantize_activation: Callable[[Tensor], GemmOperand]
    quantize_gradient: Callable[[Tensor], GemmOperand]
    wgrad_scale: Callable[..., Tensor | None]  # of the operand that `quantize_activation` returned
    wgrad_activation: Callable[..., WgradOperand]
    wgrad_normed: Callable[[Tensor], WgradOperand]


@dataclass(frozen=True)
class Fp8GemmKernels:
    """Weight quantization and fp8 GEMMs."""

    quantize_weight_: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    gemm: Fp8Gemm
    tensor_scale: Callable[[RowwiseFp8], Tensor]
    transpose_quantize: Callable[[RowwiseFp8 | DeferredFp8, Tensor], Tensor]
    wgrad_gemm: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


REFERENCE = Kernels(
    rms_norm=norm.rms_norm_reference,
    add_rms_norm=norm.add_rms_norm_reference,
    rms_norm_backward=norm.rms_norm_backward_reference,
    rms_norm_backward_rounded=norm.rms_norm_backward_rounded_reference,
    norm_inject=norm.norm_inject_reference,
    norm_inject_backward=norm.norm_inject_backward_reference,
    embed_norm=norm.embed_norm_reference,
    embed_norm_backward_=norm.embed_norm_backward_reference_,
    rotate_norm_=rotary.rotate_norm_reference_,
    rotate_norm_backward=rotary.rotate_norm_backward_reference,
    swiglu=swiglu.swiglu_reference,
    swiglu_backward_=swiglu.swiglu_backward_reference_,
    cross_entropy_=cross_entropy.cross_entropy_reference_,
    supports_fused_linear_cross_entropy=linear_cross_entropy.supports_fused_linear_cross_entropy_reference,
    fused_linear_cross_entropy=linear_cross_entropy.fused_linear_cross_entropy_reference,
    gram=gram.gram_reference,
    symmetric_polynomial=gram.symmetric_polynomial_reference,
    update_momentum=muon_update.update_momentum_reference,
    frobenius_normalize=muon_update.frobenius_normalize_reference,
    scale_matrices_=muon_update.scale_matrices_reference_,
    apply_update=muon_update.apply_update_reference,
)

TRITON = Kernels(
    rms_norm=norm.rms_norm_triton,
    add_rms_norm=norm.add_rms_norm_triton,
    rms_norm_backward=norm.rms_norm_backward_triton,
    rms_norm_backward_rounded=norm.rms_norm_backward_rounded_triton,
    norm_inject=norm.norm_inject_triton,
    norm_inject_backward=norm.norm_inject_backward_triton,
    embed_norm=norm.embed_norm_triton,
    embed_norm_backward_=norm.embed_norm_backward_triton_,
    rotate_norm_=rotary.rotate_norm_triton_,
    rotate_norm_backward=rotary.rotate_norm_backward_triton,
    swiglu=swiglu.swiglu_triton,
    swiglu_backward_=swiglu.swiglu_backward_triton_,
    cross_entropy_=cross_entropy.cross_entropy_triton_,
    supports_fused_linear_cross_entropy=linear_cross_entropy.supports_fused_linear_cross_entropy_triton,
    fused_linear_cross_entropy=linear_cross_entropy.fused_linear_cross_entropy_triton,
    gram=gram.gram_triton,
    symmetric_polynomial=gram.symmetric_polynomial_triton,
    update_momentum=muon_update.update_momentum_triton,
    frobenius_normalize=muon_update.frobenius_normalize_triton,
    scale_matrices_=muon_update.scale_matrices_triton_,
    apply_update=muon_update.apply_update_triton,
)


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
        rms_norm_backward=kernels.rms_norm_backward_rounded,
        rotate_norm_=kernels.rotate_norm_,
        rotate_norm_backward=kernels.rotate_norm_backward,
        swiglu=kernels.swiglu,
        swiglu_backward_=kernels.swiglu_backward_,
        cross_entropy_=kernels.cross_entropy_,
        quantize_activation=_unchanged,
        quantize_gradient=_unchanged,
        wgrad_scale=_no_scale,
        wgrad_activation=_ignore_scale,
        wgrad_normed=_unchanged,
    )


REFERENCE_BLOCK, TRITON_BLOCK = without_quantization(REFERENCE), without_quantization(TRITON)

REFERENCE_FP8_BLOCK = BlockKernels(
    rms_norm=norm.rms_norm_fp8_reference,
    add_rms_norm=norm.add_rms_norm_fp8_reference,
    rms_norm_backward=norm.rms_norm_backward_fp8_reference,
    rotate_norm_=rotary.rotate_norm_reference_,
    rotate_norm_backward=rotary.rotate_norm_backward_fp8_reference,
    swiglu=swiglu.swiglu_fp8_reference,
    swiglu_backward_=swiglu.swiglu_backward_fp8_reference,
    cross_entropy_=cross_entropy.cross_entropy_fp8_reference_,
    quantize_activation=fp8.quantize_activation_reference,
    quantize_gradient=fp8.quantize_gradient_reference,
    wgrad_scale=fp8.tensor_scale,
    wgrad_activation=fp8.defer_quantization,
    wgrad_normed=fp8.defer_quantization_of_norm,
)

TRITON_FP8_BLOCK = BlockKernels(
    rms_norm=norm.rms_norm_fp8_triton,
    add_rms_norm=norm.add_rms_norm_fp8_triton,
    rms_norm_backward=norm.rms_norm_backward_fp8_triton,
    rotate_norm_=rotary.rotate_norm_triton_,
    rotate_norm_backward=rotary.rotate_norm_backward_fp8_triton,
    swiglu=swiglu.swiglu_fp8_triton,
    swiglu_backward_=swiglu.swiglu_backward_fp8_triton,
    cross_entropy_=cross_entropy.cross_entropy_fp8_triton_,
    quantize_activation=fp8.quantize_activation_triton,
    quantize_gradient=fp8.quantize_gradient_triton,
    wgrad_scale=fp8.tensor_scale,
    wgrad_activation=fp8.defer_quantization,
    wgrad_normed=fp8.defer_quantization_of_norm,
)

REFERENCE_FP8_GEMM = Fp8GemmKernels(
    quantize_weight_=fp8.quantize_weight_reference_,
    gemm=fp8.fp8_gemm_reference,
    tensor_scale=fp8.tensor_scale,
    transpose_quantize=fp8.transpose_quantize_reference,
    wgrad_gemm=fp8.fp8_wgrad_gemm_reference,
)

TRITON_FP8_GEMM = Fp8GemmKernels(
    quantize_weight_=fp8.quantize_weight_triton_,
    gemm=fp8.fp8_gemm_cublas,
    tensor_scale=fp8.tensor_scale,
    transpose_quantize=fp8.transpose_quantize_triton,
    wgrad_gemm=fp8.fp8_wgrad_gemm_cublas,
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
