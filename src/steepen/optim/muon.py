"""Muon: momentum orthogonalized matrix by matrix, batched by shape.

`torch.optim.Muon` steps one 2-D tensor after another in bf16. A network with many equal matrices is several
times faster in batched GEMMs, and stacks of logical matrices must be split before they are orthogonalized.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steepen.execution.cuda_graphs import StreamPool, run_sequentially
from steepen.kernels.dispatch import REFERENCE, Kernels, kernels_for
from steepen.kernels.muon_update import row_square_parts
from steepen.optim.config import OptimizerConfig

# Parameter name → state key ("momentum", "exp_avg", "step", …) → tensor.
OptimizerState = dict[str, dict[str, Tensor]]

# Coefficients of odd polynomials a·x + b·x³ + c·x⁵ of the singular values, one per step; the last repeats.
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),)
# Minimax-optimal per step for singular values from 1e-3 up (Amsel et al., "The Polar Express", 2025).
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# Polar Express needs every singular value at or below one, with a margin.
NORM_SAFETY_FACTOR = {"newton-schulz": 1.0, "polar-express": 1.02}
COEFFICIENTS = {"newton-schulz": NEWTON_SCHULZ, "polar-express": POLAR_EXPRESS}
# Added to the Frobenius norm: output projections are initialized to zero, so the first gradients of other
# matrices are exactly zero.
NORM_EPS = {"newton-schulz": 1e-7, "polar-express": 1e-6}
ROW_NORM_MIN = 1e-7  # row normalization divides by at least this
VARIANCE_MIN = 1e-10  # variance reduction: least second moment, and least Frobenius norm to divide by

# Rows from which the Triton kernels for symmetric GEMMs are used: at 384 they are faster than torch.bmm
# (docs/performance.md); smaller matrices were not measured.
SYMMETRIC_MIN_ROWS = 256
MAX_STREAMS = 6  # CUDA streams for the parameters of one shape; torch has 32 in all


def orthogonalize(matrices: Tensor, method: str = "newton-schulz", steps: int = 5) -> Tensor:
    """Approximate the polar factor UVᵀ of each matrix: (count, rows, columns) → same, rows ≤ columns."""
    x = kernels_for(matrices).frobenius_normalize(matrices, NORM_SAFETY_FACTOR[method], NORM_EPS[method])
    return orthogonalize_normalized(x, method, steps)


def orthogonalize_normalized(x: Tensor, method: str, steps: int) -> Tensor:
    """`orthogonalize` for matrices whose Frobenius norm is at most 1 already."""
    table = COEFFICIENTS[method]
    kernels = kernels_for(x) if x.shape[-2] >= SYMMETRIC_MIN_ROWS else REFERENCE
    gram = polynomial = None
    for step in range(steps):
        a, b, c = table[min(step, len(table) - 1)]
        gram = kernels.gram(x, out=gram)
        # a·x is folded into the polynomial as a·I: adding it to the GEMM's output would read x once more.
        polynomial = kernels.symmetric_polynomial(gram, b, c, a=a, out=polynomial)
        x = torch.bmm(polynomial, x)
    return x


@dataclass(frozen=True)
class _Part:
    """Parameters of one orientation: matrices `begin` to `end` of a batch with rows ≤ columns."""

    names: list[str]
    counts: list[int]  # logical matrices of each parameter
    begin: int
    transposed: bool  # a row of the parameter's matrices is a column of the batch

    @property
    def end(self) -> int:
        return self.begin + sum(self.counts)


class Muon:
    """Steps named stacks of logical matrices (…, out, in); `state` holds tensors by parameter name and key.

    Keys: "momentum", of the parameter's shape; with variance reduction also "second_moment", the running mean
    squares of the update: (…, out, 1), or (…, 1, in) where the variance is reduced by column.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], config: OptimizerConfig) -> None:
        self.config = config
        self.parameters = parameters
        self.state: OptimizerState = {}
        self.orthogonalized = 0  # logical matrices so far; replays of a CUDA graph are not counted
        self.streams: defaultdict[tuple[int, int], StreamPool] = defaultdict(StreamPool)  # by shape

    def step(self, lr: float | Tensor, weight_decay: float, momentum: float | Tensor | None = None) -> None:
        """Update every parameter: lr is scaled by max(1, out/in)^½, weight decay is decoupled (lr·wd).

        `momentum` is the coefficient of this step, by default the configured one.
        """
        run_sequentially(self.tasks(lr, weight_decay, momentum))

    def tasks(
        self,
        lr: float | Tensor,
        weight_decay: float,
        momentum: float | Tensor | None = None,
        *,
        parallel: bool = False,
    ) -> list[Callable[[], None]]:
        """Parts of a step, one per matrix shape, that are independent of each other.

        With `parallel` (GPU only), a task also spreads its own work over CUDA streams. A learning rate or
        momentum that is a tensor stays on its device, so that a captured step can be replayed at another.
        """
        named = {name: p for name, p in self.parameters.items() if p.grad is not None}
        for name, parameter in named.items():
            if name not in self.state:
                self.state[name] = self._initial_state(parameter)
        buckets: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        for name, parameter in named.items():
            rows, columns = sorted(parameter.shape[-2:])
            buckets[rows, columns].append(name)
        momentum = self.config.momentum if momentum is None else momentum
        return [
            functools.partial(self._step_bucket, names, *shape, lr, weight_decay, momentum, parallel)
            for shape, names in buckets.items()
        ]

    def _initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = {"momentum": torch.zeros_like(parameter)}
        if self.config.variance_reduction != "none":
            *stack, rows, columns = parameter.shape
            by_column = self.config.variance_reduction == "row-or-column" and rows < columns
            state["second_moment"] = parameter.new_zeros(
                (*stack, 1, columns) if by_column else (*stack, rows, 1)
            )
        return state

    @torch.no_grad()
    def _step_bucket(
        self,
        names: list[str],
        rows: int,
        columns: int,
        lr: float | Tensor,
        weight_decay: float,
        momentum: float | Tensor,
        parallel: bool,
    ) -> None:
        """Step all matrices of one shape; tall matrices are transposed, so that both kinds share a batch."""
        config = self.config
        parts = self._parts(names)
        names = [name for part in parts for name in part.names]
        counts = [count for part in parts for count in part.counts]
        parameters: list[Tensor] = [self.parameters[name] for name in names]
        gradients = [p.grad for p in parameters if p.grad is not None]
        momenta = [self.state[name]["momentum"] for name in names]
        kernels = kernels_for(parameters[0])
        self.orthogonalized += sum(counts)
        # bf16 GEMMs are fast on a GPU and slow on a CPU.
        dtype = torch.bfloat16 if parameters[0].is_cuda else parameters[0].dtype
        batch = torch.empty(sum(counts), rows, columns, dtype=dtype, device=parameters[0].device)
        streams = self.streams[rows, columns] if parallel else None
        method, steps = config.orthogonalization, config.orthogonalization_steps
        update_momentum = functools.partial(kernels.update_momentum, beta=momentum, nesterov=config.nesterov)
        directions = _split_batch(batch, counts, parameters)
        if config.row_normalize:
            squares = [_empty_row_squares(batch, part) for part in parts]
            split = [each for x, part in zip(squares, parts, strict=True) for each in x.split(part.counts)]
            run_split(streams, update_momentum, directions, gradients, momenta, split)
            for part, row_squares in zip(parts, squares, strict=True):
                normalize_rows_(kernels, batch[part.begin : part.end], row_squares, part.transposed, method)
            batch = orthogonalize_normalized(batch, method, steps)
        else:
            run_split(streams, update_momentum, directions, gradients, momenta)
            batch = orthogonalize(batch, method, steps)
        apply_update = functools.partial(
            kernels.apply_update,
            lr=lr,
            weight_decay=weight_decay,
            cautious=config.cautious_decay != "none",
            scaled_decay=config.shape_scaled_decay,
        )
        updates = _split_batch(batch, counts, parameters)
        scales = [max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5 for p in parameters]
        if config.variance_reduction == "none":
            run_split(streams, apply_update, parameters, updates, scales)
            return
        factors = [each for part in parts for each in self._variance_factors(batch, part)]
        run_split(streams, apply_update, parameters, updates, scales, factors)

    def _parts(self, names: list[str]) -> list[_Part]:
        """The parameters of a bucket by orientation, tall ones first."""
        parts: list[_Part] = []
        for transposed in (True, False):
            found = [n for n in names if _is_tall(self.parameters[n]) == transposed]
            counts = [self.parameters[n].shape[:-2].numel() for n in found]
            if found:
                parts.append(_Part(found, counts, parts[-1].end if parts else 0, transposed))
        return parts

    def _variance_factors(self, batch: Tensor, part: _Part) -> list[Tensor]:
        """NorMuon (Li et al., 2025): v^(−½) per row or column, scaled so that the Frobenius norm is kept.

        Updates v, the running mean of squares, from one pass over the orthogonalized batch; the rest is
        arithmetic on vectors. Returns factors of each parameter's update, of the shape of its v.
        """
        moments = [self.state[name]["second_moment"] for name in part.names]
        by_parameter_row = moments[0].shape[-1] == 1
        dim = -2 if by_parameter_row == part.transposed else -1  # dimension of the batch that is summed over
        x = batch[part.begin : part.end]
        squares = torch.linalg.vector_norm(x, dim=dim, dtype=moments[0].dtype).square_()
        means = (squares / x.shape[dim]).split(part.counts)
        for moment, mean in zip(moments, means, strict=True):
            moment.lerp_(mean.view_as(moment), 1 - self.config.variance_beta2)
        factors = torch.cat([moment.view(-1, squares.shape[-1]) for moment in moments])
        factors = factors.clamp_min_(VARIANCE_MIN).rsqrt_()
        before = squares.sum(-1, keepdim=True).sqrt_()
        after = (squares * factors.square()).sum(-1, keepdim=True).sqrt_()
        factors *= before / after.clamp_min_(VARIANCE_MIN)
        pairs = zip(factors.split(part.counts), moments, strict=True)
        return [each.view_as(moment) for each, moment in pairs]


