"""Linear layers with fp8 GEMMs: forward, dgrad and wgrad.

Forward and dgrad contract over features: each row of both operands has its own scale, which factors out of
the sum. wgrad contracts over tokens, where row scales do not factor out: each operand has one scale (see
`kernels.fp8`), and the sum is in fp32. The LM head has one exception: its dgrad, a sum over the vocabulary,
accumulates in fp32 too, because fewer bits cost loss (docs/performance.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from steepen.execution.linear import FusedLinear, Parameters, as_parts
from steepen.kernels.dispatch import Fp8GemmKernels, GemmOperand, WgradOperand, fp8_gemm_kernels_for
from steepen.kernels.fp8 import ACTIVATION_DTYPE, DeferredFp8, RowwiseFp8, TransposedFp8

FP8_GEMM_MULTIPLE = 16  # both sides of a matrix in an fp8 GEMM must be multiples of 16


class Float8Linear(FusedLinear):
    """A `FusedLinear` with fp8 GEMMs for quantized operands, and the compute dtype for tensors."""

    def __init__(
        self, parameters: Parameters, factor: float, dtype: torch.dtype, *, head: bool = False
    ) -> None:
        super().__init__(parameters, factor, dtype, head=head)
        rows, columns = self.weight.shape
        device = self.weight.device
        # Filled by `quantize_weights`. An fp8 GEMM reads both operands along the contraction, so dgrad needs
        # the transposed weight.
        self.fp8_weight = torch.empty(rows, columns, dtype=ACTIVATION_DTYPE, device=device)
        self.fp8_transposed = torch.empty(columns, rows, dtype=ACTIVATION_DTYPE, device=device)
        self.scale = torch.empty(1, rows, dtype=torch.float32, device=device)
        self.transposed_scale = torch.empty(1, columns, dtype=torch.float32, device=device)
        self.amax = torch.empty(rows + columns, dtype=torch.int32, device=device)  # workspace

    def __call__(self, x: GemmOperand) -> Tensor:
        """x @ weightᵀ."""
        if isinstance(x, Tensor):
            return super().__call__(x)
        return self._kernels.gemm(x, self.fp8_weight, self.scale, self.weight.dtype, fast_accumulation=True)

    def add_to_(self, total: Tensor, x: GemmOperand) -> Tensor:
        """total += x @ weightᵀ in place."""
        return super().add_to_(total, x) if isinstance(x, Tensor) else total.add_(self(x))

    def added_to(self, total: Tensor, x: GemmOperand) -> Tensor | None:
        """total + x @ weightᵀ; None if that would take a separate pass over the total."""
        return super().added_to(total, x) if isinstance(x, Tensor) else None

    def dgrad(self, d: GemmOperand) -> Tensor:
        """Gradient of x from the gradient d of the output."""
        if isinstance(d, Tensor):
            return super().dgrad(d)
        return self._kernels.gemm(
            d,
            self.fp8_transposed,
            self.transposed_scale,
            self.weight.dtype,
            fast_accumulation=not self.head,
        )

    def wgrad(self, d: WgradOperand, x: WgradOperand) -> None:
        """Add the weight's gradient to the parameters' `.grad`, accumulated in fp32."""
        if isinstance(d, Tensor) or isinstance(x, Tensor):
            assert isinstance(d, Tensor) and isinstance(x, Tensor), "one operand is quantized, the other not"
            return super().wgrad(d, x)
        d, x = self._transposed(d), self._transposed(x)
        gradient = self._kernels.wgrad_gemm(d.data, x.data, d.scale * self.factor, x.scale)
        for copy in self.copies:
            part = gradient[copy.rows].view(copy.parameter.shape)
            copy.parameter.grad = part if copy.parameter.grad is None else copy.parameter.grad.add_(part)

    def _transposed(self, x: RowwiseFp8 | DeferredFp8 | TransposedFp8) -> TransposedFp8:
        """An operand of the wgrad GEMM."""
        if isinstance(x, TransposedFp8):
            return x
        scale = x.scale if isinstance(x, DeferredFp8) else self._kernels.tensor_scale(x)
        return TransposedFp8(self._kernels.transpose_quantize(x, scale), scale)

    def backward(self, d: GemmOperand, x: WgradOperand) -> Tensor:
        """wgrad, then dgrad."""
        self.wgrad(d, x)
        return self.dgrad(d)

    def quantize_weight(self) -> None:
        """Requantize the weight and its transpose."""
        self._kernels.quantize_weight_(
            self.fp8_weight, self.scale, self.fp8_transposed, self.transposed_scale, self.amax, self.weight
        )

    @property
    def _kernels(self) -> Fp8GemmKernels:
        return fp8_gemm_kernels_for(self.weight)


def float8_linear_where_aligned(
    parameters: Parameters, factor: float, dtype: torch.dtype, *, head: bool = False
) -> FusedLinear:
    """A `Float8Linear`, or a `FusedLinear` if a dimension is not a multiple of 16."""
    columns = as_parts(parameters)[0].shape[-1]
    rows = sum(part.numel() // columns for part in as_parts(parameters))
    aligned = columns % FP8_GEMM_MULTIPLE == 0 and rows % FP8_GEMM_MULTIPLE == 0
    return (Float8Linear if aligned else FusedLinear)(parameters, factor, dtype, head=head)


def quantize_weights(linears: list[FusedLinear]) -> None:
    """Requantize the weights of the fp8 layers; call it after `cast_weights`."""
    for linear in linears:
        if isinstance(linear, Float8Linear):
            linear.quantize_weight()
