"""ZeRO-1: every rank has the compute weights; the owner of a matrix has its fp32 weight and optimizer state.

Gradients accumulate whole on every rank and are reduced to owners once per step, in the last micro-batch.
A step: gradients are reduced to their owners (during the backward where the execution says when they are
ready), each owner steps its own parameters with the optimizer of a single process, and the new compute
weights are broadcast. The fused execution computes with bf16 copies, and its fp32 parameters are released on
all ranks but the owner; other executions read the fp32 parameters, which then stay on every rank.
"""

# torch's multi-tensor (foreach) operators have no public name.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from steepen.distributed.gradient_reducer import BUCKET_BYTES, GradientReducer, flatten
from steepen.distributed.owners import Piece, assign_owners, owned_by
from steepen.distributed.world import World
from steepen.optim.config import OptimizerConfig, OptimizerHyperparameters
from steepen.optim.muon import OptimizerState
from steepen.optim.optimizer import Optimizer


class ComputeCopy(Protocol):
    """A copy of a parameter in the compute dtype, which forward and backward read instead of it."""

    @property
    def weight(self) -> Tensor:
        """The copy, (rows, columns)."""
        ...

    @property
    def factor(self) -> float:
        """What the parameter is multiplied by in the copy."""
        ...

    def cast_rows_(self, first: int, values: Tensor) -> None:
        """Fill the rows from `first` on from fp32 values."""
        ...


@dataclass(frozen=True)
class OwnedPiece:
    """What a rank owns of one parameter: fp32 weight and optimizer state."""

    piece: Piece
    weight: Tensor
    state: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class _Broadcast:
    """New compute weights on their way from an owner."""

    work: Any
    names: frozenset[str]
    tensors: list[Tensor]  # where they go
    flat: Tensor  # in which they travel


def release(parameter: nn.Parameter) -> None:
    """Free the memory of a parameter but keep its shape and dtype: all elements are one zero."""
    zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    parameter.data = zero.expand(parameter.shape)


class DistributedOptimizer(ABC):
    """Steps the parameters that this rank owns: what `ShardedOptimizer` and `FullyShardedOptimizer` share.

    It has the interface of `Optimizer` that the trainer uses, and takes gradients. `masters`
    are the fp32 parameters that this rank steps, `pieces` says what is whose.
    """

    # Whether forward and backward may be captured in a CUDA graph, which leaves gradients in `.grad`;
    # collectives of a step are not captured.
    capturable = False
    collective_forward = False  # whether every forward gathers weights from all ranks
    sums_gradients = False  # whether gradients of micro-batches are summed outside `.grad` of plain tensors

    def __init__(
        self,
        pieces: list[Piece],
        masters: Mapping[str, nn.Parameter],
        hyperparameters: OptimizerHyperparameters,
        config: OptimizerConfig,
        world: World,
    ) -> None:
        self.world, self.config, self.pieces = world, config, pieces
        self.owned = owned_by(pieces, world.rank)
        self.local = Optimizer(
            masters.items(), hyperparameters, config, total_norm=self._total_norm, device=world.device
        )

    @abstractmethod
    def step(self, factor: float, step: int | None = None) -> Tensor:
        """Step at `factor` times the peak learning rates; returns the gradient norm before clipping."""

    @abstractmethod
    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; after the `last` one gradients are complete."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Set every gradient to None."""

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Take a complete gradient that is not in `.grad`, in any dtype."""
        raise NotImplementedError

    @property
    def orthogonalized(self) -> int:
        """Logical matrices that this rank has orthogonalized since the start."""
        return 0 if self.local.muon is None else self.local.muon.orthogonalized

    def _total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Norm over all ranks of the gradients that each owns."""
        device = self.world.device
        accumulate_dtype = torch.float64 if device.type == "cpu" else torch.float32
        total = torch.zeros((), dtype=accumulate_dtype, device=device)
        for norm in torch._foreach_norm(gradients, 2, dtype=accumulate_dtype) if gradients else ():
            total += norm.to(accumulate_dtype).square()
        return self.world.all_reduce_(total).sqrt_().float()

    def warm_up(self) -> None:
        """Compile the kernels of a Muon step."""
        self.local.warm_up()

    def state(self) -> OptimizerState:
        """State of the parameters that this rank owns, by name; of rows where they are shared out."""
        return self.local.state()

    def load_state(self, state: OptimizerState) -> None:
        """Replace the state of owned parameters."""
        self.local.load_state(state)

    def owned_pieces(self) -> list[OwnedPiece]:
        """fp32 weights and optimizer state that this rank owns; the tensors are the live ones."""
        state = self.local.state()
        return [
            OwnedPiece(piece, self.local.parameters[name].detach(), state.get(name, {}))
            for name, piece in self.owned.items()
        ]


