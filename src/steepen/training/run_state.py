"""The state of a run: network, optimizer and progress, from its newest valid checkpoint or initialized.

Every state is made the same way: the network is built on the meta device, a function `fill` says what its
weights are (initial, saved, or grown from saved ones), and `StateLoader._place` allocates what this rank
keeps of them and gives it an optimizer. Growth is loading too: the checkpoint saved just before it, into a
larger network.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from steepen.distributed.owners import Piece
from steepen.distributed.sharded_optimizer import ShardedOptimizer
from steepen.distributed.world import World
from steepen.errors import SteepenError, UsageError
from steepen.execution.select import ExecutionMode, apply_execution_mode, choose_execution_mode
from steepen.model.arm import StageNetwork
from steepen.model.growth import Growth
from steepen.model.init import WeightsMismatch, allocate, build_on_meta, initializer, name_seed, weight_copier
from steepen.model.network import Network
from steepen.optim.muon import OptimizerState
from steepen.optim.optimizer import Optimizer, grow_state, round_to_bf16_
from steepen.recipe.flops import flops_per_token
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
from steepen.training.train_options import TrainOptions
from steepen.utils.files import read_file, write_atomically

RunState = tuple[Network, AnyOptimizer, TrainingProgress]
Fill = Callable[[str, Tensor], None]  # fills a tensor with the weights of the parameter of a name
ReadState = Callable[[Piece], dict[str, Tensor]]  # optimizer state of a parameter, or of some of its rows


def execution_mode(spec: RunSpec, options: TrainOptions, world: World) -> ExecutionMode:
    """Return the execution mode of a run; raises UsageError if the device cannot run it."""
    fused = options.fused
    if world.size > 1 and options.shard == "full":
        # FSDP2 gathers parameters around the modules' own forward, which the fused kernels bypass.
        if fused:
            raise UsageError("`shard` full runs the reference or torch.compile: leave `fused` out.")
        fused = False
    return choose_execution_mode(
        spec.arm.fused_block,
        spec.precision,
        world.device,
        flops_per_step=spec.batch_tokens * flops_per_token(spec.arm, spec.shape, 1).total,
        fused=fused,
        compile=options.compile,
    )


@dataclass(frozen=True)
class StateLoader:
    """Makes the state of a run on this rank: initial, as a checkpoint has it, or grown from a checkpoint."""

    spec: RunSpec
    mode: ExecutionMode
    world: World
    shard: str
    print_message: Callable[[str], None]

    def load_or_init(self, run: RunDirectory, shared: Sequence[Path] = ()) -> RunState:
        """Load the newest valid checkpoint of a run, or initialize network and optimizer if there is none.

        A run without one starts from the first valid of `shared`, checkpoints of runs that have the same
        trunk.
        """
        return self._resume(run.checkpoints) or self._branch_off(run, shared) or self._init()

    def grow(self, saved: Checkpoint, index: int) -> tuple[Network, AnyOptimizer]:
        """Load a checkpoint into a larger network, one of `spec.networks`; owners are assigned anew."""
        network, optimizer, _ = self._load(saved, self.spec.hash, grow_to=index)
        return network, optimizer

    def _resume(self, folder: Path) -> RunState | None:
        """The newest valid checkpoint of the run itself; corrupt ones are renamed."""
        if self.world.is_main:
            if os.path.lexists(folder) and not folder.is_dir():
                renamed = rename_corrupt(folder).name
                self.print_message(f"{folder} is not a directory; it is renamed to {renamed}.")
            remove_partial(folder)
        # Rank 0 lists and the others are told: all must load the same checkpoint.
        steps: list[int] = self.world.broadcast_object([saved.step for saved in list_checkpoints(folder)])
        while steps:
            saved = Checkpoint(folder / f"{steps.pop():08d}")
            try:
                state = self._load(saved, self.spec.hash)
            except (CorruptCheckpoint, UnreadableState, WeightsMismatch) as error:
                then = "Trying the one before it." if steps else "None is left: the run starts over."
                self.print_message(f"{error} {then}")
                if self.world.is_main:
                    rename_corrupt(saved)
                continue
            self.print_message(f"resuming from step {saved.step:,} of {self.spec.steps:,}.")
            return state
        return None

    def _branch_off(self, run: RunDirectory, shared: Sequence[Path]) -> RunState | None:
        """The state of another run that has trained the first steps of this one, with its logs."""
        states = [str(path) for path in shared if is_state_of(self.spec, path)]
        for path in map(Path, self.world.broadcast_object(states)):
            other = RunDirectory(path.parents[1])
            try:
                network, optimizer, before = self._load(Checkpoint(path), other.path.name)
            except SteepenError as error:  # also of a run that was imported, without state of the optimizer
                self.print_message(f"{error} The run does not start from there.")
                continue
            position = f"step {before.step:,} of {self.spec.steps:,}"
            self.print_message(f"starting from {position}, which run {before.run} has trained.")
            logs = (other.metrics_file, run.metrics_file), (other.samples_file, run.samples_file)
            for source, target in logs if self.world.is_main else ():
                try:
                    content = read_file(source)
                except OSError:  # curves then begin here
                    continue
                write_atomically(target, content)
            # Time spent on the trunk is the other run's; losses and validations are this one's too.
            begun = TrainingProgress(
                self.spec.hash, before.step, before.passes, scores=before.scores,
                trunk=before.trunk or before.run, trunk_steps=before.step,
            )  # fmt: skip
            return network, optimizer, begun
        return None

    def _init(self) -> RunState:
        spec, rank = self.spec, self.world.rank
        network = build_network(spec, 0)
        # Custom blocks may draw random numbers: the run's seed decides them too.
        torch.manual_seed(name_seed(spec.seed, f"run/{rank}" if rank else "run"))
        initial = _initializer(spec, network, spec.seed)

        def fill(name: str, tensor: Tensor) -> None:
            initial(name, tensor)
            if name == "embedding" and spec.optimizer.embedding_precision == "bf16":
                round_to_bf16_(tensor)

        optimizer = self._place(network, fill)
        return network, optimizer, TrainingProgress(run=spec.hash, step=0, passes=network.passes)

    def _load(self, saved: Checkpoint, owner: str, grow_to: int | None = None) -> RunState:
        """Load a checkpoint of the run `owner`, as it is or into a larger one of the run's networks."""
        spec, progress = self.spec, saved.training_progress()
        if progress.run != owner:
            raise CorruptCheckpoint(f"checkpoint {saved.path} belongs to another run ({progress.run}).")
        if not 1 <= progress.passes <= spec.schedule.max_passes:
            raise CorruptCheckpoint(f"checkpoint {saved.path} has more passes than the run.")
        network = build_network(spec, spec.network_after(progress.step), progress.passes)
        with saved.reader(world=self.world) as reader:
            # Raises for weights of another network, also where they are read to grow.
            fill = weight_copier(network, reader.names("model"), functools.partial(reader.read, "model"))
            read_state = reader.read_state
            if grow_to is not None:
                network, fill, read_state = _grown(spec, reader, network, progress.step, grow_to)
            if progress.step and not reader.names("optimizer"):
                raise SteepenError(
                    f"the run was imported and cannot be resumed: {saved.path} has no optimizer state; train "
                    "it in another directory (`runs`)."
                )
            optimizer = self._place(network, fill)
            # Files are read by the name of the parameter, not by the rank that wrote them: any number of
            # ranks resumes what any other number has saved.
            state: OptimizerState = {}
            for owned in owned_pieces(network, optimizer):
                name, found = owned.piece.name, read_state(owned.piece)
                if found:
                    state[name] = found
                if not (spec.optimizer.is_custom or _fits(found, owned.weight)):
                    raise CorruptCheckpoint(f"{saved.path} has no valid optimizer state of {name}.")
            optimizer.load_state(state)
            # Last: building and placing the network draws random numbers.
            try:
                self._restore_random_state(reader, progress.step)
            except (RuntimeError, TypeError) as error:
                raise CorruptCheckpoint(f"{saved.path} has no valid random state ({error}).") from error
        return network, optimizer, replace(progress, resumed=progress.resumed + 1)

    def _restore_random_state(self, reader: StateReader, step: int) -> None:
        """Set the random state as this rank saved it, or seed it where fewer ranks saved the checkpoint."""
        saved, rank, device = set(reader.names("random")), self.world.rank, self.world.device
        if (name := random_name("cpu", rank)) in saved:
            torch.set_rng_state(reader.read("random", name))
        else:
            torch.manual_seed(name_seed(self.spec.seed, f"run/{step}/{rank}"))
        if device.type == "cuda" and (name := random_name("cuda", rank)) in saved:
            torch.cuda.set_rng_state(reader.read("random", name), device)

    def _place(self, network: Network, fill: Fill) -> AnyOptimizer:
        """Allocate a meta network, `fill` every parameter by name and install what executes it.

        Returns its optimizer, which may have divided the weights among the ranks.
        """
        spec, mode, world = self.spec, self.mode, self.world
        if world.size > 1 and self.shard == "full":
            return self._shard_fully(network, fill)
        # In this order: the execution needs tensors, its low-precision copies the weights (`refresh`), and an
        # optimizer for several ranks releases the weights that it does not own.
        allocate(network, world.device)
        apply_execution_mode(network, spec.precision, fused=mode.fused, compiled=mode.compiled)
        for name, parameter in network.named_parameters():
            fill(name, parameter)
        network.refresh()
        hyper = spec.hyperparameters
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

    def _shard_fully(self, network: Network, fill: Fill) -> AnyOptimizer:
        """Divide the weights themselves: FSDP2 allocates and fills one block after the other."""
        from steepen.distributed.full_shard import FullyShardedOptimizer  # a third of the time of all imports

        spec, mode = self.spec, self.mode
        apply_execution_mode(network, spec.precision, fused=mode.fused, compiled=mode.compiled)
        # A custom block may compute in fp32 what the built-in block computes in the compute dtype.
        dtype = network.compute_dtype if network.arm.fused_block else None
        tied = spec.arm.tied and spec.schedule.max_passes > 1
        repeated = [block for core in network.cores for block in cast("Any", core)] if tied else []
        return FullyShardedOptimizer(
            network,
            spec.hyperparameters,
            spec.optimizer,
            self.world,
            compute_dtype=dtype,
            repeated=repeated,
            fill=fill,
        )