def normalize_rows_(
    kernels: Kernels, batch: Tensor, row_squares: Tensor, transposed: bool, method: str
) -> None:
    """Divide each row of each matrix by its norm, then each matrix by its Frobenius norm, in place.

    `row_squares` are the sums that `update_momentum` wrote, so the batch (count, rows, columns) is read once.
    With `transposed`, the columns of the batch are the matrices' rows.
    """
    squares = row_squares.sum(1)
    factors = squares.sqrt().clamp_min_(ROW_NORM_MIN).reciprocal_()
    norm = (squares * factors.square()).sum(-1, keepdim=True).sqrt_()
    factors /= norm * NORM_SAFETY_FACTOR[method] + NORM_EPS[method]
    kernels.scale_matrices_(batch, factors[:, None, :] if transposed else factors[:, :, None])


def run_split(streams: StreamPool | None, function: Callable[..., None], *lists: Sequence[Any]) -> None:
    """Call `function` on parallel lists, whole or, with `streams`, in up to MAX_STREAMS slices of each."""
    if streams is None:
        function(*lists)
        return
    groups = range(min(MAX_STREAMS, len(lists[0])))
    tasks = [functools.partial(function, *(each[k::MAX_STREAMS] for each in lists)) for k in groups]
    streams(tasks, lists[0][0].device)


def _is_tall(parameter: Tensor) -> bool:
    return parameter.shape[-2] > parameter.shape[-1]


def _empty_row_squares(batch: Tensor, part: _Part) -> Tensor:
    """Memory for the partial sums of squares of the parameters' rows: (count, parts, rows), fp32 or fp64."""
    out, inner = reversed(batch.shape[1:]) if part.transposed else batch.shape[1:]
    dtype = torch.promote_types(batch.dtype, torch.float32)
    shape = sum(part.counts), row_square_parts(inner), out
    return torch.empty(shape, dtype=dtype, device=batch.device)


def _split_batch(batch: Tensor, counts: list[int], parameters: list[Tensor]) -> list[Tensor]:
    return [
        (part.mT if _is_tall(p) else part).view(p.shape)
        for part, p in zip(batch.split(counts), parameters, strict=True)
    ]
