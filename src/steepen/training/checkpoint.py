"""Checkpoints on disk: write, verify, list and prune them (`run_state` loads a run from one).

checkpoints/00001200/ holds one safetensors file per rank (weights, optimizer state, random state; no pickle)
and checkpoint.json (step, passes, times, the spec's hash, SHA-256 of each file). The directory is written
under a temporary name and renamed once all files are on disk, so a checkpoint under its name is complete.

A file has what its rank owns, in global shapes: a tensor is named section//parameter or
section//parameter//key; rows [first, last) of a larger tensor add @first-last/total. A reader asks for any
rows of any tensor, so a checkpoint does not depend on the number of ranks that wrote it or that read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from steepen.distributed.owners import Piece
from steepen.distributed.sharded_optimizer import DistributedOptimizer, OwnedPiece
from steepen.distributed.world import World
from steepen.errors import MAX_WHOLE, SteepenError, UsageError
from steepen.model.network import Network
from steepen.optim.optimizer import Optimizer
from steepen.runs.record import ValidationScore
from steepen.runs.store import checkpoint_step
from steepen.utils.codec import Checked, Range, from_builtins
from steepen.utils.files import disk_full, file_version, follow_umask, sha256_of_file, sync
from steepen.utils.json_io import read_json, with_checksum, without_checksum, write_json

SEPARATOR = "//"  # between section, parameter name and state key in a tensor's name
_ROWS = re.compile(r"(.*)@([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
REPLACED = ".replaced-"  # before the name of a checkpoint whose successor is about to get it
STATE_FILE, META_FILE = "state.safetensors", "checkpoint.json"
AnyOptimizer = Optimizer | DistributedOptimizer


class CorruptCheckpoint(SteepenError):
    """A checkpoint is incomplete, unreadable or of another run."""


class UnreadableState(SteepenError):
    """A file of a checkpoint cannot be read, or lacks a tensor."""


def file_name(rank: int, size: int) -> str:
    """Name of the file that a rank writes."""
    return STATE_FILE if size == 1 else f"state-{rank:05d}-of-{size:05d}.safetensors"


def tensor_key(section: str, name: str, part: str | None = None, piece: Piece | None = None) -> str:
    """Key of a tensor in a file; `piece` says which rows of the parameter it holds."""
    key = SEPARATOR.join(word for word in (section, name, part) if word is not None)
    return key if piece is None or piece.whole else f"{key}@{piece.first}-{piece.last}/{piece.shape[0]}"


def piece_tensors(piece: Piece, weight: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one owned piece by key: its weight and its optimizer state.

    State without rows (a step count) belongs to the whole parameter; every owner of rows has the same.
    """
    tensors = {tensor_key("model", piece.name, None, piece): weight}
    for part, value in state.items():
        tensors[tensor_key("optimizer", piece.name, part, piece if value.ndim else None)] = value
    return tensors


@dataclass(frozen=True)
class _Stored:
    """A tensor, or rows [first, last) of one, in a file."""

    file: int
    key: str
    first: int = 0
    last: int | None = None  # None: the whole tensor


