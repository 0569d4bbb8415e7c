"""The record of a run that has come to its end."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch

from steepen.runs.record import RunRecord, ValidationScore
from steepen.runs.spec import RunSpec
from steepen.training import device as machine
from steepen.training.checkpoint import TrainingState
from steepen.training.step_schedule import StepSchedule


def make_record(
    spec: RunSpec,
    schedule: StepSchedule,
    position: TrainingState,
    *,
    scores: Sequence[ValidationScore],
    losses: Sequence[float],
    validation_identity: str,
    device: torch.device,
) -> RunRecord:
    """What came out of a run that stands at its end, validated; `losses` are of its steps."""
    arm, shape = spec.arm, spec.shape
    last = scores[-1]
    flops = schedule.flops(arm, shape, spec.batch_tokens)
    seconds, peak = position.seconds_training, machine.peak_flops(device)
    tail = losses[-max(10, spec.steps // 100) :]
    return RunRecord(
        spec=spec,
        run=spec.hash,
        validation_loss=last.loss,
        validation_bits_per_byte=last.bits_per_byte,
        validation_identity=validation_identity,
        validation_scores=tuple(scores),
        train_loss=sum(tail) / len(tail) if tail else last.loss,  # where someone removed the log
        tokens=spec.tokens,
        flops=flops.total,
        flops_by_term=flops.to_dict(),
        parameters=schedule.parameters(arm, shape),
        seconds_training=seconds,
        seconds_total=position.seconds_total,
        tokens_per_second=spec.tokens / max(seconds, 1e-9),
        mfu=flops.total / seconds / peak if peak and seconds > 0 else None,
        peak_memory_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        hardware=machine.hardware(device),
        versions=machine.versions(),
        git=machine.git_state(),
        finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        resumed=position.resumed,
    )
