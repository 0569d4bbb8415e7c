"""FSDP2: weights and gradients divided among the ranks, and gathered block by block when they are needed.

For models whose bf16 weights and fp32 gradients do not fit on every GPU, and for custom blocks. PyTorch's
`fully_shard` gathers and reduces; the optimizer still needs whole matrices. Each matrix therefore has one
owner, as in `sharded_optimizer`, which gathers the gradient from the shards, steps its fp32 copy and scatters
the new weight. Embedding and head are stepped where their rows are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from steepen.distributed.owners import ROW_SHARDED, Piece, assign_owners, owned_by
from steepen.distributed.sharded_optimizer import DistributedOptimizer
from steepen.distributed.world import World
from steepen.optim.config import OptimizerConfig, OptimizerHyperparameters

MAX_IN_FLIGHT = 4  # matrices being gathered or scattered at a time


def shard_dimension(shape: torch.Size, ranks: int) -> int:
    """Dimension along which a parameter is divided: rows of stacked matrices where they divide evenly."""
    return 1 if len(shape) == 3 and shape[1] % ranks == 0 else 0


def shard_network(
    network: nn.Module,
    world: World,
    *,
    compute_dtype: torch.dtype | None,
    repeated: Collection[nn.Module] = (),
    mesh: DeviceMesh | None = None,
    reduce_dtype: torch.dtype | None = None,
    place: Callable[[nn.Module], None] | None = None,
) -> None:
    """Apply FSDP2 to every block and to the rest of a network.

    `place` is called with each module just before its parameters are divided, to put weights in place.
    `repeated` blocks, those of a tied core, are gathered with the rest, once per micro-batch: by themselves
    they would be gathered and reduced in every pass. Gradients are summed over ranks, not averaged: the
    loss is scaled by the global batch. They are reduced in fp32, on a CPU in fp64, so that the sum does not
    depend on the number of ranks.
    """
    mesh = mesh or init_device_mesh(world.device.type, (world.size,))
    accumulate_dtype = torch.float64 if world.device.type == "cpu" else torch.float32
    # Inputs of blocks keep their dtype: the residual stream may be wider than the weights.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=reduce_dtype or accumulate_dtype, cast_forward_inputs=False
    )

    def dimension(parameter: nn.Parameter) -> Shard:
        return Shard(shard_dimension(parameter.shape, world.size))

    blocks: Iterable[nn.Module] = cast("Any", network).blocks()
    modules = [*(block for block in blocks if not any(block is other for other in repeated)), network]
    for module in modules:
        if place is not None:
            place(module)
        fully_shard(module, mesh=mesh, mp_policy=policy, shard_placement_fn=dimension)
    for module in modules:
        cast("Any", module).set_gradient_divide_factor(1.0)


class FullyShardedOptimizer(DistributedOptimizer):
    """Shards a network with FSDP2 and steps whole matrices on their owners.

    Build it when the weights are in place, or give it a network on the meta device and `fill`, which fills a
    tensor with the weights of the parameter of a name: then no rank ever has more than its own part and one
    block. See `shard_network` for `repeated`.
    """

    sums_gradients = True
    collective_forward = True

    def __init__(
        self,
        network: nn.Module,
        hyperparameters: OptimizerHyperparameters,
        config: OptimizerConfig,
        world: World,
        *,
        compute_dtype: torch.dtype | None = None,
        repeated: Collection[nn.Module] = (),
        mesh: DeviceMesh | None = None,
        reduce_dtype: torch.dtype | None = None,
        fill: Callable[[str, Tensor], None] | None = None,
    ) -> None:
        shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
        pieces = _assign_pieces(shapes, world.size)
        owned = owned_by(pieces, world.rank)
        masters: dict[str, nn.Parameter] = {}
        names = {module: name for name, module in network.named_modules()}

        def place(module: nn.Module) -> None:
            """Give a block, or all that is not in one, its weights, and copy those that this rank owns."""
            root = module is network
            for each in [module, *repeated] if root else [module]:
                whole = each is not network
                if fill is not None:
                    each.to_empty(device=world.device, recurse=whole)
                for name, parameter in each.named_parameters(names[each], recurse=whole):
                    if fill is not None:
                        parameter.data = parameter.data.float()
                        fill(name, parameter)
                    if name in owned and name not in ROW_SHARDED:
                        masters[name] = nn.Parameter(parameter.detach().clone())
            if root and fill is not None:
                cast("Any", network).reset_rotary()

        shard_network(
            network,
            world,
            compute_dtype=compute_dtype,
            repeated=repeated,
            mesh=mesh,
            reduce_dtype=reduce_dtype,
            place=place,
        )
        self.network = network
        self.parameters = {name: cast("Any", p) for name, p in network.named_parameters()}
        for name in ROW_SHARDED:
            if name in owned:
                masters[name] = nn.Parameter(local_shard(self.parameters[name]))
        masters = {name: masters[name] for name in shapes if name in masters}
        super().__init__(pieces, masters, hyperparameters, config, world)
        self.matrices = [piece for piece in pieces if piece.name not in ROW_SHARDED]

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Generator[None]:
        """Around a micro-batch; on a GPU its gradients are reduced at once, so that none is kept whole.

        On a CPU those of several micro-batches are first summed in fp64.
        """
        cast("Any", self.network).set_requires_gradient_sync(last or self.world.device.type != "cpu")
        yield

    def step(self, factor: float, step: int | None = None) -> Tensor:
        """Gather gradients to owners, step, scatter weights; returns the gradient norm before clipping."""
        # The same matrices in the same order on every rank: collectives meet by their order.
        present = [piece for piece in self.matrices if self.parameters[piece.name].grad is not None]
        self._exchange(present, gather=True)
        for name in ROW_SHARDED:
            gradient = self.parameters[name].grad
            if name in self.owned and gradient is not None:
                self.local.parameters[name].grad = gradient.to_local()
        norm = self.local.step(factor, step)
        self.local.zero_grad()
        self._exchange(present, gather=False)
        return norm

    @torch.no_grad()
    def _exchange(self, pieces: list[Piece], *, gather: bool) -> None:
        """Gather the gradients of matrices to their owners, or scatter the owners' weights to the shards."""
        waiting: list[tuple[Piece, Any, list[Tensor], Tensor]] = []
        for piece in pieces:
            parameter = self.parameters[piece.name]
            shard = local_shard(parameter.grad if gather else parameter)
            chunks = self._chunks(piece)
            flat = torch.zeros(max(map(_elements, chunks)), dtype=shard.dtype, device=shard.device)
            mine = self.world.rank == piece.owner
            parts: list[Tensor] = [torch.zeros_like(flat) for _ in chunks] if mine else []
            if gather:
                flat[: shard.numel()] = shard.reshape(-1)
                work = self._start(dist.gather, flat, parts, piece.owner)
            else:
                if mine:
                    whole = self.local.parameters[piece.name].detach()
                    dimension = shard_dimension(whole.shape, self.world.size)
                    sizes = [chunk[dimension] for chunk in chunks]
                    for part, values in zip(parts, whole.split(sizes, dimension), strict=True):
                        part[: values.numel()] = values.reshape(-1)
                work = self._start(dist.scatter, flat, parts, piece.owner)
            waiting.append((piece, work, parts, flat))
            if len(waiting) > MAX_IN_FLIGHT:
                self._complete(*waiting.pop(0), gather=gather)
        for item in waiting:
            self._complete(*item, gather=gather)

    def _start(self, collective: Any, flat: Tensor, parts: list[Tensor], owner: int) -> Any:
        name = "gather_list" if collective is dist.gather else "scatter_list"
        rank = "dst" if collective is dist.gather else "src"
        return collective(flat, **{name: parts or None, rank: owner}, async_op=True)

    def _complete(self, piece: Piece, work: Any, parts: list[Tensor], flat: Tensor, *, gather: bool) -> None:
        work.wait()
        if not gather:
            shard = local_shard(self.parameters[piece.name])
            shard.copy_(flat[: shard.numel()].view(shard.shape))
        elif parts:
            chunks = [
                part[: _elements(c)].view(c) for part, c in zip(parts, self._chunks(piece), strict=True)
            ]
            dimension = shard_dimension(torch.Size(piece.shape), self.world.size)
            master = self.local.parameters[piece.name]
            master.grad = torch.cat(chunks, dimension).to(master.dtype)

    def _chunks(self, piece: Piece) -> list[tuple[int, ...]]:
        size, ranks = piece.shape, self.world.size
        dimension = shard_dimension(torch.Size(size), ranks)
        each = -(-size[dimension] // ranks)
        lengths = [max(0, min(each, size[dimension] - rank * each)) for rank in range(ranks)]
        return [(*size[:dimension], length, *size[dimension + 1 :]) for length in lengths]

    def zero_grad(self) -> None:
        """Set every gradient to None."""
        for parameter in self.parameters.values():
            parameter.grad = None


def _assign_pieces(shapes: Mapping[str, tuple[int, ...]], ranks: int) -> list[Piece]:
    """Owners of whole matrices, and for embedding and head the rows that FSDP2 gives to each rank."""
    pieces = [piece for piece in assign_owners(shapes, ranks) if piece.name not in ROW_SHARDED]
    for name in ROW_SHARDED:
        rows = shapes[name][0]
        each = -(-rows // ranks)
        ranges = [(min(rank * each, rows), min((rank + 1) * each, rows)) for rank in range(ranks)]
        pieces += [Piece(name, rank, a, b, shapes[name]) for rank, (a, b) in enumerate(ranges) if b > a]
    return pieces


def local_shard(parameter: Any) -> Tensor:
    """This rank's part of a parameter or gradient, without a gradient graph."""
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
