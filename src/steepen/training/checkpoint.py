"""Checkpoints: whole or absent, checksummed, and never a pickle.

checkpoints/00001200/ holds state.safetensors (weights, optimizer state, random state) and checkpoint.json
(step, passes, clocks, the spec's hash, and the SHA-256 of the first). The folder is written under another
name and renamed when both files are on disk, so a checkpoint that has its name is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from steepen.errors import SteepenError
from steepen.optim.state import OptimizerState
from steepen.utils.files import sha256_of_file

STATE, META = "state.safetensors", "checkpoint.json"
SEPARATOR = "//"  # between a parameter's name and its state's; neither holds it


class CorruptCheckpoint(SteepenError):
    """A checkpoint does not hold what it says."""


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands: all that is not a tensor."""

    run: str  # the spec's hash
    step: int  # steps done; also the position in the data
    passes: int  # what the network has been grown to
    seconds_training: float = 0.0
    seconds_total: float = 0.0
    resumed: int = 0
    kind: str = "regular"  # regular, growth, final
    scores: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path

    @property
    def step(self) -> int:
        """Steps done when it was saved."""
        return int(self.path.name)

    def training_state(self) -> TrainingState:
        """The part that is not tensors."""
        try:
            facts = json.loads((self.path / META).read_text())
            facts.pop("sha256")
            return TrainingState(**facts)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpoint(f"checkpoint {self.path} has no readable {META}.") from error

    def load(self, device: torch.device) -> tuple[dict[str, Tensor], OptimizerState, dict[str, Tensor]]:
        """Weights, optimizer state and random state, after the checksum has been found right."""
        file = self.path / STATE
        try:
            expected = json.loads((self.path / META).read_text())["sha256"]
            actual = sha256_of_file(file)
        except (OSError, ValueError, KeyError) as error:
            raise CorruptCheckpoint(f"checkpoint {self.path} is incomplete ({error}).") from error
        if actual != expected:
            raise CorruptCheckpoint(f"checkpoint {self.path} is corrupt: {STATE} does not have its checksum.")
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


def save(
    folder: Path,
    position: TrainingState,
    weights: dict[str, Tensor],
    state: OptimizerState,
    random: dict[str, Tensor],
) -> Checkpoint:
    """Write a checkpoint; it takes its name only once it is whole and on disk."""
    tensors = {f"model{SEPARATOR}{name}": value.detach().contiguous() for name, value in weights.items()}
    for name, parts in state.items():
        for part, value in parts.items():
            tensors[f"optimizer{SEPARATOR}{name}{SEPARATOR}{part}"] = value.detach().contiguous()
    tensors |= {f"random{SEPARATOR}{name}": value for name, value in random.items()}
    target = folder / f"{position.step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".writing-{target.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        save_file(tensors, partial / STATE)
        sync(partial / STATE)
        facts = {**asdict(position), "sha256": sha256_of_file(partial / STATE)}
        (partial / META).write_text(json.dumps(facts, indent=2) + "\n")
        sync(partial / META)
        sync(partial)
        if target.exists():  # the same step saved again (as growth or final): the newer kind replaces it
            _remove(target)
        partial.rename(target)
        sync(folder)
    except (SafetensorError, OSError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise SteepenError(
            f"checkpoint {target} could not be written ({error}); make room on the disk and run the same "
            "command again: the run goes on from the checkpoint before it."
        ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Checkpoint(target)


def sync(path: Path) -> None:
    """Have a file or folder on disk before going on."""
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
    """Drop old regular checkpoints: the last few, every m-th step, growth and final ones stay."""
    for checkpoint in list_checkpoints(folder)[:-keep_last]:
        try:
            kind = checkpoint.training_state().kind
        except CorruptCheckpoint:
            set_aside(checkpoint)
            continue
        if kind == "regular" and not (keep_every and checkpoint.step % keep_every == 0):
            _remove(checkpoint.path)


def _remove(path: Path) -> None:
    """Take the name away first: a process killed in the middle leaves no half of a checkpoint under it."""
    leaving = path.with_name(f".removing-{path.name}")
    shutil.rmtree(leaving, ignore_errors=True)
    path.rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def set_aside(checkpoint: Checkpoint) -> None:
    """Keep a corrupt checkpoint for the user to look at, out of the way of the good ones."""
    target = checkpoint.path.with_name(f"{checkpoint.path.name}.corrupt")
    shutil.rmtree(target, ignore_errors=True)
    checkpoint.path.rename(target)


def remove_partial(folder: Path) -> None:
    """Clear what a killed save or removal left behind."""
    if folder.is_dir():
        for path in (*folder.glob(".writing-*"), *folder.glob(".removing-*")):
            shutil.rmtree(path, ignore_errors=True)
