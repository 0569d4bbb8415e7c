"""One optimizer step: the gradients of a global batch, in micro-batches that fit; their norm; the update.

The step of a small network is hundreds of kernels of a few microseconds each, which the host cannot launch
as fast as the GPU runs them. Such a step is captured once as a CUDA graph and replayed from then on.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Collection, Generator

import torch
from torch import Tensor, nn

from steepen.distributed.sharded_optimizer import DistributedOptimizer, ShardedOptimizer
from steepen.errors import SteepenError, is_out_of_memory
from steepen.execution.cuda_graphs import CudaGraphCache
from steepen.kernels.parallel_compilation import compile_beforehand
from steepen.model.loss import mean_loss
from steepen.model.network import Network
from steepen.optim.optimizer import Optimizer
from steepen.recipe.memory import automatic_micro_batch
from steepen.runs.spec import RunSpec
from steepen.training.device import process_age, synchronize


class OutOfMemory(SteepenError):
    """The micro-batch does not fit."""


def accumulate(
    network: Network,
    inputs: Tensor,
    targets: Tensor,
    passes: int,
    micro_batch: int,
    *,
    global_rows: int | None = None,
    sink: DistributedOptimizer | None = None,
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
        sink: DistributedOptimizer | None = None,
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


def warm_up(
    train_step: TrainStep,
    spec: RunSpec,
    passes: int,
    print_message: Callable[[str], None],
    validated: Collection[int] = (),
) -> None:
    """Compile and capture every kernel of a step and of validation, so that no timed step pays for it.

    Runs them on token 0; weights, optimizer state and random state are as before afterwards. `validated` are
    numbers of windows that are validated together: a last batch of fewer windows has kernels of its own.
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

    def every_kernel() -> None:
        with accumulator.without_sink():
            accumulator(tokens[:size], tokens[:size], passes)
        optimizer.zero_grad()
        optimizer.warm_up()
        most = accumulator.micro_batch
        sizes = {most, *(min(most, count) for count in validated), *(count % most for count in validated)}
        mean_loss(network, [(tokens[:rows], tokens[:rows]) for rows in sorted(sizes - {0})], apart=0)

    with torch.random.fork_rng(devices):  # custom blocks may draw random numbers
        if network.fused is not None:
            compile_beforehand(device, every_kernel)
        every_kernel()
        train_step.warmup_and_capture(tokens, tokens, passes)
    synchronize(device)
    age = process_age()
    since = "" if age is None else f", {age:.1f} s after the process started"
    print_message(f"kernels ready in {time.monotonic() - started:.1f} s{since}.")
