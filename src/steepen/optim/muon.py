"""Muon: momentum orthogonalised matrix by matrix, batched by shape.

`torch.optim.Muon` steps one 2-D tensor after another in bf16. A network with many equal matrices is several
times faster in batched GEMMs, and stacks of logical matrices must be split before they are orthogonalised.
"""

# torch's own optimizers are built on the multi-tensor operators, whose names start with an underscore.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steepen.execution.cuda_streams import StreamPool, run_sequentially
from steepen.kernels.dispatch import REFERENCE, kernels_for
from steepen.optim.adamw import apply_weight_decay
from steepen.optim.config import OptimizerConfig
from steepen.optim.state import OptimizerState

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
SAFETY = {"newton-schulz": 1.0, "polar-express": 1.02}
COEFFICIENTS = {"newton-schulz": NEWTON_SCHULZ, "polar-express": POLAR_EXPRESS}
NORM_EPS = 1e-7  # with output projections initialised to zero, the first gradients are exactly zero

# Rows from which the Triton kernels for symmetric GEMMs are used: at 384 they are faster than torch.bmm
# (docs/performance.md); smaller matrices were not measured.
SYMMETRIC_MIN_ROWS = 256
MAX_STREAMS = 6  # CUDA streams for the parameters of one shape; torch has 32 in all


def orthogonalise(matrices: Tensor, method: str = "newton-schulz", steps: int = 5) -> Tensor:
    """Bring the singular values of each matrix near 1: (count, rows, columns) → same, rows ≤ columns."""
    x = kernels_for(matrices).frobenius_normalize(matrices, SAFETY[method], NORM_EPS)
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


class Muon:
    """Steps named stacks of logical matrices (…, out, in); `state` holds the momentum by parameter name."""

    def __init__(self, parameters: dict[str, nn.Parameter], config: OptimizerConfig) -> None:
        self.config = config
        self.parameters = parameters
        self.state: OptimizerState = {}
        self.streams: defaultdict[tuple[int, int], StreamPool] = defaultdict(StreamPool)  # by shape

    def step(self, lr: float | Tensor, weight_decay: float) -> None:
        """Update every parameter: lr is scaled by max(1, out/in)^½, weight decay is decoupled (lr·wd)."""
        run_sequentially(self.tasks(lr, weight_decay))

    def tasks(
        self, lr: float | Tensor, weight_decay: float, *, parallel: bool = False
    ) -> list[Callable[[], None]]:
        """Parts of a step, one per matrix shape, that are independent of each other.

        With `parallel` (GPU only), a task also spreads its own work over CUDA streams. A learning rate that
        is a tensor stays on its device, so that a captured step can be replayed at another rate.
        """
        named = {name: p for name, p in self.parameters.items() if p.grad is not None}
        for name, parameter in named.items():
            if name not in self.state:
                self.state[name] = {"momentum": torch.zeros_like(parameter)}
        buckets: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        for name, parameter in named.items():
            rows, columns = sorted(parameter.shape[-2:])
            buckets[rows, columns].append(name)
        return [
            functools.partial(self._step_bucket, names, *shape, lr, weight_decay, parallel)
            for shape, names in buckets.items()
        ]

    @torch.no_grad()
    def _step_bucket(
        self,
        names: list[str],
        rows: int,
        columns: int,
        lr: float | Tensor,
        weight_decay: float,
        parallel: bool,
    ) -> None:
        """Step all matrices of one shape; tall matrices are transposed, so that both kinds share a batch."""
        config = self.config
        parameters: list[Tensor] = [self.parameters[name] for name in names]
        gradients = [p.grad for p in parameters if p.grad is not None]
        momenta = [self.state[name]["momentum"] for name in names]
        kernels = kernels_for(parameters[0])
        # bf16 GEMMs are fast on a GPU and slow on a CPU.
        dtype = torch.bfloat16 if parameters[0].is_cuda else parameters[0].dtype
        counts = [p.numel() // (rows * columns) for p in parameters]
        batch = torch.empty(sum(counts), rows, columns, dtype=dtype, device=parameters[0].device)
        streams = self.streams[rows, columns] if parallel else None
        update_momentum = functools.partial(
            kernels.update_momentum, beta=config.momentum, nesterov=config.nesterov
        )
        run_split(streams, update_momentum, _split_batch(batch, counts, parameters), gradients, momenta)
        orthogonal = orthogonalise(batch, config.orthogonalisation, config.orthogonalisation_steps)
        updates = _split_batch(orthogonal, counts, parameters)
        scales = [max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5 for p in parameters]
        if not config.neuron_norm and not config.cautious_decay:
            apply_update = functools.partial(kernels.apply_update, lr=lr, weight_decay=weight_decay)
            run_split(streams, apply_update, parameters, updates, scales)
            return
        updates = [update.to(p.dtype) for update, p in zip(updates, parameters, strict=True)]
        if config.neuron_norm:
            updates = [
                self._normalise_neurons(name, update) for name, update in zip(names, updates, strict=True)
            ]
        updates = [update * (lr * -scale) for update, scale in zip(updates, scales, strict=True)]
        apply_weight_decay(parameters, updates, lr, weight_decay, cautious=config.cautious_decay)
        torch._foreach_add_(parameters, updates)

    def _normalise_neurons(self, name: str, update: Tensor) -> Tensor:
        """NorMuon (Li et al., 2025): divide each output row by its running RMS, keeping the matrix norm."""
        state, beta = self.state[name], self.config.neuron_beta2
        mean_square = update.square().mean(-1, keepdim=True)
        if "neuron" not in state:
            state["neuron"] = torch.zeros_like(mean_square)
        running = state["neuron"].lerp_(mean_square, 1 - beta)
        scaled = update / (running.sqrt() + NORM_EPS)
        before, after = (x.norm(dim=(-2, -1), keepdim=True) for x in (update, scaled))
        return scaled * (before / (after + NORM_EPS))


def run_split(streams: StreamPool | None, function: Callable[..., None], *lists: Sequence[Any]) -> None:
    """Call `function` on parallel lists, whole or, with `streams`, in up to MAX_STREAMS slices of each."""
    if streams is None:
        function(*lists)
        return
    groups = range(min(MAX_STREAMS, len(lists[0])))
    tasks = [functools.partial(function, *(each[k::MAX_STREAMS] for each in lists)) for k in groups]
    streams(tasks, lists[0][0].device)


def _split_batch(batch: Tensor, counts: list[int], parameters: list[Tensor]) -> list[Tensor]:
    """Split a (count, rows, columns) batch into views with the parameters' shapes."""
    return [
        (part if p.shape[-2] <= p.shape[-1] else part.mT).view(p.shape)
        for part, p in zip(batch.split(counts), parameters, strict=True)
    ]
