"""Muon: momentum, orthogonalised matrix by matrix, batched by shape.

`torch.optim.Muon` steps one 2-D tensor after another in bf16; a network of many equal matrices is several
times faster in one batched product, and stacks of logical matrices must be split before orthogonalising.
"""

# The multi-tensor operators carry an underscore in torch, and are what its own optimizers are made of.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from steepen.model.growth import State
from steepen.runs.spec import OptimizerChoice

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


def orthogonalise(matrices: Tensor, method: str = "newton-schulz", steps: int = 5) -> Tensor:
    """Each matrix of a (count, rows, columns) stack, rows ≤ columns, its singular values brought near 1."""
    size = matrices.norm(dim=(-2, -1), keepdim=True)
    x = matrices / (size * SAFETY[method] + TINY)
    table = COEFFICIENTS[method]
    for step in range(steps):
        a, b, c = table[min(step, len(table) - 1)]
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon:
    """Steps named stacks of logical matrices, (…, out, in); `state` holds momentum by parameter name."""

    def __init__(self, parameters: dict[str, nn.Parameter], choice: OptimizerChoice) -> None:
        self.choice = choice
        self.parameters = parameters
        self.state: State = {}

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float) -> None:
        """One step: the rate is scaled by max(1, out/in)^½; decay is decoupled, lr·wd."""
        named = [(name, p, p.grad) for name, p in self.parameters.items() if p.grad is not None]
        if not named:
            return
        names = [name for name, _, _ in named]
        parameters: list[Tensor] = [p for _, p, _ in named]
        gradients = [gradient for _, _, gradient in named]
        for name, parameter in zip(names, parameters, strict=True):
            if name not in self.state:
                self.state[name] = {"momentum": torch.zeros_like(parameter)}
        momentum = [self.state[name]["momentum"] for name in names]
        beta = self.choice.momentum
        torch._foreach_lerp_(momentum, gradients, 1 - beta)
        nesterov = self.choice.nesterov
        directions = list(torch._foreach_lerp(gradients, momentum, beta)) if nesterov else momentum
        updates = self._orthogonalise_all(directions)
        if self.choice.neuron_norm:
            updates = [self._by_neuron(n, u) for n, u in zip(names, updates, strict=True)]
        rates = [-lr * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5 for p in parameters]
        torch._foreach_mul_(updates, rates)
        decay(parameters, updates, lr * weight_decay, cautious=self.choice.cautious_decay)
        torch._foreach_add_(parameters, updates)

    def _orthogonalise_all(self, directions: list[Tensor]) -> list[Tensor]:
        """All matrices of a shape at once; a tall matrix is its transpose's, so both kinds share a batch."""
        buckets: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for index, direction in enumerate(directions):
            rows, columns = direction.shape[-2:]
            buckets[min(rows, columns), max(rows, columns)].append(index)
        results: list[Tensor] = list(directions)
        for (rows, columns), indices in buckets.items():
            flat = [
                (d if d.shape[-2] <= d.shape[-1] else d.mT).reshape(-1, rows, columns)
                for d in (directions[i] for i in indices)
            ]
            # bf16 is what the GPU multiplies fast; a CPU has no fast bf16.
            precision = torch.bfloat16 if flat[0].is_cuda else flat[0].dtype
            choice = self.choice
            done = orthogonalise(
                torch.cat(flat).to(precision), choice.orthogonalisation, choice.orthogonalisation_steps
            )
            for index, part in zip(indices, done.split([len(f) for f in flat]), strict=True):
                like = directions[index]
                turned = part if like.shape[-2] <= like.shape[-1] else part.mT
                results[index] = turned.reshape(like.shape).to(like.dtype, copy=True)
        return results

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


def decay(parameters: list[Tensor], updates: list[Tensor], amount: float, *, cautious: bool) -> None:
    """Decoupled weight decay; the cautious kind leaves alone the weights that the update makes larger."""
    if amount == 0:
        return
    if not cautious:
        torch._foreach_mul_(parameters, 1 - amount)
        return
    for parameter, update in zip(parameters, updates, strict=True):
        shrinking = (parameter * update <= 0).to(parameter.dtype)
        parameter.mul_(1 - amount * shrinking)
