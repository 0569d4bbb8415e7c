"""The optimizer step of the paper's authors in fp64, one matrix at a time: what ours is compared with.

Written from a description of their implementation, without any of our optimizer code: Muon with momentum that
warms up, EMA-Nesterov, row normalization, Polar Express, variance reduction, the shape factor and cautious
decay for block matrices; AdamW with plain decoupled decay for embedding and head; one learning-rate schedule
with a re-warm after growth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def learning_rate_factor(
    step: int, steps: int, warmup: int, warmdown: float, growth_step: int | None = None, rewarm: int = 40
) -> float:
    """The fraction of the peak rate at a step."""
    decay_start = max(warmup, steps - round(warmdown * steps))
    if step < warmup:
        factor = (step + 1) / warmup
    elif step < decay_start:
        factor = 1.0
    elif step == steps - 1:
        factor = 0.0
    else:
        factor = (steps - 1 - step) / (steps - 1 - decay_start)
    if growth_step is not None and growth_step <= step < growth_step + rewarm:
        factor *= (step - growth_step) / rewarm
    return factor


def muon_momentum(step: int, warmup: int = 300) -> float:
    """0.85 rising to 0.95 over the first `warmup` steps."""
    return 0.85 + 0.10 * min(step / warmup, 1.0)


def polar_express(update: Tensor) -> Tensor:
    """Five steps of Polar Express on one (rows, columns) matrix."""
    x = update / (1.02 * update.norm() + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        if x.shape[0] > x.shape[1]:
            gram = x.T @ x
            x = a * x + x @ (b * gram + c * gram @ gram)
        else:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@dataclass
class MuonMatrix:
    """One logical block matrix (out, in) and its state."""

    weight: Tensor
    momentum: Tensor = field(init=False)
    second_moment: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows, columns = self.weight.shape
        self.momentum = torch.zeros_like(self.weight)
        self.second_moment = self.weight.new_zeros((rows, 1) if rows >= columns else (1, columns))

    def step(self, gradient: Tensor, momentum: float, lr: float, weight_decay: float) -> None:
        """One update in place."""
        m = momentum
        self.momentum += (1 - m) * (gradient - self.momentum)
        update = (1 - m) * gradient + m * self.momentum
        update = update / update.norm(dim=1, keepdim=True).clamp_min(1e-7)
        update = polar_express(update)
        rows, columns = self.weight.shape
        mean_square = update.square().mean(dim=1 if rows >= columns else 0, keepdim=True)
        self.second_moment += 0.05 * (mean_square - self.second_moment)
        before = update.norm()
        update = update * self.second_moment.clamp_min(1e-10).rsqrt()
        update = update * (before / update.norm().clamp_min(1e-10))
        rate = lr * math.sqrt(max(1.0, rows / columns))
        decay = weight_decay * self.weight * (update * self.weight >= 0)
        self.weight -= rate * update + rate * decay


@dataclass
class AdamWTensor:
    """Embedding or head and its state."""

    weight: Tensor
    first: Tensor = field(init=False)
    second: Tensor = field(init=False)
    count: int = 0

    def __post_init__(self) -> None:
        self.first, self.second = torch.zeros_like(self.weight), torch.zeros_like(self.weight)

    def step(
        self, gradient: Tensor, lr: float, weight_decay: float, betas: tuple[float, float], eps: float
    ) -> None:
        """One update in place: decoupled decay first."""
        self.count += 1
        self.weight *= 1 - lr * weight_decay
        self.first += (1 - betas[0]) * (gradient - self.first)
        self.second += (1 - betas[1]) * (gradient.square() - self.second)
        mean = self.first / (1 - betas[0] ** self.count)
        variance = self.second / (1 - betas[1] ** self.count)
        self.weight -= lr * mean / (variance.sqrt() + eps)