class StateReader:
    """Reads tensors, or rows of them, from the files of a checkpoint. Use it in a `with` block."""

    def __init__(self, files: Iterable[Path], device: torch.device | str = "cpu") -> None:
        self._stack = contextlib.ExitStack()
        self._handles: list[Any] = []
        self._index: dict[str, list[_Stored]] = {}
        file = Path()
        try:
            for number, file in enumerate(files):
                handle = self._stack.enter_context(safe_open(file, framework="pt", device=str(device)))
                self._handles.append(handle)
                for key in handle.keys():  # noqa: SIM118
                    match = _ROWS.fullmatch(key)
                    name, first, last = (match[1], int(match[2]), int(match[3])) if match else (key, 0, None)
                    self._index.setdefault(name, []).append(_Stored(number, key, first, last))
        except (SafetensorError, OSError) as error:
            self._stack.close()
            raise UnreadableState(f"{file} cannot be read ({error}).") from error

    def __enter__(self) -> StateReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def names(self, section: str) -> list[str]:
        """Tensors of a section, without its name: parameters, or parameter//key."""
        prefix = section + SEPARATOR
        return [key.removeprefix(prefix) for key in self._index if key.startswith(prefix)]

    def read(self, section: str, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """A whole tensor, or rows [first, last) of it, whatever ranges it was stored in."""
        key = f"{section}{SEPARATOR}{name}"
        stored = sorted(self._index.get(key, ()), key=lambda each: each.first)
        if not stored:
            raise UnreadableState(f"the checkpoint has no tensor {key}.")
        try:
            if stored[0].last is None:
                handle = self._handles[stored[0].file]
                if rows is None:
                    return handle.get_tensor(stored[0].key)
                whole = handle.get_slice(stored[0].key)
                return whole[rows[0] : rows[1]] if whole.get_shape() else handle.get_tensor(stored[0].key)
            first, last = rows or (0, max(each.last or 0 for each in stored))
            parts: list[Tensor] = []
            position = first
            for each in stored:
                end = min(last, each.last or 0)
                if position < end and each.first <= position:
                    part = self._handles[each.file].get_slice(each.key)
                    parts.append(part[position - each.first : end - each.first])
                    position = end
            if position < last:
                raise UnreadableState(f"the checkpoint lacks rows {position} to {last - 1} of {key}.")
            return torch.cat(parts) if len(parts) != 1 else parts[0]
        except SafetensorError as error:
            raise UnreadableState(f"the tensor {key} cannot be read ({error}).") from error

    def read_state(self, piece: Piece) -> dict[str, Tensor]:
        """Optimizer state of the rows of a parameter that a piece has, by key."""
        rows = None if piece.whole else (piece.first, piece.last)
        prefix = piece.name + SEPARATOR
        return {
            full.removeprefix(prefix): self.read("optimizer", full, rows)
            for full in self.names("optimizer")
            if full.startswith(prefix)
        }


Whole = Annotated[int, Range(0, MAX_WHOLE)]
Seconds = Annotated[float, Range(0, MAX_WHOLE)]


@dataclass(frozen=True)
class TrainingProgress(Checked):
    """Progress of a run at a checkpoint: everything that is not a tensor."""

    run: str  # the spec's hash
    step: Whole  # steps completed; also the position in the data
    passes: int  # core passes the network has been grown to
    seconds_training: Seconds = 0.0
    seconds_total: Seconds = 0.0
    resumed: Whole = 0
    kind: Literal["regular", "growth", "branch", "final"] = "regular"  # branch: another run starts from it
    trunk: str = ""  # the run whose first `trunk_steps` steps this one took over
    trunk_steps: Whole = 0
    scores: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint directory."""

    path: Path

    @property
    def step(self) -> int:
        """Steps completed when it was saved."""
        return int(self.path.name)

    def metadata(self) -> dict[str, Any]:
        """Read checkpoint.json."""
        try:
            metadata = without_checksum(read_json(self.path / META_FILE))
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error
        if not isinstance(metadata, dict):
            raise self._unreadable("it is not an object with fields")
        return cast("dict[str, Any]", metadata)

    def _unreadable(self, reason: object) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"checkpoint {self.path} has no readable {META_FILE} ({reason}).")

    def training_progress(self) -> TrainingProgress:
        """The progress of the run when it was saved."""
        metadata = self.metadata()
        metadata.pop("files", None)
        try:
            state = from_builtins(TrainingProgress, metadata, META_FILE)
            for score in state.scores:
                from_builtins(ValidationScore, score, "score")
        except UsageError as error:
            raise self._unreadable(str(error).rstrip(".")) from error
        if state.step != self.step:
            raise self._unreadable(f"it says step {state.step:,}")
        return state

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each file of tensors, by file name."""
        found: Any = self.metadata().get("files")
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
        found = [text for text in world.all_gather_objects(problem) if text]
        if found:
            raise CorruptCheckpoint(found[0])

    @contextlib.contextmanager
    def reader(
        self, device: torch.device | str = "cpu", world: World | None = None
    ) -> Generator[StateReader]:
        """Open the files of tensors, verified; raises CorruptCheckpoint too if they are altered meanwhile."""
        before = [file_version(file) for file in self.files]
        self.verify(world)
        with StateReader(self.files, device) as reader:
            yield reader
        if before != [file_version(file) for file in self.files]:
            self.verify()


def write_checkpoint(
    folder: Path, training_progress: TrainingProgress, tensors: dict[str, Tensor], world: World | None = None
) -> Checkpoint:
    """Write a checkpoint, one file per rank; it gets its name only once all files are on disk.

    `tensors` are what this rank owns. Runs in a background thread, on the world's background group.
    """
    world = world or World()
    target = folder / f"{training_progress.step:08d}"
    partial, replaced = folder / f".writing-{target.name}", folder / f"{REPLACED}{target.name}"
    checksums: dict[str, str] = {}

    def make_directory() -> None:
        if world.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()

    def write_tensors() -> tuple[str, str]:
        file = partial / file_name(world.rank, world.size)
        save_file(tensors, file)
        follow_umask(file)
        sync(file)
        return file.name, sha256_of_file(file)

    def complete() -> None:
        if not world.is_main:
            return
        write_json(partial / META_FILE, with_checksum({**asdict(training_progress), "files": checksums}))
        sync(partial)
        # The same step saved again (as growth or final): the newer kind replaces it. A process killed between
        # the two renames leaves the older one to `remove_partial`.
        if os.path.lexists(target):
            _delete(replaced)
            target.rename(replaced)
        partial.rename(target)
        sync(folder)
        _delete(replaced)

    # All ranks finish a stage before any begins the next: files need the directory, and the rename that makes
    # the checkpoint visible needs every file on disk with its checksum. A kill at any point leaves a
    # directory whose name is not that of a checkpoint, which `remove_partial` deletes.
    try:
        _on_all_ranks(make_directory, world)
        checksums |= dict(_on_all_ranks(write_tensors, world))
        _on_all_ranks(complete, world)
    except BaseException as error:
        if world.is_main:  # whatever the error is: these files may be large
            shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, _StageFailed):
            raise
        remedy = "free some disk space" if disk_full(str(error)) else "mend that"
        raise SteepenError(
            f"checkpoint {target} could not be written ({error}); {remedy} and run the same command again: "
            "the run resumes from the checkpoint before it."
        ) from None
    return Checkpoint(target)