def build_network(spec: RunSpec, index: int, passes: int | None = None) -> Network:
    """Build one of a run's networks on the meta device, if need be with other passes than its own."""
    _, one = spec.networks[index]
    multipliers = spec.hyperparameters.multipliers
    return build_on_meta(one.shape, one.arm, multipliers, spec.options, passes=passes or one.passes)


def _initializer(spec: RunSpec, network: Network, seed: int) -> Fill:
    hyper = spec.hyperparameters
    return initializer(
        network, embedding_std=hyper.embedding_init_std, init_scale=hyper.init_scale, seed=seed
    )


def _grown(
    spec: RunSpec, reader: StateReader, before: Network, step: int, index: int
) -> tuple[Network, Fill, ReadState]:
    """One of the run's networks on the meta device, and its weights and state from those of a smaller one."""
    network = build_network(spec, index)
    # As it was saved: the passes of a run that was imported may have been chosen.
    smaller = StageNetwork(before.arm, before.shape, before.passes)
    growth = Growth(smaller, spec.networks[index][1], spec.schedule)
    fresh = _initializer(spec, network, name_seed(spec.seed, f"growth/{step}"))

    @torch.no_grad()
    def fill(name: str, tensor: Tensor) -> None:
        growth.fill(name, tensor, lambda source: reader.read("model", source), fresh)

    def read_state(piece: Piece) -> dict[str, Tensor]:
        origin = growth.origin(piece.name)
        if origin.kept:
            return reader.read_state(piece)
        return {} if origin.name is None else _grown_state(spec, reader, growth, before, origin.name, piece)

    return network, fill, read_state


