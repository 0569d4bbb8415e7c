"""Checkpoints: save, load, list, prune, and resume a run from the newest valid one.

checkpoints/00001200/ holds one safetensors file per rank (weights, optimizer state, random state; no pickle;
see `state_files`) and checkpoint.json (step, passes, times, the spec's hash, SHA-256 of each file). The
directory is written under a temporary name and renamed once all files are on disk, so a checkpoint under its
name is complete. Any number of ranks can read it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from steepen.distributed.full_shard import FullyShardedOptimizer
from steepen.distributed.owners import Piece
from steepen.distributed.sharded_optimizer import DistributedOptimizer, OwnedPiece, ShardedOptimizer
from steepen.distributed.world import World
from steepen.errors import SteepenError, UsageError
from steepen.execution.select import ExecutionMode, apply_execution_mode
from steepen.model.growth import grow
from steepen.model.init import build_on_meta, initialize, name_seed
from steepen.model.load_weights import WeightsMismatch, allocate, copy_weights
from steepen.model.network import Network
from steepen.optim.optimizer import Optimizer
from steepen.optim.state import OptimizerState, grow_state
from steepen.runs.record import ValidationScore
from steepen.runs.spec import RunSpec
from steepen.training.state_files import (
    StateReader,
    UnreadableState,
    file_name,
    piece_tensors,
    tensor_key,
)
from steepen.utils.codec import from_builtins
from steepen.utils.files import sha256_of_file
from steepen.utils.json_io import parse_json, with_checksum, without_checksum, write_json

STATE_FILE, META_FILE = file_name(0, 1), "checkpoint.json"
AnyOptimizer = Optimizer | DistributedOptimizer


class CorruptCheckpoint(SteepenError):
    """A checkpoint is incomplete, unreadable or of another run."""


@dataclass(frozen=True)
class TrainingState:
    """Progress of a run at a checkpoint: everything that is not a tensor."""

    run: str  # the spec's hash
    step: int  # steps completed; also the position in the data
    passes: int  # core passes the network has been grown to
    seconds_training: float = 0.0
    seconds_total: float = 0.0
    resumed: int = 0
    kind: str = "regular"  # regular, growth, final
    scores: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint directory."""

    path: Path

    @property
    def step(self) -> int:
        """Steps completed when it was saved."""
        return int(self.path.name)

    def facts(self) -> dict[str, Any]:
        """Read checkpoint.json."""
        try:
            facts = without_checksum(parse_json((self.path / META_FILE).read_bytes()))
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error
        if not isinstance(facts, dict):
            raise self._unreadable("it is not an object with fields")
        return cast("dict[str, Any]", facts)

    def _unreadable(self, reason: object) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"checkpoint {self.path} has no readable {META_FILE} ({reason}).")

    def training_state(self) -> TrainingState:
        """The progress of the run when it was saved."""
        facts = self.facts()
        facts.pop("files", None)
        facts.pop("sha256", None)
        try:
            state = from_builtins(TrainingState, facts, META_FILE)
            for score in state.scores:
                from_builtins(ValidationScore, score, "score")
        except UsageError as error:
            raise self._unreadable(str(error).rstrip(".")) from error
        if state.step != self.step:
            raise self._unreadable(f"it says step {state.step:,}")
        return state

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each file of tensors, by file name."""
        facts = self.facts()
        # Before runs on several ranks there was one file, and its checksum.
        found: Any = facts.get("files") or {STATE_FILE: facts.get("sha256")}
        if not (isinstance(found, dict) and all(isinstance(value, str) for value in found.values())):
            raise self._unreadable("it has no checksums of the files")
        return cast("dict[str, str]", found)

    @property
    def files(self) -> list[Path]:
        """The files of tensors, in the order of the ranks that wrote them."""
        return [self.path / name for name in sorted(self.checksums())]

    @property
    def sha256(self) -> str:
        """Checksum of all tensors: that of the file, or of the files' checksums if there are several."""
        sums = self.checksums()
        if len(sums) == 1:
            return next(iter(sums.values()))
        return hashlib.sha256("".join(sums[name] for name in sorted(sums)).encode()).hexdigest()

    def verify(self, world: World | None = None) -> None:
        """Raise CorruptCheckpoint if a file is missing or has a wrong checksum; ranks share out the files."""
        world = world or World()
        problem = ""
        for number, (name, expected) in enumerate(sorted(self.checksums().items())):
            if number % world.size != world.rank:
                continue
            try:
                if sha256_of_file(self.path / name) != expected:
                    problem = f"checkpoint {self.path} is corrupt: checksum mismatch of {name}."
            except OSError as error:
                problem = f"checkpoint {self.path} is incomplete ({error})."
        found = [text for text in world.gather_objects(problem) if text]
        if found:
            raise CorruptCheckpoint(found[0])

    def reader(self, device: torch.device | str = "cpu") -> StateReader:
        """Open the files of tensors."""
        return StateReader(self.files, device)


