"""Load a trained network from its run directory or from one checkpoint.

from steepen.evaluation.load import load

run = load("runs/3f2a…")
logits = run.network(tokens, passes=run.passes)
run.tokenizer.decode(...), run.spec, run.record
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from steepen.data.tokenizer import Tokenizer, load_run_tokenizer
from steepen.errors import SteepenError, UsageError
from steepen.model.init import allocate, copy_weights
from steepen.model.network import Network
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec, read_spec
from steepen.runs.store import RunDirectory, checkpoint_step
from steepen.training.checkpoint import META_FILE, Checkpoint, CorruptCheckpoint, list_checkpoints
from steepen.training.device import find_device
from steepen.training.run_state import build_network
from steepen.training.step_schedule import build_schedule


@dataclass(frozen=True)
class RunCheckpoint:
    """One checkpoint of a run on disk; its weights are not read yet."""

    run: Path
    spec: RunSpec
    checkpoint: Checkpoint

    @property
    def step(self) -> int:
        """Training steps done."""
        return self.checkpoint.step

    @property
    def passes(self) -> int:
        """Core passes at which the network is evaluated at this step."""
        return int(build_schedule(self.spec).eval_passes[max(0, self.step - 1)])

    @property
    def is_final(self) -> bool:
        """Whether this is the last step of the run."""
        return self.step == self.spec.steps


@dataclass(frozen=True)
class LoadedRun:
    """A trained network with its run."""

    checkpoint: RunCheckpoint
    network: Network
    precision: str  # of the weights: fp32 or bf16
    tokenizer: Tokenizer
    record: RunRecord | None  # None while the run has not finished

    @property
    def spec(self) -> RunSpec:
        """The run's specification."""
        return self.checkpoint.spec

    @property
    def passes(self) -> int:
        """Core passes at which the network is evaluated."""
        return self.checkpoint.passes


def load(
    path: str | Path | RunCheckpoint,
    *,
    device: str | torch.device = "auto",
    precision: str = "auto",
) -> LoadedRun:
    """Load the network of a run directory (its newest checkpoint) or of a checkpoint directory.

    `precision` auto is the run's own, and bf16 for a run trained in fp8. Raises if the checksum of the
    weights is wrong.
    """
    checkpoint = path if isinstance(path, RunCheckpoint) else find_checkpoint(path)
    spec = checkpoint.spec
    if precision == "auto":
        # fp8 is a training precision: its master weights are evaluated in bf16.
        precision = "bf16" if spec.precision == "fp8" else spec.precision
    elif precision not in ("fp32", "bf16"):
        raise UsageError(f"`precision` = {precision!r} is not valid: use auto, fp32 or bf16.")
    place = find_device(device) if isinstance(device, str) else device
    directory = RunDirectory(checkpoint.run)
    tokenizer = load_run_tokenizer(directory.tokenizer_file)
    if tokenizer.size > spec.shape.vocabulary:  # a copy from another run
        raise SteepenError(
            f"{directory.tokenizer_file} has {tokenizer.size:,} ids and the run's network a vocabulary of "
            f"{spec.shape.vocabulary:,}: it is not the tokenizer that the run was trained with."
        )
    network = load_network(checkpoint, place, precision)
    return LoadedRun(checkpoint, network, precision, tokenizer, directory.record())


def find_checkpoint(path: str | Path) -> RunCheckpoint:
    """Find the newest checkpoint of a run directory, or the checkpoint that a directory is."""
    path = Path(path).resolve()
    run = path if (path / "spec.json").is_file() else path.parent.parent
    if not (run / "spec.json").is_file() or (run != path and not path.is_dir()):
        raise UsageError(
            f"{path} is neither a run directory (with spec.json) nor one of its checkpoints/NNNNNNNN; "
            "`steepen train` prints the run's directory when it ends."
        )
    if run == path:
        saved = list_checkpoints(run / "checkpoints")
        if not saved:
            if (run / "record.json").is_file():
                raise SteepenError(
                    f"{run} has finished and its checkpoints were removed; to get them back, move its "
                    "record.json aside and train it again."
                )
            raise SteepenError(f"{run} has no checkpoint yet.")
        checkpoint = saved[-1]
    else:
        if not (path / META_FILE).is_file() or checkpoint_step(path.name) < 0:
            raise UsageError(f"{path} is not a checkpoint (it has no {META_FILE}).")
        checkpoint = Checkpoint(path)
    return RunCheckpoint(run, read_spec(run / "spec.json"), checkpoint)


def load_network(checkpoint: RunCheckpoint, device: torch.device, precision: str) -> Network:
    """Build the network of a checkpoint and read its weights, checksum verified, as fp32 or bf16."""
    state, spec = checkpoint.checkpoint.training_progress(), checkpoint.spec
    path = checkpoint.checkpoint.path
    if state.run != spec.hash:
        raise SteepenError(f"{path} belongs to another run ({state.run}).")
    if not 1 <= state.passes <= spec.schedule.max_passes:
        raise SteepenError(
            f"{path} has {state.passes:,} passes, and its run at most {spec.schedule.max_passes:,}."
        )
    network = allocate(build_network(spec, spec.network_after(state.step), state.passes), device)
    try:
        with checkpoint.checkpoint.reader(device) as reader:
            copy_weights(network, {name: reader.read("model", name) for name in reader.names("model")})
    except CorruptCheckpoint as error:
        raise SteepenError(f"{error} Use another checkpoint.") from error
    if not all(weight.isfinite().all() for weight in network.parameters()):
        raise SteepenError(f"{path} has weights that are not finite numbers. Use another checkpoint.")
    # Weights cast once give the same results as weights cast at every use, and are faster.
    return network.to(torch.bfloat16) if precision == "bf16" else network
