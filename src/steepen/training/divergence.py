"""Divergence: a loss, a gradient norm or the weights became NaN or infinite."""

from __future__ import annotations

from steepen.errors import SteepenError
from steepen.runs.spec import RunSpec
from steepen.training.checkpoint import CheckpointWriter, list_checkpoints


class Diverged(SteepenError):
    """The loss, a gradient or a weight is NaN or infinite."""


def diverged(spec: RunSpec, writer: CheckpointWriter, step: int, what: str) -> Diverged:
    """The error for a step (from 0): its position in the data, and the last checkpoint before it."""
    if writer.world.size == 1:
        writer.join()  # it may be writing that checkpoint
    good = [c for c in list_checkpoints(writer.folder) if c.step <= step]
    where = f"the last good checkpoint is {good[-1].path}" if good else "no checkpoint was saved before it"
    first = step * spec.batch_sequences
    return Diverged(
        f"{what} at step {step + 1:,} (sequences {first:,} to {first + spec.batch_sequences - 1:,} in "
        f"data order); {where}. Lower the learning rate "
        f"(`changes` learning_rate=…) or look at the data."
    )