def write_checkpoint(
    folder: Path, training_state: TrainingState, tensors: dict[str, Tensor], world: World | None = None
) -> Checkpoint:
    """Write a checkpoint, one file per rank; it gets its name only once all files are on disk.

    `tensors` are what this rank owns. Runs in a background thread, on the world's background group.
    """
    world = world or World()
    target = folder / f"{training_state.step:08d}"
    partial = folder / f".writing-{target.name}"
    name = file_name(world.rank, world.size)
    checksums: dict[str, str] = {}

    def make_directory() -> None:
        if world.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()

    def write_tensors() -> str:
        save_file(tensors, partial / name)
        sync(partial / name)
        return sha256_of_file(partial / name)

    def complete() -> None:
        if not world.is_main:
            return
        write_json(partial / META_FILE, with_checksum({**asdict(training_state), "files": checksums}))
        sync(partial)
        if target.exists():  # the same step saved again (as growth or final): the newer kind replaces it
            _remove(target)
        partial.rename(target)
        sync(folder)

    for stage in (make_directory, write_tensors, complete):
        result, problem = None, ""
        try:
            result = stage()
        except (SafetensorError, OSError) as error:
            problem = str(error)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        # Every rank learns whether every rank has done this stage.
        outcomes = world.gather_objects([name, result, problem], background=True)
        problems = [text for _, _, text in outcomes if text]
        if problems:
            if world.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise SteepenError(
                f"checkpoint {target} could not be written ({problems[0]}); free some disk space and run the "
                "same command again: the run resumes from the checkpoint before it."
            )
        if stage is write_tensors:
            checksums |= {file: checksum for file, checksum, _ in outcomes}
    return Checkpoint(target)


def sync(path: Path) -> None:
    """fsync a file or directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return [Checkpoint(path) for path in sorted(folder.iterdir()) if path.name.isdigit() and path.is_dir()]


def prune(folder: Path, keep_last: int, keep_every: int | None) -> None:
    """Delete regular checkpoints, except the last `keep_last` and those at multiples of `keep_every`."""
    for checkpoint in list_checkpoints(folder)[:-keep_last]:
        try:
            kind = checkpoint.training_state().kind
        except CorruptCheckpoint:
            rename_corrupt(checkpoint)
            continue
        if kind == "regular" and not (keep_every and checkpoint.step % keep_every == 0):
            _remove(checkpoint.path)


def _remove(path: Path) -> None:
    """Rename, then delete: a process killed midway leaves no partial checkpoint under the name."""
    trash = path.with_name(f".removing-{path.name}")
    _delete(trash)
    path.rename(trash)
    _delete(trash)


def _delete(path: Path) -> None:
    """Delete a directory, or a file that lies in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def rename_corrupt(checkpoint: Checkpoint | Path) -> Path:
    """Rename a corrupt checkpoint to NAME.corrupt, for the user to inspect; returns the new path."""
    path = checkpoint if isinstance(checkpoint, Path) else checkpoint.path
    target = path.with_name(f"{path.name}.corrupt")
    _delete(target)
    return path.rename(target)


def remove_partial(folder: Path) -> None:
    """Delete what a killed save or delete left behind."""
    if folder.is_dir():
        for path in (*folder.glob(".writing-*"), *folder.glob(".removing-*")):
            _delete(path)


RunState = tuple[Network, AnyOptimizer, TrainingState]


