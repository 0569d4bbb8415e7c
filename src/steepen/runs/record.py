"""A run's record: losses, FLOPs, parameters, speed and scores. Analysis reads records, never logs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from steepen.errors import UsageError, require, show
from steepen.runs.spec import RunSpec
from steepen.utils.codec import from_builtins, to_builtins
from steepen.utils.formatting import is_number, printable_values
from steepen.utils.json_io import CHECKSUM, with_checksum, without_checksum

RECORD_VERSION = 2


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
    epoch: int | None = None  # epochs that were finished or begun
    train_loss: float | None = None  # mean over the steps since the score before
    # Root mean square of the residual stream after prelude, each core pass and coda.
    residual_rms: dict[str, float] = field(default_factory=dict[str, float])
    by_source: dict[str, float] = field(default_factory=dict[str, float])  # loss on each source of a mixture


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
    flops: float  # realized, pass by pass; of the whole run, whoever trained its first steps
    flops_by_term: dict[str, float]
    parameters: Parameters
    seconds_training: float  # without evaluation, compilation and checkpoints
    seconds_total: float  # without waiting for another run on the same GPU
    tokens_per_second: float
    mfu: float | None
    peak_memory_bytes: int | None
    hardware: dict[str, Any]
    versions: dict[str, str]
    git: dict[str, Any] | None
    finished: str  # UTC, ISO 8601
    resumed: int = 0  # how often the run was resumed
    recompute: bool = False  # whether blocks were computed again in the backward, for lack of memory
    trunk: str = ""  # the run whose checkpoint it started from; of runs in a row, the first
    trunk_steps: int = 0  # steps before that checkpoint, which are not in the seconds and speeds above
    trunk_flops: float = 0.0  # FLOPs of these steps
    # Scores added by `steepen eval --update-record`.
    evaluation: dict[str, Any] = field(default_factory=dict[str, Any])
    version: int = RECORD_VERSION

    @property
    def arm(self) -> str:
        """The name of its arm."""
        return self.spec.arm.name

    @property
    def spent_flops(self) -> float:
        """FLOPs that this run spent itself, without those of its trunk."""
        return self.flops - self.trunk_flops

    @property
    def remarks(self) -> tuple[str, ...]:
        """What makes the run no fair one: it ended in its warm-up, or has learnt nothing."""
        spec, found = self.spec, list[str]()
        warmup, chance = spec.hyperparameters.warmup_steps, math.log(spec.shape.token_ids)
        if spec.steps <= warmup:
            found.append(
                f"its {spec.steps} steps are no more than the {warmup:g} of its warm-up: the learning rate "
                "never fell (a shorter warm-up: `changes` warmup_steps=…)"
            )
        if self.validation_loss > chance:
            found.append(
                f"its loss {self.validation_loss:.2f} is above that of guessing, ln V = {chance:.2f}: it has "
                "learnt nothing (a learning rate that is too high?)"
            )
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """The JSON value that record.json holds, with its checksum."""
        return with_checksum(to_builtins(self))

    @staticmethod
    def from_dict(value: Any) -> RunRecord:
        """Decode the value of record.json; raises UsageError unless checksum, hash and losses are right."""
        if not isinstance(value, dict):
            raise UsageError("the record is not an object with fields.")
        content = {name: item for name, item in cast("dict[str, Any]", value).items() if name != CHECKSUM}
        record = from_builtins(RunRecord, printable_values(content), "record")
        if record.run != record.spec.hash:
            raise UsageError(f"record.run is {record.run!r}, but the spec's hash is {record.spec.hash}.")
        accepted = f"{RECORD_VERSION}: another steepen has written it"
        require(record.version == RECORD_VERSION, "record", "version", record.version, accepted)
        losses = {"validation_loss": record.validation_loss, "train_loss": record.train_loss}
        for name, loss in losses.items():
            require(0 <= loss < math.inf, "record", name, loss, "a finite number of at least 0")
        check_scores(record.evaluation)
        try:
            without_checksum(value, required=True)
        except ValueError as error:
            raise UsageError(f"the record was altered: {error}.") from None
        return record


# What `steepen eval` adds to a record, as far as others read it. A field that ends in "?" may be
# absent or null. "*" stands for any name; a list has one kind of item.
_NUMBER, _TEXT = "a finite number", "text"
_TASK = {
    "nll": _NUMBER,
    "bits_per_byte?": _NUMBER,
    "kind?": _TEXT,
    "accuracy?": _NUMBER,
    "centered?": _NUMBER,
    "baseline?": _NUMBER,
    "examples?": _NUMBER,
    "seeds?": [{"accuracy": _NUMBER}],
}
_SCHEMA: dict[str, Any] = {
    "validation?": {"loss": _NUMBER, "bits_per_byte?": _NUMBER},
    "kl_depth?": {"depth": _NUMBER, "executed?": _NUMBER, "curve?": [_NUMBER]},
    "test_time_passes?": {
        "trained": _NUMBER,
        "passes": [_NUMBER],
        "losses?": [_NUMBER],
        "differences": [_NUMBER],
    },
    "core?": {
        "core22?": _NUMBER,
        "core22_seed_sd?": _NUMBER,
        "core17?": _NUMBER,
        "core17_seed_sd?": _NUMBER,
        "nll22?": _NUMBER,
        "bits_per_byte22?": _NUMBER,
        "bundle?": _TEXT,
        "seeds?": [_NUMBER],
        "examples?": _NUMBER,
        "tasks": {"*": _TASK},
    },
}


def check_scores(scores: Any, where: str = "record.evaluation") -> None:
    """Raise UsageError unless the known fields of these scores have their types and are finite."""
    _check(scores, _SCHEMA, where)
    passes = scores.get("test_time_passes") or {}
    lengths = {len(passes[name]) for name in ("passes", "losses", "differences") if passes.get(name)}
    if len(lengths) > 1:
        raise UsageError(f"{where}.test_time_passes has lists of different lengths.")


def _check(value: Any, expected: Any, where: str) -> None:
    if expected == _NUMBER:
        if not (is_number(value) and math.isfinite(value)):
            raise UsageError(f"{where} = {show(value)} is not valid: it must be {_NUMBER}.")
    elif expected == _TEXT:
        if not isinstance(value, str):
            raise UsageError(f"{where} = {show(value)} is not valid: it must be {_TEXT}.")
    elif isinstance(expected, list):
        if not isinstance(value, list):
            raise UsageError(f"{where} = {show(value)} is not valid: it must be a list.")
        for number, item in enumerate(cast("list[Any]", value)):
            _check(item, expected[0], f"{where}[{number}]")
    else:
        if not isinstance(value, dict):
            raise UsageError(f"{where} = {show(value)} is not valid: it must be an object.")
        _check_fields(cast("dict[str, Any]", value), expected, where)


def _check_fields(value: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    if "*" in expected:
        for name, item in value.items():
            _check(item, expected["*"], f"{where}.{name}")
        return
    for name, kind in expected.items():
        found = value.get(name.removesuffix("?"))
        if found is None and name.endswith("?"):
            continue
        _check(found, kind, f"{where}.{name.removesuffix('?')}")