class _StageFailed(Exception):
    """A stage of writing a checkpoint failed on some rank; every rank raises this."""


def _on_all_ranks(stage: Callable[[], Any], world: World) -> list[Any]:
    """Do a stage on every rank; returns its results by rank, once every rank knows that all have done it."""
    result, problem = None, ""
    try:
        result = stage()
    except (SafetensorError, OSError) as error:
        problem = str(error)
    outcomes = world.all_gather_objects([result, problem], background=True)
    problems = [text for _, text in outcomes if text]
    if problems:
        raise _StageFailed(problems[0])
    return [result for result, _ in outcomes]


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Checkpoints, oldest first. Whatever lies under a checkpoint's name is one: reading it tells."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if checkpoint_step(path.name) >= 0]
    return sorted(map(Checkpoint, found), key=lambda checkpoint: checkpoint.step)


def prune(
    folder: Path, keep_last: int, keep_every: int | None, kinds: Collection[str] = ("regular",)
) -> None:
    """Delete checkpoints of `kinds`, except the last `keep_last` and those at multiples of `keep_every`."""
    for checkpoint in list_checkpoints(folder)[:-keep_last]:
        try:
            kind = checkpoint.training_progress().kind
        except CorruptCheckpoint:
            rename_corrupt(checkpoint)
            continue
        if kind in kinds and not (keep_every and checkpoint.step % keep_every == 0):
            # Renamed first: a process killed midway leaves no partial checkpoint under the name.
            trash = checkpoint.path.with_name(f".removing-{checkpoint.path.name}")
            _delete(trash)
            checkpoint.path.rename(trash)
            _delete(trash)


def _delete(path: Path) -> None:
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
    """Delete what a killed save or delete left behind, or restore a checkpoint that was being replaced."""
    if folder.is_dir():
        for path in folder.glob(f"{REPLACED}*"):
            target = path.with_name(path.name.removeprefix(REPLACED))
            if os.path.lexists(target):
                _delete(path)
            else:
                path.rename(target)
        for path in (*folder.glob(".writing-*"), *folder.glob(".removing-*")):
            _delete(path)


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
        self, training_progress: TrainingProgress, network: Network, optimizer: AnyOptimizer, *, wait: bool
    ) -> None:
        """Copy the state to host memory and write it; with `wait`, return only when it is on disk."""
        self.wait()
        started = time.monotonic()
        tensors = self._snapshot(network, optimizer)

        def write() -> None:
            try:
                write_checkpoint(self.folder, training_progress, tensors, self.world)
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
        copies[tensor_key("random", random_name("cpu", rank))] = torch.get_rng_state()
        if device.type == "cuda":
            copies[tensor_key("random", random_name("cuda", rank))] = torch.cuda.get_rng_state(device)
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


def random_name(kind: str, rank: int) -> str:
    """Name of a rank's random state; `kind` is cpu or cuda."""
    return kind if rank == 0 else f"{kind}.{rank}"
