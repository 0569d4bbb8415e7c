"""Gradient accumulation: the gradients of a global batch, computed in micro-batches that fit in memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from steepen.errors import SteepenError, is_out_of_memory
from steepen.model.network import Network


class OutOfMemory(SteepenError):
    """The micro-batch does not fit."""


def accumulate(network: Network, inputs: Tensor, targets: Tensor, passes: int, micro_batch: int) -> Tensor:
    """Backpropagate the mean loss of a batch (rows, time) in micro-batches; returns the loss, a scalar."""
    rows = len(inputs)
    dtype = torch.float64 if inputs.device.type == "cpu" else torch.float32
    total = torch.zeros((), dtype=dtype, device=inputs.device)
    for first in range(0, rows, micro_batch):
        rows_slice = slice(first, first + micro_batch)
        loss_scale = len(inputs[rows_slice]) / rows
        loss = network(inputs[rows_slice], targets[rows_slice], passes=passes, loss_scale=loss_scale)
        loss.backward()
        total += loss.detach()
    return total


class GradientAccumulator:
    """Computes gradients with a fixed micro-batch, or with the largest that fits.

    Without a fixed size it starts from a guess and halves at each out-of-memory error, also after growth.
    """

    def __init__(self, network: Network, rows: int, fixed: int | None, say: Callable[[str], None]) -> None:
        self.network, self.fixed, self.say = network, fixed, say
        self.rows = rows
        self.micro_batch = min(rows, fixed or first_guess(network, rows))

    def __call__(self, inputs: Tensor, targets: Tensor, passes: int) -> Tensor:
        """Return the mean loss; gradients are in the parameters' `.grad`."""
        while True:
            try:
                return accumulate(self.network, inputs, targets, passes, self.micro_batch)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = error
            self._free()
            if self.fixed is not None:
                raise self._suggestion(inputs, targets, passes) from reason
            if self.micro_batch == 1:
                raise OutOfMemory(
                    "out of memory even with one sequence at a time; use a smaller depth or context, "
                    "or a device with more memory."
                ) from reason
            self.micro_batch = largest_below(self.micro_batch, self.rows)
            self.say(f"out of memory: continuing with a micro-batch of {self.micro_batch}.")

    def _suggestion(self, inputs: Tensor, targets: Tensor, passes: int) -> OutOfMemory:
        """Find a micro-batch that fits and name it in the error."""
        too_large = size = self.micro_batch
        while size > 1:
            size = largest_below(size, self.rows)
            try:
                accumulate(self.network, inputs[:size], targets[:size], passes, size)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self._free()
                continue
            self._free()
            return OutOfMemory(
                f"a micro-batch of {too_large} sequences does not fit in memory; {size} does: "
                f"use --micro-batch {size}, or --micro-batch auto."
            )
        return OutOfMemory(
            f"a micro-batch of {too_large} sequences does not fit in memory, nor does a single one; "
            "use a smaller depth or context, or a device with more memory."
        )

    def _free(self) -> None:
        for parameter in self.network.parameters():
            parameter.grad = None
        gc.collect()
        if self.network.embedding.is_cuda:
            torch.cuda.empty_cache()


def largest_below(size: int, rows: int) -> int:
    """Largest divisor of `rows` that is at most size/2, so that all micro-batches are equal."""
    return max(d for d in range(1, max(1, size // 2) + 1) if rows % d == 0)


def first_guess(network: Network, rows: int) -> int:
    """Initial micro-batch: enough tokens to keep a GPU busy, or few enough for a CPU's caches."""
    tokens = 65_536 if network.embedding.is_cuda else 8_192
    limit = max(1, tokens // network.shape.context)
    return max(d for d in range(1, min(rows, limit) + 1) if rows % d == 0)
