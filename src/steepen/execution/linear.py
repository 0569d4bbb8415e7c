"""Bias-free linear layers of the fused path: forward, dgrad and wgrad GEMMs in the compute dtype."""

# torch's multi-tensor (foreach) operators have no public name.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from steepen.kernels.cublaslt_gemm import accumulate_gemm_, gemm, gemm_add

Parameters = nn.Parameter | Sequence[nn.Parameter]  # one, or several that read the same input


def as_parts(parameters: Parameters) -> list[nn.Parameter]:
    """The parameters as a list."""
    return [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)


class GradientSignal:
    """Notifies a listener when the gradient of a parameter is complete: it is written here, outside of hooks.

    A parameter may be used several times in a forward pass (a tied core): its gradient is complete when the
    backward has written it as often.
    """

    def __init__(self) -> None:
        self.listener: Callable[[nn.Parameter], None] | None = None
        self.uses: dict[nn.Parameter, int] = {}
        self._counting = True

    def used(self, parameter: nn.Parameter) -> None:
        """Count one use in a forward pass that needs gradients."""
        if self._counting:
            self.uses[parameter] = self.uses.get(parameter, 0) + 1

    @contextlib.contextmanager
    def recomputing(self) -> Generator[None]:
        """Around a forward pass that is repeated in the backward: its uses are counted already."""
        self._counting = False
        try:
            yield
        finally:
            self._counting = True

    def written(self, parameter: nn.Parameter) -> None:
        """Count one write in the backward; after the last, call the listener."""
        left = self.uses[parameter] = self.uses.get(parameter, 1) - 1
        if left <= 0:
            self.uses.pop(parameter)
            if self.listener is not None:
                self.listener(parameter)

    def __deepcopy__(self, memo: dict[int, object]) -> GradientSignal:
        """Growth copies blocks: all blocks of a network share one signal."""
        return self


@dataclass(frozen=True, eq=False)
class ComputeCopy:
    """A parameter times a factor in the compute dtype: rows of a linear layer's weight."""

    parameter: nn.Parameter
    factor: float
    first: int  # row of the layer's weight
    weight: Tensor  # a view of these rows

    @property
    def rows(self) -> slice:
        """The rows in the layer's weight, and the columns in its output."""
        return slice(self.first, self.first + len(self.weight))

    def cast_rows_(self, first: int, values: Tensor) -> None:
        """Fill the rows of the copy from `first` on with fp32 values, times the factor."""
        values = values.reshape(-1, self.weight.shape[1])
        rows = self.weight[first : first + len(values)]
        rows.copy_(values)
        if self.factor != 1.0:
            rows.mul_(self.factor)


class FusedLinear:
    """y = factor · x @ weightᵀ, with a copy of the weight in the compute dtype.

    A parameter is (out, in) or a stack (count, out, in) whose outputs are concatenated; several parameters
    that read the same input (queries, and fewer keys and values) are concatenated too, because one GEMM with
    many columns keeps a GPU busier than two. wgrad is accumulated into each parameter's `.grad` in fp32.
    `head` marks the LM head.
    """

    def __init__(
        self, parameters: Parameters, factor: float, dtype: torch.dtype, *, head: bool = False
    ) -> None:
        parts = as_parts(parameters)
        self.factor, self.head = factor, head
        self.rows = sum(part.numel() // part.shape[-1] for part in parts)
        # Filled by `cast_weights` with the parameters times the factor.
        self.weight = torch.empty(self.rows, parts[0].shape[-1], dtype=dtype, device=parts[0].device)
        self.copies: list[ComputeCopy] = []
        first = 0
        for part in parts:
            count = part.numel() // part.shape[-1]
            self.copies.append(ComputeCopy(part, factor, first, self.weight[first : first + count]))
            first += count
        self.signal: GradientSignal | None = None  # set by the network where someone may listen

    def __call__(self, x: Tensor) -> Tensor:
        """x @ weightᵀ, (tokens, in) → (tokens, out)."""
        return gemm(x, self.weight.t())

    def add_to_(self, total: Tensor, x: Tensor) -> Tensor:
        """total += x @ weightᵀ in place, rounded once to the dtype of `total`."""
        return gemm(x, self.weight.t(), accumulate_into=total)

    def added_to(self, total: Tensor, x: Tensor) -> Tensor | None:
        """total + x @ weightᵀ, rounded once; None if that would take a separate pass over the total."""
        return gemm_add(x, self.weight.t(), total)

    def dgrad(self, d: Tensor) -> Tensor:
        """Gradient of x from the gradient d of the output."""
        return gemm(d, self.weight)

    def wgrad(self, d: Tensor, x: Tensor) -> None:
        """Add the weight's gradient to the parameters' `.grad` in fp32, or create it where it is None."""
        for copy in self.copies:
            parameter, beta = copy.parameter, 1.0
            if parameter.grad is None:
                parameter.grad, beta = torch.empty_like(parameter), 0.0
            total = parameter.grad.view(copy.weight.shape)
            accumulate_gemm_(total, d[:, copy.rows].t(), x, self.factor, beta)

    def backward(self, d: Tensor, x: Tensor) -> Tensor:
        """wgrad, then dgrad."""
        self.wgrad(d, x)
        return self.dgrad(d)

    def used(self) -> None:
        """Note a use in a forward pass that needs gradients."""
        if self.signal is not None:
            for copy in self.copies:
                self.signal.used(copy.parameter)

    def written(self) -> None:
        """Note that a use's part of the weight's gradient has been written."""
        if self.signal is not None:
            for copy in self.copies:
                self.signal.written(copy.parameter)


def is_released(parameter: Tensor) -> bool:
    """Whether another rank owns the fp32 values: here the parameter is one zero, expanded to its shape."""
    return parameter.numel() > 1 and not any(parameter.stride())


def cast_weights(linears: list[FusedLinear]) -> None:
    """Copy all parameters that are not released, times their factors, into the compute copies."""
    copies = [copy for linear in linears for copy in linear.copies if not is_released(copy.parameter)]
    if not copies:
        return
    # One multi-tensor launch: casting the matrices of a small network one by one is bound by launches.
    values = [copy.parameter.view(copy.weight.shape) for copy in copies]
    torch._foreach_copy_([copy.weight for copy in copies], values)
    scaled = [copy for copy in copies if copy.factor != 1.0]
    if scaled:
        torch._foreach_mul_([copy.weight for copy in scaled], [copy.factor for copy in scaled])
