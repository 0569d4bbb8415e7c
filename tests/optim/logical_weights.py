"""A run's spec and weights in the terms of the reference of the authors' training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steepen.runs.spec import RunSpec

from ..model.authors_network import Operator
from .authors_training import MATRICES, Settings, Weights

# α of the boundary operator by arm; stacks without a repeated core and those called vanilla have none.
ALPHA = {
    "operator-1": 1.0,
    "loop-2": 0.707106781187,
    "loop-grow": 0.707106781187,
    "untied-2": 1.0,
    "untied-grow": 1.0,
}
STACKS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
SINGLE = {"out": "o", "down": "down"}


def settings_of(spec: RunSpec, growth_step: int | None, **changes: Any) -> Settings:
    """The reference's settings for a run that grows before `growth_step`, if at all."""
    hyper, blocks, name = spec.hyperparameters, spec.shape.allocation, spec.arm.name
    passes = 1 if name in ("vanilla", "operator-1") else 2
    return Settings(
        prelude=blocks.prelude,
        core=blocks.core,
        coda=blocks.coda,
        tied=name in ("vanilla", "operator-1", "loop-2", "loop-grow"),
        passes=passes,
        grown_passes=passes if growth_step is None else 4,
        growth_step=growth_step,
        heads=spec.shape.heads,
        real_vocabulary=spec.shape.token_ids,
        operator=Operator(ALPHA[name]) if name in ALPHA else None,
        residual_multiplier=hyper.residual_multiplier,
        output_multiplier=hyper.output_multiplier,
        learning_rate=hyper.learning_rate,
        embedding_lr_multiplier=hyper.embedding_lr_multiplier,
        head_lr_multiplier=hyper.head_lr_multiplier,
        weight_decay=hyper.weight_decay,
        betas=(hyper.beta1, hyper.beta2),
        eps=hyper.adam_eps,
        steps=spec.steps,
        warmup=hyper.warmup_steps,
        warmdown=hyper.warmdown_fraction,
        **changes,
    )


def logical(named: Mapping[str, Tensor], heads: int) -> Weights:
    """Our parameters, or their gradients, as the reference's matrices.

    The authors' RoPE turns the other way: the second half of every query and key has the opposite sign.
    """
    found: Weights = {}
    for name, tensor in named.items():
        block, _, key = name.rpartition(".")
        if key in STACKS:
            found |= {f"{block}.{part}": each for part, each in zip(STACKS[key], tensor, strict=True)}
        else:
            found[f"{block}.{SINGLE[key]}" if block else name] = tensor
    for name, matrix in found.items():
        if name.endswith((".q", ".k")):
            half = matrix.shape[0] // heads // 2
            sign = torch.tensor([1.0] * half + [-1.0] * half, dtype=matrix.dtype).repeat(heads)
            found[name] = sign[:, None] * matrix
    return found


def with_waiting_cores(weights: Weights, settings: Settings) -> Weights:
    """The weights with cores that wait for growth, at values that must not matter."""
    found = dict(weights)
    generator = torch.Generator().manual_seed(0)
    for core in range(settings.passes, settings.cores):
        for block in range(settings.core):
            for key in MATRICES:
                like = weights[f"cores.0.{block}.{key}"]
                values = torch.randn(like.shape, generator=generator, dtype=torch.float64)
                found[f"cores.{core}.{block}.{key}"] = values
    return found
