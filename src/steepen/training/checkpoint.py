"""Checkpoints: save, load, list, prune, and resume a run from the newest valid one.

checkpoints/00001200/ holds state.safetensors (weights, optimizer state, random state; no pickle) and
checkpoint.json (step, passes, times, the spec's hash, SHA-256 of state.safetensors). The directory is written
under a temporary name and renamed once both files are on disk, so a checkpoint under its name is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from steepen.errors import SteepenError
from steepen.execution.select import ExecutionMode, apply_execution_mode
from steepen.model.init import build_on_meta, initialize, name_seed
from steepen.model.load_weights import allocate, copy_weights
from steepen.model.network import Network
from steepen.optim.optimizer import Optimizer
from steepen.optim.state import OptimizerState
from steepen.runs.spec import RunSpec
from steepen.utils.files import sha256_of_file

STATE_FILE, META_FILE = "state.safetensors", "checkpoint.json"
SEPARATOR = "//"  # between section, parameter name and state key in a tensor's name


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

    def training_state(self) -> TrainingState:
        """Read checkpoint.json."""
        try:
            facts = json.loads((self.path / META_FILE).read_text())
            facts.pop("sha256")
            return TrainingState(**facts)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpoint(f"checkpoint {self.path} has no readable {META_FILE}.") from error

    def load(self, device: torch.device) -> tuple[dict[str, Tensor], OptimizerState, dict[str, Tensor]]:
        """Read weights, optimizer state and random state onto a device, after verifying the checksum."""
        file = self.path / STATE_FILE
        try:
            expected = json.loads((self.path / META_FILE).read_text())["sha256"]
            actual = sha256_of_file(file)
        except (OSError, ValueError, KeyError) as error:
            raise CorruptCheckpoint(f"checkpoint {self.path} is incomplete ({error}).") from error
        if actual != expected:
            raise CorruptCheckpoint(f"checkpoint {self.path} is corrupt: checksum mismatch of {STATE_FILE}.")
        try:
            tensors = load_file(file, device=str(device))
        except (SafetensorError, OSError) as error:
            raise CorruptCheckpoint(f"checkpoint {self.path} cannot be read ({error}).") from error
        weights: dict[str, Tensor] = {}
        state: OptimizerState = {}
        random: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            section, _, rest = key.partition(SEPARATOR)
            if section == "model":
                weights[rest] = tensor
            elif section == "random":
                random[rest] = tensor
            else:
                name, _, part = rest.partition(SEPARATOR)
                state.setdefault(name, {})[part] = tensor
        return weights, state, random


def write_checkpoint(
    folder: Path,
    training_state: TrainingState,
    weights: dict[str, Tensor],
    state: OptimizerState,
    random: dict[str, Tensor],
) -> Checkpoint:
    """Write a checkpoint; it gets its name only once both files are on disk."""
    tensors = {f"model{SEPARATOR}{name}": value.detach().contiguous() for name, value in weights.items()}
    for name, parts in state.items():
        for part, value in parts.items():
            tensors[f"optimizer{SEPARATOR}{name}{SEPARATOR}{part}"] = value.detach().contiguous()
    tensors |= {f"random{SEPARATOR}{name}": value for name, value in random.items()}
    target = folder / f"{training_state.step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".writing-{target.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        save_file(tensors, partial / STATE_FILE)
        sync(partial / STATE_FILE)
        facts = {**asdict(training_state), "sha256": sha256_of_file(partial / STATE_FILE)}
        (partial / META_FILE).write_text(json.dumps(facts, indent=2) + "\n")
        sync(partial / META_FILE)
        sync(partial)
        if target.exists():  # the same step saved again (as growth or final): the newer kind replaces it
            _remove(target)
        partial.rename(target)
        sync(folder)
    except (SafetensorError, OSError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise SteepenError(
            f"checkpoint {target} could not be written ({error}); free some disk space and run the same "
            "command again: the run resumes from the checkpoint before it."
        ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
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
    shutil.rmtree(trash, ignore_errors=True)
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def rename_corrupt(checkpoint: Checkpoint) -> None:
    """Rename a corrupt checkpoint to NAME.corrupt, for the user to inspect."""
    target = checkpoint.path.with_name(f"{checkpoint.path.name}.corrupt")
    shutil.rmtree(target, ignore_errors=True)
    checkpoint.path.rename(target)


def remove_partial(folder: Path) -> None:
    """Delete what a killed save or delete left behind."""
    if folder.is_dir():
        for path in (*folder.glob(".writing-*"), *folder.glob(".removing-*")):
            shutil.rmtree(path, ignore_errors=True)


RunState = tuple[Network, Optimizer, TrainingState]


def load_or_init(
    spec: RunSpec, folder: Path, device: torch.device, mode: ExecutionMode, say: Callable[[str], None]
) -> RunState:
    """Load the newest valid checkpoint of a run, or initialize network and optimizer if there is none."""
    remove_partial(folder)
    candidates = list_checkpoints(folder)
    while candidates:
        saved = candidates.pop()
        try:
            network, optimizer, training_state = _load(saved, spec, device, mode)
        except CorruptCheckpoint as error:
            then = "Trying the one before it." if candidates else "None is left: the run starts over."
            say(f"{error} {then}")
            rename_corrupt(saved)
            continue
        say(f"resuming from step {training_state.step:,} of {spec.steps:,}.")
        return network, optimizer, training_state
    return _init(spec, device, mode)


def save(folder: Path, training_state: TrainingState, network: Network, optimizer: Optimizer) -> None:
    """Write a checkpoint from which `load_or_init` resumes to the bit (on a CPU)."""
    weights = {name: p.data for name, p in network.named_parameters()}
    random = {"cpu": torch.get_rng_state()}
    device = network.embedding.device
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    write_checkpoint(folder, training_state, weights, optimizer.state(), random)


def _load(saved: Checkpoint, spec: RunSpec, device: torch.device, mode: ExecutionMode) -> RunState:
    training_state = saved.training_state()
    weights, state, random = saved.load(device)
    if training_state.run != spec.hash:
        raise CorruptCheckpoint(f"checkpoint {saved.path} belongs to another run ({training_state.run}).")
    network, optimizer = _build(spec, training_state.passes, device, mode)
    copy_weights(network, weights)
    optimizer.load_state(state)
    torch.set_rng_state(random["cpu"].cpu())
    if "cuda" in random and device.type == "cuda":
        torch.cuda.set_rng_state(random["cuda"].cpu(), device)
    return network, optimizer, replace(training_state, resumed=training_state.resumed + 1)


def _init(spec: RunSpec, device: torch.device, mode: ExecutionMode) -> RunState:
    network, optimizer = _build(spec, spec.schedule.initial, device, mode)
    hyper = spec.hyperparameters
    # Custom blocks may draw random numbers: the run's seed decides them too.
    torch.manual_seed(name_seed(spec.seed, "run"))
    initialize(network, embedding_std=hyper.embedding_init_std, init_scale=hyper.init_scale, seed=spec.seed)
    return network, optimizer, TrainingState(run=spec.hash, step=0, passes=network.passes)


def _build(
    spec: RunSpec, passes: int, device: torch.device, mode: ExecutionMode
) -> tuple[Network, Optimizer]:
    """Build the network on the device, without weights, and its optimizer."""
    hyper = spec.hyperparameters
    meta = build_on_meta(spec.shape, spec.arm, hyper.multipliers, spec.options, passes=passes)
    network = allocate(meta, device)
    apply_execution_mode(network, spec.precision, fused=mode.fused, compiled=mode.compiled)
    return network, Optimizer(network.named_parameters(), hyper, spec.optimizer, network.refresh)