def load_or_init(
    spec: RunSpec,
    folder: Path,
    device: torch.device,
    mode: ExecutionMode,
    say: Callable[[str], None],
    *,
    world: World | None = None,
    shard: str = "optimizer",
) -> RunState:
    """Load the newest valid checkpoint of a run, or initialize network and optimizer if there is none."""
    world = world or World()
    if world.is_main:
        if folder.exists() and not folder.is_dir():
            say(f"{folder} is not a directory; it is renamed to {rename_corrupt(folder).name}.")
        remove_partial(folder)
    steps: list[int] = world.from_main([saved.step for saved in list_checkpoints(folder)])
    while steps:
        saved = Checkpoint(folder / f"{steps.pop():08d}")
        try:
            run_state = _load(saved, spec, device, mode, world, shard)
        except (CorruptCheckpoint, UnreadableState, WeightsMismatch) as error:
            then = "Trying the one before it." if steps else "None is left: the run starts over."
            say(f"{error} {then}")
            if world.is_main:
                rename_corrupt(saved)
            continue
        say(f"resuming from step {run_state[2].step:,} of {spec.steps:,}.")
        return run_state
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


class CheckpointWriter:
    """Saves checkpoints in the background: training continues while a copy of the state is written.

    At most one save is under way; `save` waits for the one before it. Errors are raised by the next `save` or
    `wait`.
    """

    def __init__(self, folder: Path, world: World, *, keep_last: int, keep_every: int | None) -> None:
        self.folder, self.world = folder, world
        self.keep_last, self.keep_every = keep_last, keep_every
        self.seconds = 0.0  # duration of the last save
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self, training_state: TrainingState, network: Network, optimizer: AnyOptimizer, *, wait: bool
    ) -> None:
        """Copy the state to host memory and write it; with `wait`, return only when it is on disk."""
        self.wait()
        started = time.monotonic()
        tensors = self._snapshot(network, optimizer)

        def write() -> None:
            try:
                write_checkpoint(self.folder, training_state, tensors, self.world)
                if self.world.is_main:
                    prune(self.folder, self.keep_last, self.keep_every)
            except BaseException as error:  # raised in the trainer's thread
                self._error = error
            self.seconds = time.monotonic() - started

        self._thread = threading.Thread(target=write, name="steepen-checkpoint")
        self._thread.start()
        if wait:
            self.wait()

    def join(self) -> None:
        """Wait for the save under way; its error is kept for `wait`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait for the save under way; raises its error."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _snapshot(self, network: Network, optimizer: AnyOptimizer) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for owned in owned_pieces(network, optimizer):
            tensors |= piece_tensors(owned.piece, owned.weight, owned.state)
        copies = {name: _to_host(value) for name, value in tensors.items()}
        device = network.embedding.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rank = self.world.rank
        copies[tensor_key("random", _random_name("cpu", rank))] = torch.get_rng_state()
        if device.type == "cuda":
            copies[tensor_key("random", _random_name("cuda", rank))] = torch.cuda.get_rng_state(device)
        return copies


def owned_pieces(network: Network, optimizer: AnyOptimizer) -> list[OwnedPiece]:
    """The fp32 weights and optimizer state that this rank must save."""
    if isinstance(optimizer, DistributedOptimizer):
        return optimizer.owned_pieces()
    state = optimizer.state()
    return [
        OwnedPiece(
            Piece(name, 0, 0, p.shape[0] if p.ndim else 0, tuple(p.shape)), p.detach(), state.get(name, {})
        )
        for name, p in network.named_parameters()
    ]


def _to_host(tensor: Tensor) -> Tensor:
    """A contiguous copy in host memory, copied from a GPU without blocking."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor.detach(), non_blocking=True)


def _random_name(kind: str, rank: int) -> str:
    return kind if rank == 0 else f"{kind}.{rank}"


