"""One optimizer step: gradients of a global batch, their norm, the update.

A small network's step is hundreds of kernels of a few microseconds, and the host cannot launch them as fast
as the GPU runs them. There the whole step is recorded once as a CUDA graph and then replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steepen.model.network import Network
from steepen.optim.optimizer import Optimizer
from steepen.training.gradient_accumulation import GradientAccumulator, accumulate


@dataclass
class _Graph:
    """A recorded step, and where it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    targets: Tensor
    loss: Tensor
    norm: Tensor


class TrainStep:
    """Makes steps; with `graphs`, by replaying one recorded for each number of passes."""

    def __init__(
        self,
        network: Network,
        optimizer: Optimizer,
        accumulator: GradientAccumulator,
        *,
        graphs: bool,
        say: Callable[[str], None],
    ) -> None:
        self.network, self.optimizer, self.accumulator = network, optimizer, accumulator
        self.graphs, self.say = graphs, say
        self.recorded: dict[int, _Graph] = {}
        self.pool: Any = None  # of memory, shared by the graphs: they never run at once

    def __call__(self, inputs: Tensor, targets: Tensor, passes: int, factor: float) -> tuple[Tensor, Tensor]:
        """Make a step at this share of the learning rates; returns the loss and the gradient's norm."""
        recorded = self.recorded.get(passes)
        if recorded is not None:
            self.optimizer.set_rates(factor)
            recorded.inputs.copy_(inputs, non_blocking=True)
            recorded.targets.copy_(targets, non_blocking=True)
            recorded.graph.replay()
            return recorded.loss.clone(), recorded.norm.clone()
        loss = self.accumulator(inputs, targets, passes)
        norm = self.optimizer.step(factor)
        self.optimizer.zero_grad()
        if self.graphs:
            self._record(inputs, targets, passes)
        return loss, norm

    def warmup_and_capture(self, inputs: Tensor, targets: Tensor, passes: int) -> None:
        """Make a step and undo it, so that kernels are compiled and the step recorded before it counts.

        Only where steps are recorded: the copies of weights and state that it takes are then small.
        """
        if not self.graphs:
            return
        parameters = list(self.network.parameters())
        weights = [p.detach().clone() for p in parameters]
        before = {
            name: {key: value.clone() for key, value in state.items()}
            for name, state in self.optimizer.state().items()
        }
        self(inputs, targets, passes, 0.0)
        with torch.no_grad():
            for parameter, old in zip(parameters, weights, strict=True):
                parameter.copy_(old)
            for name, state in self.optimizer.state().items():
                for key, value in state.items():  # where there was none, zeros are the same as none
                    value.copy_(before[name][key]) if name in before else value.zero_()
        self.network.refresh()

    def reset(self) -> None:
        """Forget what was recorded: the network or the optimizer's state is no longer what it was."""
        self.recorded.clear()
        self.pool = None  # it goes with the last graph that uses it

    def _record(self, inputs: Tensor, targets: Tensor, passes: int) -> None:
        """Record a step like the one just made, whose optimizer state now has its place.

        There are no gradients before it, so what is recorded writes the first of each and adds the others.
        """
        inputs, targets = inputs.clone(), targets.clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (the one that prepares batches) may go on talking to the driver.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                # Not by the accumulator: where memory runs out it would begin again, and what was recorded
                # until then would stay in the graph.
                loss = accumulate(self.network, inputs, targets, passes, self.accumulator.micro_batch)
                norm = self.optimizer.apply()
        except RuntimeError as error:
            self.graphs = False
            self.reset()
            self.say(f"steps are not recorded as a graph ({str(error).splitlines()[0]}); going on without.")
            return
        finally:
            self.optimizer.zero_grad()  # they were the graph's
        self.pool = self.pool or graph.pool()
        self.recorded[passes] = _Graph(graph, inputs, targets, loss, norm)
