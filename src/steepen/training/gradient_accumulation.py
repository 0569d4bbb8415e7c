"""Gradient accumulation: the gradients of a global batch, computed in micro-batches that fit in memory."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from steepen.errors import SteepenError, is_out_of_memory
from steepen.model.network import Network
from steepen.recipe.memory import automatic_micro_batch


class OutOfMemory(SteepenError):
    """The micro-batch does not fit."""


class GradientSink(Protocol):
    """Takes gradients that are summed over ranks (`distributed.sharded_optimizer`)."""

    @property
    def sums_gradients(self) -> bool:
        """Whether the sink itself sums the gradients of micro-batches."""
        ...

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch; in the `last`, gradients are taken as soon as they are complete."""
        ...

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Take a complete gradient."""
        ...


def accumulate(
    network: Network,
    inputs: Tensor,
    targets: Tensor,
    passes: int,
    micro_batch: int,
    *,
    global_rows: int | None = None,
    sink: GradientSink | None = None,
) -> Tensor:
    """Backpropagate the mean loss of a batch (rows, time) in micro-batches; returns the loss, a scalar.

    `global_rows` is the number of rows on all ranks together, of which this rank has `inputs`: the loss is
    then this rank's part of the mean, and `sink` takes the gradients. On a CPU the gradients of micro-batches
    are summed in fp64, so that the sum does not depend on the number of ranks.
    """
    rows = len(inputs)
    whole = global_rows or rows
    on_cpu = inputs.device.type == "cpu"
    sum_in_fp64 = on_cpu and micro_batch < whole and not (sink is not None and sink.sums_gradients)
    total = torch.zeros((), dtype=torch.float64 if on_cpu else torch.float32, device=inputs.device)
    sums: dict[str, Tensor] = {}
    for first in range(0, rows, micro_batch):
        rows_slice = slice(first, first + micro_batch)
        loss_weight = len(inputs[rows_slice]) / whole
        last = first + micro_batch >= rows
        with contextlib.nullcontext() if sink is None else sink.micro_batch(last=last and not sum_in_fp64):
            loss = network(inputs[rows_slice], targets[rows_slice], passes=passes, loss_weight=loss_weight)
            loss.backward()
        total += loss.detach()
        if sum_in_fp64:
            _move_gradients(network, sums)
    for name, gradient in reversed(sums.items()):
        if sink is not None:
            sink.add_gradient(name, gradient)
        else:
            parameter = network.get_parameter(name)
            parameter.grad = gradient.to(parameter.dtype)
    return total


def _move_gradients(network: Network, sums: dict[str, Tensor]) -> None:
    """Add the gradients to fp64 sums by parameter name and drop them."""
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            if name in sums:
                sums[name] += parameter.grad
            else:
                sums[name] = parameter.grad.double()
            parameter.grad = None


class GradientAccumulator:
    """Computes gradients with a fixed micro-batch, or with the largest that fits.

    Without a fixed size it starts from a guess and halves at each out-of-memory error. `grown` says that the
    network has grown since the fixed size was chosen: it is then the most, and halves too. Where not even one
    sequence fits, blocks are computed again in the backward (`Network.recompute`), unless `may_recompute` is
    false: smaller micro-batches come first, because they cost no FLOPs.
    """

    def __init__(
        self,
        network: Network,
        rows: int,
        fixed: int | None,
        print_message: Callable[[str], None],
        *,
        ranks: int = 1,
        sink: GradientSink | None = None,
        grown: bool = False,
        may_recompute: bool = True,
    ) -> None:
        self.network, self.print_message = network, print_message
        self.fixed, self.may_recompute = None if grown else fixed, may_recompute
        self.rows, self.ranks, self.sink = rows, ranks, sink  # rows of this rank
        start = automatic_micro_batch(rows, network.shape.context, gpu=network.embedding.is_cuda)
        self.micro_batch = self.largest = min(rows, fixed or start)

    def __call__(self, inputs: Tensor, targets: Tensor, passes: int) -> Tensor:
        """Return the mean loss, or this rank's part of it; gradients are in `.grad`, or given to the sink."""
        while True:
            try:
                return accumulate(
                    self.network,
                    inputs,
                    targets,
                    passes,
                    self.micro_batch,
                    global_rows=len(inputs) * self.ranks,
                    sink=self.sink,
                )
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = error
            if self.sink is not None:  # some gradients may have been sent: the step cannot be repeated
                raise OutOfMemory(
                    f"a micro-batch of {self.micro_batch} sequences does not fit in memory; "
                    f"use `micro_batch` = {max(1, self.micro_batch // 2)}, or more GPUs."
                ) from reason
            self._free()
            smaller = None if self.fixed is None else self._smaller_that_fits(inputs, targets, passes)
            if smaller is not None:
                raise OutOfMemory(
                    f"a micro-batch of {self.micro_batch} sequences does not fit in memory; {smaller} does: "
                    f"use `micro_batch` = {smaller}, or `micro_batch` auto."
                ) from reason
            if self.fixed is None and self.micro_batch > 1:
                self.micro_batch = largest_below(self.micro_batch, self.rows)
                self.print_message(f"out of memory: continuing with a micro-batch of {self.micro_batch}.")
            elif self.may_recompute and not self.network.recompute:
                self.network.recompute, self.micro_batch = True, self.largest
                self.print_message("out of memory: continuing with blocks recomputed in the backward.")
            else:
                raise OutOfMemory(
                    "out of memory even with one sequence at a time; use a smaller depth or context, "
                    "or a device with more memory."
                ) from reason

    @contextlib.contextmanager
    def without_sink(self) -> Generator[None]:
        """Leave gradients in `.grad` and do not communicate: to find a micro-batch that fits."""
        sink, self.sink = self.sink, None
        try:
            yield
        finally:
            self.sink = sink

    def _smaller_that_fits(self, inputs: Tensor, targets: Tensor, passes: int) -> int | None:
        """The largest smaller micro-batch that fits, for the error."""
        size = self.micro_batch
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
            return size
        return None

    def _free(self) -> None:
        for parameter in self.network.parameters():
            parameter.grad = None
        if self.network.fused is not None:  # of the forward that was not finished
            self.network.fused.signal.uses.clear()
        gc.collect()
        if self.network.embedding.is_cuda:
            torch.cuda.empty_cache()


def largest_below(size: int, rows: int) -> int:
    """Largest divisor of `rows` that is at most size/2, so that all micro-batches are equal."""
    return max(d for d in range(1, max(1, size // 2) + 1) if rows % d == 0)
