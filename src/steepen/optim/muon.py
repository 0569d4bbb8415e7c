"""Muon: momentum, orthogonalised matrix by matrix, batched by shape.

`torch.optim.Muon` steps one 2-D tensor after another in bf16; a network of many equal matrices is several
times faster in one batched product, and stacks of logical matrices must be split before orthogonalising.
"""

# The multi-tensor operators carry an underscore in torch, and are what its own optimizers are made of.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steepen.execution.cuda_streams import StreamPool, run_sequentially
from steepen.kernels import eager, kernels_for
from steepen.model.growth import State
from steepen.optim.config import OptimizerConfig

# Odd polynomials a·x + b·x³ + c·x⁵ applied to the singular values, step by step; the last repeats.
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),)
# Minimax-optimal per step for singular values from 1e-3 up (Amsel et al., "The Polar Express", 2025).
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# Polar Express needs every singular value at or below one with a little room to spare.
SAFETY = {"newton-schulz": 1.0, "polar-express": 1.02}
COEFFICIENTS = {"newton-schulz": NEWTON_SCHULZ, "polar-express": POLAR_EXPRESS}
TINY = 1e-7  # guards the norm: with output projections at zero the first gradients are exactly zero

# Rows from which the kernels for symmetric products are used: at 384 they are faster than torch's batched
# product (docs/performance.md), smaller matrices were not measured.
SYMMETRIC_FROM = 256
AT_ONCE = 6  # streams for the parameters of a shape, at most: torch has 32 in all


def orthogonalise(matrices: Tensor, method: str = "newton-schulz", steps: int = 5) -> Tensor:
    """Each matrix of a (count, rows, columns) stack, rows ≤ columns, its singular values brought near 1."""
    x = kernels_for(matrices).normalised(matrices, SAFETY[method], TINY)
    table = COEFFICIENTS[method]
    kernels = kernels_for(x) if x.shape[-2] >= SYMMETRIC_FROM else eager
    gram = polynomial = None
    for step in range(steps):
        a, b, c = table[min(step, len(table) - 1)]
        gram = kernels.gram(x, out=gram)
        # a·x goes into the polynomial as a·I: added to the product, it would be a pass over x of its own.
        polynomial = kernels.symmetric_polynomial(gram, b, c, a=a, out=polynomial)
        x = torch.bmm(polynomial, x)
    return x


class Muon:
    """Steps named stacks of logical matrices, (…, out, in); `state` holds momentum by parameter name."""

    def __init__(self, parameters: dict[str, nn.Parameter], choice: OptimizerConfig) -> None:
        self.choice = choice
        self.parameters = parameters
        self.state: State = {}
        self.sides: defaultdict[tuple[int, int], StreamPool] = defaultdict(StreamPool)  # by shape

    def step(self, lr: float | Tensor, weight_decay: float) -> None:
        """One step: the rate is scaled by max(1, out/in)^½; decay is decoupled, lr·wd."""
        run_sequentially(self.works(lr, weight_decay))

    def works(
        self, lr: float | Tensor, weight_decay: float, *, at_once: bool = False
    ) -> list[Callable[[], None]]:
        """A step's parts, one for each shape of matrix, in any order or at once.

        With `at_once`, for a GPU, what can be done at once within a part is, too. A rate that is a tensor
        stays on its device, so that a captured step can be replayed at another rate.
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
            functools.partial(self._step_bucket, names, *shape, lr, weight_decay, at_once)
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
        at_once: bool,
    ) -> None:
        """Step all matrices of a shape; a tall matrix is its transpose's, so both kinds share a batch."""
        choice = self.choice
        parameters: list[Tensor] = [self.parameters[name] for name in names]
        gradients = [p.grad for p in parameters if p.grad is not None]
        momenta = [self.state[name]["momentum"] for name in names]
        kernels = kernels_for(parameters[0])
        # bf16 is what the GPU multiplies fast; a CPU has no fast bf16.
        precision = torch.bfloat16 if parameters[0].is_cuda else parameters[0].dtype
        counts = [p.numel() // (rows * columns) for p in parameters]
        batch = torch.empty(sum(counts), rows, columns, dtype=precision, device=parameters[0].device)
        sides = self.sides[rows, columns] if at_once else None
        follow = functools.partial(kernels.momentum_into, beta=choice.momentum, nesterov=choice.nesterov)
        spread(sides, follow, _parts(batch, counts, parameters), gradients, momenta)
        done = orthogonalise(batch, choice.orthogonalisation, choice.orthogonalisation_steps)
        updates = _parts(done, counts, parameters)
        scales = [max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5 for p in parameters]
        if not choice.neuron_norm and not choice.cautious_decay:
            add = functools.partial(kernels.decay_and_add, lr=lr, weight_decay=weight_decay)
            spread(sides, add, parameters, updates, scales)
            return
        updates = [update.to(p.dtype) for update, p in zip(updates, parameters, strict=True)]
        if choice.neuron_norm:
            updates = [self._by_neuron(name, update) for name, update in zip(names, updates, strict=True)]
        updates = [update * (lr * -scale) for update, scale in zip(updates, scales, strict=True)]
        decay(parameters, updates, lr, weight_decay, cautious=choice.cautious_decay)
        torch._foreach_add_(parameters, updates)

    def _by_neuron(self, name: str, update: Tensor) -> Tensor:
        """NorMuon (Li et al., 2025): divide each output row by its running size, keeping the norm."""
        state, beta = self.state[name], self.choice.neuron_beta2
        size = update.square().mean(-1, keepdim=True)
        if "neuron" not in state:
            state["neuron"] = torch.zeros_like(size)
        running = state["neuron"].lerp_(size, 1 - beta)
        scaled = update / (running.sqrt() + TINY)
        before, after = (x.norm(dim=(-2, -1), keepdim=True) for x in (update, scaled))
        return scaled * (before / (after + TINY))


def spread(sides: StreamPool | None, work: Callable[..., None], *lists: Sequence[Any]) -> None:
    """Do a work on lists of things that belong together, or on some of each beside the others."""
    if sides is None:
        work(*lists)
        return
    groups = range(min(AT_ONCE, len(lists[0])))
    works = [functools.partial(work, *(each[k::AT_ONCE] for each in lists)) for k in groups]
    sides(works, lists[0][0].device)


def _parts(batch: Tensor, counts: list[int], parameters: list[Tensor]) -> list[Tensor]:
    """The batch cut up again, each part a view with its parameter's shape."""
    return [
        (part if p.shape[-2] <= p.shape[-1] else part.mT).view(p.shape)
        for part, p in zip(batch.split(counts), parameters, strict=True)
    ]


def decay(
    parameters: list[Tensor],
    updates: list[Tensor],
    lr: float | Tensor,
    weight_decay: float,
    *,
    cautious: bool,
) -> None:
    """Decoupled weight decay; the cautious kind leaves alone the weights that the update makes larger."""
    if weight_decay == 0:
        return
    amount = lr * weight_decay
    if not cautious:
        torch._foreach_mul_(parameters, 1 - amount)
        return
    for parameter, update in zip(parameters, updates, strict=True):
        shrinking = (parameter * update <= 0).to(parameter.dtype)
        parameter.mul_(1 - amount * shrinking)