def _load(
    saved: Checkpoint,
    spec: RunSpec,
    device: torch.device,
    mode: ExecutionMode,
    world: World,
    shard: str,
    grow_to: int | None = None,
) -> RunState:
    training_state = saved.training_state()
    if training_state.run != spec.hash:
        raise CorruptCheckpoint(f"checkpoint {saved.path} belongs to another run ({training_state.run}).")
    if not 1 <= training_state.passes <= max(max(stage.passes) for stage in spec.schedule.stages):
        raise CorruptCheckpoint(f"checkpoint {saved.path} has more passes than the run.")
    saved.verify(world)
    network, sources = _build(spec, training_state.passes, device, mode, grow_to)
    with saved.reader() as reader:
        names = [name for name, _ in network.named_parameters()]
        copy_weights(network, _LazyWeights(reader, {name: sources.get(name, name) for name in names}))
        optimizer = _make_optimizer(spec, network, world, shard, mode.compiled)
        state: OptimizerState = {}
        for owned in owned_pieces(network, optimizer):
            name = owned.piece.name
            if name in sources:
                _read_grown_state(reader, state, name, sources[name], owned.piece, spec)
            elif found := reader.read_state(name, owned.piece):
                state[name] = found
        optimizer.load_state(state)
        _restore_random_state(reader, spec, training_state.step, device, world.rank)
    return network, optimizer, replace(training_state, resumed=training_state.resumed + 1)


def _restore_random_state(
    reader: StateReader, spec: RunSpec, step: int, device: torch.device, rank: int
) -> None:
    """Set the random state as this rank saved it, or seed it where fewer ranks saved the checkpoint."""
    saved = set(reader.names("random"))
    if (name := _random_name("cpu", rank)) in saved:
        torch.set_rng_state(reader.read("random", name))
    else:
        torch.manual_seed(name_seed(spec.seed, f"run/{step}/{rank}"))
    if device.type == "cuda" and (name := _random_name("cuda", rank)) in saved:
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
    """Saved weights by parameter name, each read when it is asked for."""

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
    network, _ = _build(spec, spec.schedule.initial, device, mode)
    hyper = spec.hyperparameters
    # Custom blocks may draw random numbers: the run's seed decides them too.
    torch.manual_seed(name_seed(spec.seed, f"run/{world.rank}" if world.rank else "run"))
    initialize(network, embedding_std=hyper.embedding_init_std, init_scale=hyper.init_scale, seed=spec.seed)
    optimizer = _make_optimizer(spec, network, world, shard, mode.compiled)
    return network, optimizer, TrainingState(run=spec.hash, step=0, passes=network.passes)


def _build(
    spec: RunSpec, passes: int, device: torch.device, mode: ExecutionMode, grow_to: int | None = None
) -> tuple[Network, dict[str, str]]:
    """Build the network on the device, without weights.

    With `grow_to` it is grown before it is allocated; also returns new parameter name → name of its source.
    """
    hyper = spec.hyperparameters
    meta = build_on_meta(spec.shape, spec.arm, hyper.multipliers, spec.options, passes=passes)
    sources = {} if grow_to is None else grow(meta, grow_to)
    network = allocate(meta, device)
    apply_execution_mode(network, spec.precision, fused=mode.fused, compiled=mode.compiled)
    return network, sources


def _make_optimizer(
    spec: RunSpec, network: Network, world: World, shard: str, compiled: bool
) -> AnyOptimizer:
    """The optimizer of a network whose weights are in place."""
    hyper, named = spec.hyperparameters, network.named_parameters()
    if world.size == 1:
        return Optimizer(named, hyper, spec.optimizer, network.refresh)
    if shard == "full":
        built_in = spec.arm.block == "transformer"
        # A custom block may compute in fp32 what the built-in block computes in the compute dtype.
        dtype = network.compute_dtype if built_in else None
        tied = spec.arm.tied and spec.schedule.max_passes > 1
        repeated = [block for core in network.cores for block in cast("Any", core)] if tied else []
        return FullyShardedOptimizer(
            network, hyper, spec.optimizer, world, compute_dtype=dtype, repeated=repeated
        )
    fused = network.fused
    copies = {} if fused is None else fused.compute_copies()
    optimizer = ShardedOptimizer(
        named,
        hyper,
        spec.optimizer,
        world,
        copies={name: copies[p] for name, p in network.named_parameters() if p in copies},
        after_gather=None if fused is None else fused.requantize,
    )
    if fused is not None:
        fused.signal.listener = optimizer.gradient_ready
    if not compiled:  # a hook inside a compiled block would break its graph
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