def _grown_state(
    spec: RunSpec, reader: StateReader, growth: Growth, before: Network, source: str, piece: Piece
) -> dict[str, Tensor]:
    """State of a parameter that growth made or widened, from that of `source`, by the configured policy."""
    old, new = before.get_parameter(source).shape, torch.Size(piece.shape)
    alike = old == new
    # Muon keeps second moments of rows or of columns, by which of them are more.
    if len(old) > 1 and (old[-2] < old[-1]) != (new[-2] < new[-1]):
        return {}
    rows = (piece.first, piece.last) if alike else (0, old[0] if old else 0)
    saved = reader.read_state(Piece(source, piece.owner, *rows, tuple(old)))
    states: OptimizerState = {"old": saved} if saved else {}
    grow_state(states, {"new": "old"}, spec.optimizer.growth_state)
    found = states.get("new", {})
    if alike:
        return found
    wider = {key: growth.state(piece.name, key, value, old, new) for key, value in found.items()}
    own = slice(piece.first, piece.last)
    return {key: value[own] if value.ndim and not piece.whole else value for key, value in wider.items()}


def _fits(state: Mapping[str, Tensor], weight: Tensor) -> bool:
    """Whether these are numbers of a parameter: of each value, or of its rows, columns or the whole."""
    return all(
        value.is_floating_point()
        and (not value.ndim or value.ndim == weight.ndim)
        and all(size in (1, whole) for size, whole in zip(value.shape, weight.shape, strict=False))
        for value in state.values()
    )


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
