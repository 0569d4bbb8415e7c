"""One optimizer step: the gradients of a global batch, their norm, the weight update.

The step of a small network is hundreds of kernels of a few microseconds each, which the host cannot launch
as fast as the GPU runs them. Such a step is captured once as a CUDA graph and replayed from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from steepen.distributed.sharded_optimizer import DistributedOptimizer, ShardedOptimizer
from steepen.execution.cuda_graphs import CudaGraphCache
from steepen.model.loss import mean_loss
from steepen.model.network import Network
from steepen.optim.optimizer import Optimizer
from steepen.runs.spec import RunSpec
from steepen.training.device import process_age, synchronize
from steepen.training.gradient_accumulation import GradientAccumulator, accumulate


class TrainStep:
    """Runs optimizer steps; with `cuda_graphs`, replays one CUDA graph per number of passes.

    On several ranks a graph holds forward and backward only: collectives stay outside.
    """

    def __init__(
        self,
        network: Network,
        optimizer: Optimizer | DistributedOptimizer,
        accumulator: GradientAccumulator,
        *,
        cuda_graphs: bool,
        print_message: Callable[[str], None],
    ) -> None:
        self.network, self.optimizer, self.accumulator = network, optimizer, accumulator
        self.cuda_graphs, self.print_message = cuda_graphs, print_message
        self.captured = CudaGraphCache()  # by number of passes
        # On several ranks: the gradients that a graph writes, by number of passes.
        self.written: dict[int, list[tuple[nn.Parameter, Tensor]]] = {}

    def __call__(
        self, inputs: Tensor, targets: Tensor, passes: int, factor: float, step: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Step at `factor` times the peak learning rates; returns the loss and the gradient norm.

        `step` is the number of the step, for Muon's momentum; without it, momentum is as last set.
        """
        captured = self.captured.get(passes)
        if captured is not None and isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.wait_for_weights()  # a replay does not call the hooks that wait
            (loss,) = captured.replay(inputs, targets)
            for parameter, gradient in self.written[passes]:
                parameter.grad = gradient
            norm = self.optimizer.step(factor, step)
            self.optimizer.zero_grad()
            return loss, norm
        if captured is not None:
            assert isinstance(self.optimizer, Optimizer)
            self.optimizer.set_lr_factor(factor)
            if step is not None:
                self.optimizer.set_momentum(step)
            loss, norm = captured.replay(inputs, targets)
            return loss, norm
        loss = self.accumulator(inputs, targets, passes)
        norm = self.optimizer.step(factor, step)
        self.optimizer.zero_grad()
        if self.cuda_graphs:
            self._capture(inputs, targets, passes)
        return loss, norm

    def warmup_and_capture(self, inputs: Tensor, targets: Tensor, passes: int) -> None:
        """Run a step, capture it and undo it, so that compilation and capture happen before the timer starts.

        Does nothing without CUDA graphs: only small networks use them, whose weights and optimizer state
        are cheap to copy.
        """
        if not self.cuda_graphs or isinstance(self.optimizer, DistributedOptimizer):
            return  # on several ranks the first step is captured: released weights cannot be restored
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
                for key, value in state.items():  # newly created state starts at zero, as if it were absent
                    value.copy_(before[name][key]) if name in before else value.zero_()
        self.network.refresh()

    def reset(self) -> None:
        """Drop the captured graphs, which are stale once the network grows or optimizer state is replaced."""
        self.captured.clear()
        self.written.clear()

    def _capture(self, inputs: Tensor, targets: Tensor, passes: int) -> None:
        """Capture a step like the one just run, which has allocated the optimizer state.

        Gradients are None before the capture, so the graph writes the first micro-batch's gradients and adds
        the others to them.
        """

        optimizer = self.optimizer
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.wait_for_weights()

        def gradients(inputs: Tensor, targets: Tensor) -> tuple[Tensor]:
            size, rows = self.accumulator.micro_batch, len(inputs) * self.accumulator.ranks
            return (accumulate(self.network, inputs, targets, passes, size, global_rows=rows),)

        def step(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            # Not through the accumulator: out of memory, it would retry with a smaller micro-batch and leave
            # the kernels captured so far in the graph.
            assert isinstance(optimizer, Optimizer)
            loss = accumulate(self.network, inputs, targets, passes, self.accumulator.micro_batch)
            return loss, optimizer.step_at_current_lr()

        sharded = isinstance(optimizer, ShardedOptimizer)
        try:
            self.captured.capture(passes, gradients if sharded else step, inputs, targets)
            if sharded:
                found = [(p, p.grad) for p in self.network.parameters()]
                self.written[passes] = [(p, gradient) for p, gradient in found if gradient is not None]
        except RuntimeError as error:
            self.cuda_graphs = False
            self.reset()
            self.print_message(
                f"CUDA graph capture failed ({str(error).splitlines()[0]}); going on without graphs."
            )
        finally:
            self.optimizer.zero_grad()  # these gradients live in the graph's memory pool
        if isinstance(optimizer, ShardedOptimizer) and not optimizer.world.minimum(self.cuda_graphs):
            # Ranks with and without graphs would reduce gradients in different orders.
            self.cuda_graphs = False
            self.reset()


def warm_up(train_step: TrainStep, spec: RunSpec, passes: int, print_message: Callable[[str], None]) -> None:
    """Compile and capture every kernel of a step and of validation, so that no timed step pays for it.

    Runs them on token 0; weights, optimizer state and random state are as before afterwards.
    """
    started = time.monotonic()
    network, optimizer, accumulator = train_step.network, train_step.optimizer, train_step.accumulator
    device = network.embedding.device
    shape = spec.batch_tokens // network.shape.context, network.shape.context
    tokens = torch.zeros(shape, dtype=torch.long, device=device)
    size = accumulator.micro_batch
    devices = [device] if device.type == "cuda" else []
    # A checkpoint saved just before growth holds the network that is still to grow.
    passes = min(passes, network.passes)
    with torch.random.fork_rng(devices):  # custom blocks may draw random numbers
        with accumulator.without_sink():
            accumulator(tokens[:size], tokens[:size], passes)
        optimizer.zero_grad()
        optimizer.warm_up()
        train_step.warmup_and_capture(tokens, tokens, passes)
    size = accumulator.micro_batch
    mean_loss(network, [(tokens[:size], tokens[:size])])
    synchronize(device)
    age = process_age()
    since = "" if age is None else f", {age:.1f} s after the process started"
    print_message(f"kernels ready in {time.monotonic() - started:.1f} s{since}.")
