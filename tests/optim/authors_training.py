"""Training as the paper's authors do it, in fp64: network, growth, schedule and optimizer.

Written from a description of their code and without this package. A weight is named by its place, for example
`prelude.0.q` or `cores.3.1.down`. An untied network that grows has all its cores from the start: those that
wait have gradients of zero, are decayed, and are overwritten at growth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model import authors_network
from . import authors_step

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """A run: its network, its hyperparameters and its schedule."""

    prelude: int  # blocks
    core: int
    coda: int
    tied: bool
    passes: int  # at the start
    grown_passes: int  # from `growth_step` on
    growth_step: int | None
    heads: int
    real_vocabulary: int
    operator: authors_network.Operator | None
    residual_multiplier: float
    output_multiplier: float
    learning_rate: float
    embedding_lr_multiplier: float
    head_lr_multiplier: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    steps: int
    warmup: int
    warmdown: float
    rewarm: int = 40
    momentum_warmup: int = 300

    @property
    def cores(self) -> int:
        """Cores that are stored, those that wait for growth included."""
        return 1 if self.tied else self.grown_passes

    def grown(self, step: int) -> bool:
        """Whether a step is run with the passes after growth."""
        return self.growth_step is not None and step >= self.growth_step

    def passes_at(self, step: int) -> int:
        """Core passes of a step."""
        return self.grown_passes if self.grown(step) else self.passes


class AuthorsTraining:
    """A network with its optimizer, one object per matrix."""

    def __init__(self, settings: Settings, weights: Mapping[str, Tensor]) -> None:
        self.settings = settings
        self.matrices: dict[str, authors_step.MuonMatrix] = {}
        self.tensors: dict[str, authors_step.AdamWTensor] = {}
        for name, weight in weights.items():
            own = weight.detach().double().clone()
            if name in ("embedding", "head"):
                self.tensors[name] = authors_step.AdamWTensor(own)
            else:
                self.matrices[name] = authors_step.MuonMatrix(own)

    @property
    def weights(self) -> Weights:
        """Every weight, also of cores that wait for growth."""
        return {name: each.weight for name, each in {**self.tensors, **self.matrices}.items()}

    def waiting(self, step: int) -> set[str]:
        """Weights of the cores that a step does not run."""
        first = 1 if self.settings.tied else self.settings.passes_at(step)
        return {name for core in range(first, self.settings.cores) for name in self._names(f"cores.{core}")}

    def grow(self) -> None:
        """Before the forward pass of the growth step: core j becomes core j mod 2, optimizer state stays."""
        settings = self.settings
        for core in range(settings.passes, settings.cores):
            source = core % settings.passes
            pairs = zip(self._names(f"cores.{core}"), self._names(f"cores.{source}"), strict=True)
            for new, old in pairs:
                self.matrices[new].weight.copy_(self.matrices[old].weight)

    def logits(self, step: int, tokens: Tensor, weights: Weights | None = None) -> Tensor:
        """Logits of a step's network, at the current weights or at these."""
        settings, leaves = self.settings, weights or self.weights

        def blocks(place: str, count: int) -> list[authors_network.Block]:
            return [
                authors_network.Block(*(leaves[f"{place}.{index}.{key}"] for key in MATRICES))
                for index in range(count)
            ]

        passes = range(settings.passes_at(step))
        return authors_network.logits(
            tokens,
            leaves["embedding"],
            blocks("prelude", settings.prelude),
            [blocks(f"cores.{0 if settings.tied else k}", settings.core) for k in passes if settings.core],
            blocks("coda", settings.coda),
            leaves["head"],
            heads=settings.heads,
            residual=settings.residual_multiplier,
            output=settings.output_multiplier,
            operator=settings.operator,
            real_vocabulary=settings.real_vocabulary,
        )

    def gradients(self, step: int, tokens: Tensor, targets: Tensor) -> Weights:
        """Gradients of the mean loss at the current weights; zero where a core waits."""
        leaves = {name: weight.clone().requires_grad_() for name, weight in self.weights.items()}
        authors_network.loss(self.logits(step, tokens, leaves), targets).backward()
        return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}

    @torch.no_grad()
    def step(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Step every weight by its gradient."""
        run = self.settings
        factor = authors_step.learning_rate_factor(
            step, run.steps, run.warmup, run.warmdown, run.growth_step, run.rewarm
        )
        lr = run.learning_rate * factor
        momentum = authors_step.muon_momentum(step, run.momentum_warmup)
        for name, matrix in self.matrices.items():
            matrix.step(gradients[name].double(), momentum, lr, run.weight_decay)
        rates = {"embedding": run.embedding_lr_multiplier, "head": run.head_lr_multiplier}
        for name, tensor in self.tensors.items():
            tensor.step(gradients[name].double(), lr * rates[name], run.weight_decay, run.betas, run.eps)

    def _names(self, core: str) -> Iterable[str]:
        return (f"{core}.{index}.{key}" for index in range(self.settings.core) for key in MATRICES)