class ShardedOptimizer(DistributedOptimizer):
    """ZeRO-1: steps the parameters that this rank owns and keeps all ranks' compute weights equal.

    Build it when the weights are in place. `copies` are the compute copies by parameter name;
    `after_broadcast` is called when they have changed.
    """

    capturable = True

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        hyperparameters: OptimizerHyperparameters,
        config: OptimizerConfig,
        world: World,
        *,
        copies: Mapping[str, ComputeCopy] | None = None,
        after_broadcast: Callable[[Collection[nn.Parameter]], None] | None = None,
    ) -> None:
        self.parameters = dict(named_parameters)
        self.copies, self.after_broadcast = dict(copies or {}), after_broadcast
        pieces = assign_owners({name: p.shape for name, p in self.parameters.items()}, world.size)
        masters = {name: self._master(piece) for name, piece in owned_by(pieces, world.rank).items()}
        super().__init__(pieces, masters, hyperparameters, config, world)
        self.reducer = GradientReducer(world, pieces)
        self.bytes_broadcast = 0  # since the start, over all owners
        self._arriving: list[_Broadcast] = []
        self._waits_in_forward = False
        self.released = [name for name in self.copies if name not in self.owned or not self.owned[name].whole]
        for name in self.released:
            release(self.parameters[name])
        self._overlapping = False
        self._names = {parameter: name for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def _master(self, piece: Piece) -> nn.Parameter:
        parameter = self.parameters[piece.name]
        if piece.whole:
            return parameter
        rows = parameter.detach()[piece.first : piece.last]
        return nn.Parameter(rows.clone() if piece.name in self.copies else rows)

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Generator[None]:
        """Around a micro-batch; in the `last` a gradient is reduced as soon as `gradient_ready` is called."""
        self._overlapping = last
        try:
            yield
        finally:
            self._overlapping = False

    def gradient_ready(self, parameter: Tensor) -> None:
        """Take the finished gradient of a parameter; called by autograd or by the fused execution."""
        if self._overlapping and parameter.grad is not None:
            assert isinstance(parameter, nn.Parameter)
            gradient, parameter.grad = parameter.grad, None
            self.reducer.add(self._names[parameter], gradient)

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Take a complete gradient that is not in `.grad`, in any dtype."""
        self.reducer.add(name, gradient)

    def step(self, factor: float, step: int | None = None) -> Tensor:
        """Step at `factor` times the peak learning rates; returns the gradient norm before clipping."""
        for name, parameter in self.parameters.items():  # whatever no signal has announced
            if parameter.grad is not None:
                gradient, parameter.grad = parameter.grad, None
                self.reducer.add(name, gradient)
        for name, gradient in self.reducer.finish().items():
            master = self.local.parameters[name]
            master.grad = gradient.to(master.dtype)
        self.wait_for_weights()  # of cores that the last forward did not use
        norm = self.local.step(factor, step)
        self.local.zero_grad()
        self._broadcast_weights()
        if not self._waits_in_forward:
            self.wait_for_weights()
        return norm

    def wait_before(self, module: nn.Module, names: Collection[str]) -> None:
        """Let `module` wait for the new weights of these parameters when it is called.

        Once a module waits, `step` returns while weights are still arriving: every use of a parameter must be
        in a module that waits for it.
        """
        self._waits_in_forward = True
        wanted = frozenset(names)

        def wait(module: nn.Module, arguments: Any) -> None:
            self.wait_for_weights(wanted)

        module.register_forward_pre_hook(wait)

    @torch.no_grad()
    def wait_for_weights(self, names: Collection[str] | None = None) -> None:
        """Wait until the new compute weights of these parameters, or of all, have arrived."""
        if not self._arriving:
            return
        ready = [item for item in self._arriving if names is None or not item.names.isdisjoint(names)]
        self._arriving = [item for item in self._arriving if item not in ready]
        for item in ready:
            item.work.wait()
            if len(item.tensors) > 1:
                parts = item.flat.split([tensor.numel() for tensor in item.tensors])
                torch._foreach_copy_(item.tensors, list(parts))
        if self.after_broadcast is not None and ready:
            arrived = {name for item in ready for name in item.names}
            # A table whose rows come from several ranks is complete when the last of them is.
            late = {name for item in self._arriving for name in item.names}
            self.after_broadcast([self.parameters[name] for name in sorted(arrived - late)])

    @torch.no_grad()
    def _broadcast_weights(self) -> None:
        """Start to broadcast the new compute weights from their owners, small ones of one owner together."""
        for name, piece in self.owned.items():
            if name in self.copies:
                self.copies[name].cast_rows_(piece.first, self.local.parameters[name].detach())
        # By owner and dtype: the embedding is in fp32, copies of matrices are in bf16.
        buckets: dict[tuple[int, torch.dtype], list[tuple[str, Tensor]]] = {}

        def launch(key: tuple[int, torch.dtype]) -> None:
            names, tensors = zip(*buckets.pop(key), strict=True)
            flat = flatten(tensors)
            self.bytes_broadcast += flat.numel() * flat.element_size()
            work = self.world.broadcast_(flat, key[0])
            self._arriving.append(_Broadcast(work, frozenset(names), list(tensors), flat))

        # In the order of use, in which they arrive: the head is used last.
        for piece in sorted(self.pieces, key=lambda piece: piece.name == "head"):
            tensor = self._compute_rows(piece)
            bucket = buckets.setdefault((piece.owner, tensor.dtype), [])
            bucket.append((piece.name, tensor))
            if sum(each.numel() for _, each in bucket) * tensor.element_size() >= BUCKET_BYTES:
                launch((piece.owner, tensor.dtype))
        for key in list(buckets):
            launch(key)

    @contextlib.contextmanager
    def whole_weights(self) -> Generator[None]:
        """Give released parameters the values of their compute copies for a while, to run the reference.

        Their dtype is then that of the copies.
        """
        self.wait_for_weights()
        placeholders = {name: self.parameters[name].data for name in self.released}
        for name in self.released:
            copy, parameter = self.copies[name], self.parameters[name]
            values = copy.weight if copy.factor == 1.0 else copy.weight / copy.factor
            parameter.data = values.view(parameter.shape)
        try:
            yield
        finally:
            for name, placeholder in placeholders.items():
                self.parameters[name].data = placeholder

    def _compute_rows(self, piece: Piece) -> Tensor:
        """The rows of a piece in the tensor that the forward reads, flat."""
        copy = self.copies.get(piece.name)
        whole = self.parameters[piece.name].detach() if copy is None else copy.weight
        return (whole if piece.whole else whole[piece.first : piece.last]).view(-1)

    def zero_grad(self) -> None:
        """Set every gradient to None."""
        for parameter in self.parameters.values():
            parameter.grad = None
