"""A run's record: losses, FLOPs, parameters and speed. Analysis reads records, never logs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from steepen.runs.spec import RunSpec
from steepen.utils.codec import from_builtins, to_builtins

RECORD_VERSION = 1


@dataclass(frozen=True)
class Parameters:
    """Parameter counts by every convention."""

    stored: int
    initial_stored: int
    compute_active: int  # at the passes the run ended with
    initial_compute_active: int
    mean_compute_active: float  # averaged over the tokens of the run
    embedding: int  # input embedding and head, each
    blocks: int  # stored, without embedding and head


@dataclass(frozen=True)
class ValidationScore:
    """Loss on the validation set at one moment of training."""

    step: int
    loss: float  # nats per token
    bits_per_byte: float | None
    passes: int


@dataclass(frozen=True)
class RunRecord:
    """Results of one finished run, with its spec."""

    spec: RunSpec
    run: str  # the spec's hash
    validation_loss: float
    validation_bits_per_byte: float | None
    validation_identity: str
    validation_scores: tuple[ValidationScore, ...]
    train_loss: float  # mean over the last steps
    tokens: int
    flops: float  # realized, pass by pass
    flops_by_term: dict[str, float]
    parameters: Parameters
    seconds_training: float  # without evaluation, compilation and checkpoints
    seconds_total: float
    tokens_per_second: float
    mfu: float | None
    peak_memory_bytes: int | None
    hardware: dict[str, Any]
    versions: dict[str, str]
    git: dict[str, Any] | None
    finished: str  # UTC, ISO 8601
    resumed: int = 0  # how often the run was resumed
    evaluation: dict[str, Any] = field(
        default_factory=dict[str, Any]
    )  # scores added by `steepen eval --join`
    version: int = RECORD_VERSION

    def to_dict(self) -> dict[str, Any]:
        """The JSON value that record.json holds."""
        return to_builtins(self)

    @staticmethod
    def from_dict(value: Any) -> RunRecord:
        """Decode the value of record.json."""
        return from_builtins(RunRecord, value, "record")
