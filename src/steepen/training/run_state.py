"""The state of a run: network, optimizer and progress, from its newest valid checkpoint or initialized."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from steepen.distributed.owners import Piece
from steepen.distributed.sharded_optimizer import ShardedOptimizer
from steepen.distributed.world import World
from steepen.errors import SteepenError
from steepen.execution.select import ExecutionMode, apply_execution_mode
from steepen.model.growth import grow
from steepen.model.init import WeightsMismatch, allocate, build_on_meta, initializer, name_seed, weight_copier
from steepen.model.network import Network
from steepen.optim.optimizer import Optimizer, round_to_bf16_
from steepen.optim.state import OptimizerState, grow_state
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunDirectory
from steepen.training.checkpoint import (
    AnyOptimizer,
    Checkpoint,
    CorruptCheckpoint,
    TrainingProgress,
    list_checkpoints,
    owned_pieces,
    random_name,
    remove_partial,
    rename_corrupt,
)
from steepen.training.state_files import StateReader, UnreadableState
from steepen.utils.files import read_file, write_atomically

RunState = tuple[Network, AnyOptimizer, TrainingProgress]


def load_or_init(
    spec: RunSpec,
    folder: Path,
    device: torch.device,
    mode: ExecutionMode,
    print_message: Callable[[str], None],
    *,
    world: World | None = None,
    shard: str = "optimizer",
    shared: Sequence[Path] = (),
) -> RunState:
    """Load the newest valid checkpoint of a run, or initialize network and optimizer if there is none.

    A run without one starts from the first valid of `shared`, checkpoints of runs that have the same trunk.
    """
    world = world or World()
    if world.is_main:
        if os.path.lexists(folder) and not folder.is_dir():
            print_message(f"{folder} is not a directory; it is renamed to {rename_corrupt(folder).name}.")
        remove_partial(folder)
    steps: list[int] = world.broadcast_object([saved.step for saved in list_checkpoints(folder)])
    while steps:
        saved = Checkpoint(folder / f"{steps.pop():08d}")
        try:
            network, optimizer, training_progress = _load(saved, spec, device, mode, world, shard)
        except (CorruptCheckpoint, UnreadableState, WeightsMismatch) as error:
            then = "Trying the one before it." if steps else "None is left: the run starts over."
            print_message(f"{error} {then}")
            if world.is_main:
                rename_corrupt(saved)
            continue
        print_message(f"resuming from step {training_progress.step:,} of {spec.steps:,}.")
        return network, optimizer, training_progress
    for path in map(Path, world.broadcast_object(list(map(str, shared)))):
        other = RunDirectory(path.parents[1])
        try:
            network, optimizer, before = _load(
                Checkpoint(path), spec, device, mode, world, shard, owner=other.path.name
            )
        except (CorruptCheckpoint, UnreadableState, WeightsMismatch) as error:
            print_message(f"{error} The run does not start from there.")
            continue
        print_message(
            f"starting from step {before.step:,} of {spec.steps:,}, which run {before.run} has trained."
        )
        own = RunDirectory(folder.parent)
        logs = (other.metrics_file, own.metrics_file), (other.samples_file, own.samples_file)
        for source, target in logs if world.is_main else ():
            with contextlib.suppress(FileNotFoundError):
                write_atomically(target, read_file(source))
        # Time spent on the trunk is the other run's; losses and validations are this one's too.
        begun = TrainingProgress(
            spec.hash, before.step, before.passes, scores=before.scores,
            trunk=before.trunk or before.run, trunk_steps=before.step,
        )  # fmt: skip
        return network, optimizer, begun
    return _init(spec, device, mode, world, shard)


def load_and_grow(
    spec: RunSpec,
    saved: Checkpoint,
    passes: int,
    device: torch.device,
    mode: ExecutionMode,
    world: World,
    shard: str,
) -> tuple[Network, AnyOptimizer]:
    """Load a checkpoint into a network grown to `passes`; owners are assigned anew."""
    network, optimizer, _ = _load(saved, spec, device, mode, world, shard, passes)
    return network, optimizer


def _load(
    saved: Checkpoint,
    spec: RunSpec,
    device: torch.device,
    mode: ExecutionMode,
    world: World,
    shard: str,
    grow_to: int | None = None,
    owner: str | None = None,
) -> RunState:
    """Load a checkpoint of the run, or of the run `owner`."""
    training_progress = saved.training_progress()
    if training_progress.run != (owner or spec.hash):
        raise CorruptCheckpoint(f"checkpoint {saved.path} belongs to another run ({training_progress.run}).")
    if not 1 <= training_progress.passes <= max(max(stage.passes) for stage in spec.schedule.stages):
        raise CorruptCheckpoint(f"checkpoint {saved.path} has more passes than the run.")
    network, sources = _build(spec, training_progress.passes, grow_to)
    with saved.reader(world=world) as reader:
        names = [name for name, _ in network.named_parameters()]
        stored = _LazyWeights(reader, {name: sources.get(name, name) for name in names})
        fill = weight_copier(network, stored)
        if training_progress.step and not reader.names("optimizer"):
            raise SteepenError(
                f"the run was imported and cannot be resumed: {saved.path} has no optimizer state; train "
                "it in another directory (`runs`)."
            )
        optimizer = _place_on_device(spec, network, device, mode, world, shard, fill)
        state: OptimizerState = {}
        # Files are read by the name of the parameter, not by the rank that wrote them: any number of ranks
        # resumes what any other number has saved.
        for owned in owned_pieces(network, optimizer):
            name = owned.piece.name
            if name in sources:
                _read_grown_state(reader, state, name, sources[name], owned.piece, spec)
            elif found := reader.read_state(name, owned.piece):
                state[name] = found
            if not (spec.optimizer.is_custom or _fits(state.get(name, {}), owned.weight)):
                raise CorruptCheckpoint(f"{saved.path} has no valid optimizer state of {name}.")
        optimizer.load_state(state)
        # Last: building and placing the network draws random numbers.
        try:
            _restore_random_state(reader, spec, training_progress.step, device, world.rank)
        except (RuntimeError, TypeError) as error:
            raise CorruptCheckpoint(f"{saved.path} has no valid random state ({error}).") from error
    return network, optimizer, replace(training_progress, resumed=training_progress.resumed + 1)


def _fits(state: Mapping[str, Tensor], weight: Tensor) -> bool:
    """Whether these are numbers of a parameter: of each value, or of its rows, columns or the whole."""
    return all(
        value.is_floating_point()
        and (not value.ndim or value.ndim == weight.ndim)
        and all(size in (1, whole) for size, whole in zip(value.shape, weight.shape, strict=False))
        for value in state.values()
    )


def _restore_random_state(
    reader: StateReader, spec: RunSpec, step: int, device: torch.device, rank: int
) -> None:
    """Set the random state as this rank saved it, or seed it where fewer ranks saved the checkpoint."""
    saved = set(reader.names("random"))
    if (name := random_name("cpu", rank)) in saved:
        torch.set_rng_state(reader.read("random", name))
    else:
        torch.manual_seed(name_seed(spec.seed, f"run/{step}/{rank}"))
    if device.type == "cuda" and (name := random_name("cuda", rank)) in saved:
        torch.cuda.set_rng_state(reader.read("random", name), device)


def _read_grown_state(
    reader: StateReader, state: OptimizerState, name: str, source: str, piece: Piece, spec: RunSpec
) -> None:
    """State of a parameter that growth made, from that of its source, by the configured policy."""
    found: OptimizerState = {source: reader.read_state(source, replace(piece, name=source))}
    grow_state(found, {name: source} if found[source] else {}, spec.optimizer.growth_state)
    if name in found:
        state[name] = found[name]


class _LazyWeights(Mapping[str, Tensor]):
    """Saved weights by parameter name, each read on first access."""

    def __init__(self, reader: StateReader, sources: Mapping[str, str]) -> None:
        self.reader, self.sources = reader, sources
        stored = set(reader.names("model"))
        extra = stored - set(sources.values())
        self.known = [name for name, source in sources.items() if source in stored] + sorted(extra)

    def __getitem__(self, name: str) -> Tensor:
        """Read one weight."""
        return self.reader.read("model", self.sources[name])

    def __iter__(self) -> Any:
        """Names of all weights in the checkpoint."""
        return iter(self.known)

    def __len__(self) -> int:
        """Number of weights."""
        return len(self.known)


def _init(spec: RunSpec, device: torch.device, mode: ExecutionMode, world: World, shard: str) -> RunState:
    network, _ = _build(spec, spec.schedule.initial)
    hyper = spec.hyperparameters
    # Custom blocks may draw random numbers: the run's seed decides them too.
    torch.manual_seed(name_seed(spec.seed, f"run/{world.rank}" if world.rank else "run"))
    initial = initializer(
        network, embedding_std=hyper.embedding_init_std, init_scale=hyper.init_scale, seed=spec.seed
    )

    def fill(name: str, tensor: Tensor) -> None:
        initial(name, tensor)
        if name == "embedding" and spec.optimizer.embedding_precision == "bf16":
            round_to_bf16_(tensor)

    optimizer = _place_on_device(spec, network, device, mode, world, shard, fill)
    return network, optimizer, TrainingProgress(run=spec.hash, step=0, passes=network.passes)


def _build(spec: RunSpec, passes: int, grow_to: int | None = None) -> tuple[Network, dict[str, str]]:
    """Build the network on the meta device.

    With `grow_to` it is grown; also returns new parameter name → name of its source.
    """
    hyper = spec.hyperparameters
    meta = build_on_meta(spec.shape, spec.arm, hyper.multipliers, spec.options, passes=passes)
    return meta, {} if grow_to is None else grow(meta, grow_to)


def _place_on_device(
    spec: RunSpec,
    network: Network,
    device: torch.device,
    mode: ExecutionMode,
    world: World,
    shard: str,
    fill: Callable[[str, Tensor], None],
) -> AnyOptimizer:
    """Allocate a meta network, `fill` every parameter by name and install what executes it.

    Returns its optimizer, which may have divided the weights among the ranks.
    """
    hyper = spec.hyperparameters
    full = world.size > 1 and shard == "full"
    if not full:
        allocate(network, device)
    apply_execution_mode(network, spec.precision, fused=mode.fused, compiled=mode.compiled)
    if full:
        built_in = spec.arm.fused_block
        # A custom block may compute in fp32 what the built-in block computes in the compute dtype.
        dtype = network.compute_dtype if built_in else None
        tied = spec.arm.tied and spec.schedule.max_passes > 1
        repeated = [block for core in network.cores for block in cast("Any", core)] if tied else []
        from steepen.distributed.full_shard import FullyShardedOptimizer  # a third of the time of all imports

        return FullyShardedOptimizer(
            network, hyper, spec.optimizer, world, compute_dtype=dtype, repeated=repeated, fill=fill
        )
    for name, parameter in network.named_parameters():
        fill(name, parameter)
    network.refresh()
    if world.size == 1:
        return Optimizer(network.named_parameters(), hyper, spec.optimizer, network.refresh)
    fused = network.fused
    copies = {} if fused is None else fused.compute_copies()
    optimizer = ShardedOptimizer(
        network.named_parameters(),
        hyper,
        spec.optimizer,
        world,
        copies={name: copies[p] for name, p in network.named_parameters() if p in copies},
        after_broadcast=None if fused is None else fused.requantize,
    )
    if fused is not None:
        fused.signal.listener = optimizer.gradient_ready
    if not mode.compiled:  # a hook inside a compiled block would break its graph
        _wait_for_weights_in_forward(network, optimizer)
    return optimizer


def _wait_for_weights_in_forward(network: Network, optimizer: ShardedOptimizer) -> None:
    """Let the network wait for new weights where the forward uses them, so that they arrive meanwhile."""
    names = {parameter: name for name, parameter in network.named_parameters()}
    blocks = list(network.blocks())
    of_blocks = [[names[parameter] for parameter in block.parameters()] for block in blocks]
    inside = {name for each in of_blocks for name in each}
    # The head is used after the last block, which every forward reaches only if it is in the coda.
    last = network.coda[-1] if len(network.coda) else network
    optimizer.wait_before(network, set(names.values()) - inside - {"head"})
    for block, mine in zip(blocks, of_blocks, strict=True):
        optimizer.wait_before(block, mine)
    optimizer.wait_before(last, ["head"])
