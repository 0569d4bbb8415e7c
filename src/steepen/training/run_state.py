"""The state of a run: network, optimizer and progress, from its newest valid checkpoint or initialized."""

from __future__ import annotations

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
from steepen.model.growth import Growth
from steepen.model.init import WeightsMismatch, allocate, build_on_meta, initializer, name_seed, weight_copier
from steepen.model.network import Network
from steepen.optim.muon import OptimizerState
from steepen.optim.optimizer import Optimizer, grow_state, round_to_bf16_
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunDirectory
from steepen.runs.trunk import is_state_of
from steepen.training.checkpoint import (
    AnyOptimizer,
    Checkpoint,
    CorruptCheckpoint,
    StateReader,
    TrainingProgress,
    UnreadableState,
    list_checkpoints,
    owned_pieces,
    random_name,
    remove_partial,
    rename_corrupt,
)
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
    states = [str(path) for path in shared if is_state_of(spec, path)]
    for path in map(Path, world.broadcast_object(states)):
        other, saved = RunDirectory(path.parents[1]), Checkpoint(path)
        try:
            network, optimizer, before = _load(saved, spec, device, mode, world, shard, owner=other.path.name)
        except SteepenError as error:  # also of a run that was imported, without state of the optimizer
            print_message(f"{error} The run does not start from there.")
            continue
        print_message(
            f"starting from step {before.step:,} of {spec.steps:,}, which run {before.run} has trained."
        )
        own = RunDirectory(folder.parent)
        logs = (other.metrics_file, own.metrics_file), (other.samples_file, own.samples_file)
        for source, target in logs if world.is_main else ():
            try:
                content = read_file(source)
            except OSError:  # curves then begin here
                continue
            write_atomically(target, content)
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
    index: int,
    device: torch.device,
    mode: ExecutionMode,
    world: World,
    shard: str,
) -> tuple[Network, AnyOptimizer]:
    """Load a checkpoint into a larger network, one of `spec.networks`; owners are assigned anew."""
    network, optimizer, _ = _load(saved, spec, device, mode, world, shard, index)
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
    index = spec.network_after(training_progress.step)
    network, before = build_network(spec, index, training_progress.passes), None
    growth = None
    if grow_to is not None:
        before, network = network, build_network(spec, grow_to)
        # Of the network as it was saved, whose passes a run that was imported may have chosen.
        _, smaller = spec.networks[index]
        growth = Growth(replace(smaller, passes=before.passes), spec.networks[grow_to][1], spec.schedule)
    with saved.reader(world=world) as reader:
        fill = weight_copier(before or network, _LazyWeights(reader))
        if growth is not None and before is not None:
            fill = _grown_weights(reader, growth, spec, network, training_progress.step)
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
            if growth is not None and before is not None and not growth.origin(name).kept:
                found = _grown_state(reader, growth, before, owned.piece, spec)
            else:
                found = reader.read_state(name, owned.piece)
            if found:
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


def _initializer(spec: RunSpec, network: Network, seed: int) -> Callable[[str, Tensor], None]:
    hyper = spec.hyperparameters
    return initializer(
        network, embedding_std=hyper.embedding_init_std, init_scale=hyper.init_scale, seed=seed
    )


def _grown_weights(
    reader: StateReader, growth: Growth, spec: RunSpec, network: Network, step: int
) -> Callable[[str, Tensor], None]:
    """A function that fills a parameter of the grown network from the saved weights."""
    fresh = _initializer(spec, network, name_seed(spec.seed, f"growth/{step}"))

    @torch.no_grad()
    def fill(name: str, tensor: Tensor) -> None:
        growth.fill(name, tensor, lambda source: reader.read("model", source), fresh)

    return fill


def _grown_state(
    reader: StateReader, growth: Growth, before: Network, piece: Piece, spec: RunSpec
) -> dict[str, Tensor]:
    """State of a parameter that growth made or widened, from that of its origin, by the configured policy."""
    source = growth.origin(piece.name).name
    if source is None:
        return {}
    old, new = before.get_parameter(source).shape, torch.Size(piece.shape)
    alike = old == new
    # Muon keeps second moments of rows or of columns, by which of them are more.
    if len(old) > 1 and (old[-2] < old[-1]) != (new[-2] < new[-1]):
        return {}
    rows = replace(piece, name=source) if alike else None
    states: OptimizerState = {"old": reader.read_state(source, rows)}
    grow_state(states, {"new": "old"} if states["old"] else {}, spec.optimizer.growth_state)
    found = states.get("new", {})
    if alike:
        return found
    wider = {key: growth.state(piece.name, key, value, old, new) for key, value in found.items()}
    own = slice(piece.first, piece.last)
    return {key: value[own] if value.ndim and not piece.whole else value for key, value in wider.items()}


class _LazyWeights(Mapping[str, Tensor]):
    """Saved weights by parameter name, each read on first access."""

    def __init__(self, reader: StateReader) -> None:
        self.reader, self.known = reader, sorted(set(reader.names("model")))

    def __getitem__(self, name: str) -> Tensor:
        """Read one weight."""
        return self.reader.read("model", name)

    def __iter__(self) -> Any:
        """Names of all weights in the checkpoint."""
        return iter(self.known)

    def __len__(self) -> int:
        """Number of weights."""
        return len(self.known)


def _init(spec: RunSpec, device: torch.device, mode: ExecutionMode, world: World, shard: str) -> RunState:
    network = build_network(spec, 0)
    # Custom blocks may draw random numbers: the run's seed decides them too.
    torch.manual_seed(name_seed(spec.seed, f"run/{world.rank}" if world.rank else "run"))
    initial = _initializer(spec, network, spec.seed)

    def fill(name: str, tensor: Tensor) -> None:
        initial(name, tensor)
        if name == "embedding" and spec.optimizer.embedding_precision == "bf16":
            round_to_bf16_(tensor)

    optimizer = _place_on_device(spec, network, device, mode, world, shard, fill)
    return network, optimizer, TrainingProgress(run=spec.hash, step=0, passes=network.passes)


def build_network(spec: RunSpec, index: int, passes: int | None = None) -> Network:
    """Build one of a run's networks on the meta device, if need be with other passes than its own."""
    _, one = spec.networks[index]
    multipliers = spec.hyperparameters.multipliers
    return build_on_meta(one.shape, one.arm, multipliers, spec.options, passes=passes or one.passes)


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
        built_in = network.arm.fused_block
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
        wait_for_weights_in_forward(network, optimizer)
    return optimizer


def wait_for_weights_in_forward(network: Network, optimizer: ShardedOptimizer) -> None:
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
