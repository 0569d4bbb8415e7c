"""A fake of the request `train` for tests of launching: the program of a worker, which needs no torch.

It behaves as training does: holds the lock, saves after every step, resumes from its checkpoint, stops on
SIGTERM after saving, and writes record.json at the end. Its loss depends on every step, so a run resumed
wrongly has another loss. The seed selects a failure: 13 diverges, 99 is killed at every start, 50 is killed
once, half-way.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from steepen.errors import SteepenError, UsageError
from steepen.recipe.flops import compute_active_parameters, stored_parameters
from steepen.requests import worker
from steepen.runs.record import Parameters, RunRecord, ValidationScore
from steepen.runs.spec import RunSpec, expected_flops
from steepen.runs.store import RunDirectory, RunStore
from steepen.utils.json_io import write_json

DIVERGED = "the loss is nan at step 2; lower the learning rate."


class Diverged(SteepenError):
    pass


class Stopped(SteepenError):
    transient = True


def contribution(spec: RunSpec, step: int) -> float:
    """The part of the loss that a step contributes."""
    digest = hashlib.sha256(f"{spec.hash} {step}".encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


def record_of(spec: RunSpec, loss: float | None = None, **changes: object) -> RunRecord:
    """A complete record with synthetic numbers."""
    if loss is None:
        loss = sum(contribution(spec, step) for step in range(spec.steps))
    flops = expected_flops(spec)
    stored = stored_parameters(spec.arm, spec.shape, spec.schedule.final)
    active = compute_active_parameters(spec.arm, spec.shape, spec.schedule.final)
    facts: dict[str, object] = {
        "spec": spec,
        "run": spec.hash,
        "validation_loss": loss,
        "validation_bits_per_byte": loss / 3,
        "validation_identity": "f" * 64,
        "validation_scores": (ValidationScore(spec.steps, loss, loss / 3, spec.schedule.final),),
        "train_loss": loss,
        "tokens": spec.tokens,
        "flops": flops,
        "flops_by_term": {"total": flops},
        "parameters": Parameters(stored, stored, active, active, float(active), 100, stored - 200),
        "seconds_training": 2.0,
        "seconds_total": 3.0,
        "tokens_per_second": spec.tokens / 2,
        "mfu": None,
        "peak_memory_bytes": None,
        "hardware": {"device": "cpu", "name": "x86", "host": "testbed"},
        "versions": {"steepen": "0.1.0"},
        "git": None,
        "finished": "2026-01-01T00:00:00+00:00",
    }
    return RunRecord(**{**facts, **changes})  # type: ignore[arg-type]


def train(spec: RunSpec, run: RunDirectory) -> None:
    stopped: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        stopped.append(number)

    signal.signal(signal.SIGTERM, remember)
    run.failure_file.unlink(missing_ok=True)
    saved = sorted(run.checkpoints.glob("[0-9]*")) if run.checkpoints.exists() else []
    step, loss = 0, 0.0
    if saved:
        step, loss = int(saved[-1].name), json.loads((saved[-1] / "state.json").read_text())
    resumed = step > 0
    while step < spec.steps:
        if spec.seed == 13 and step == 1:
            write_json(run.failure_file, {"kind": "Diverged", "message": DIVERGED})
            raise Diverged(DIVERGED)
        if spec.seed == 99 or (spec.seed == 50 and step == 3 and not resumed):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        loss += contribution(spec, step)
        step += 1
        partial = run.checkpoints / ".writing"
        write_json(partial / "state.json", loss)
        partial.rename(run.checkpoints / f"{step:08d}")
        with run.metrics_file.open("a") as file:
            file.write(json.dumps({"step": step, "loss": loss, "tokens_per_second": 1000.0}) + "\n")
        if stopped and step < spec.steps:
            raise Stopped(f"stopped by signal {stopped[0]}.")
    with (run.path / "trained.txt").open("a") as file:
        file.write("once\n")
    write_json(run.record_file, record_of(spec, loss, resumed=int(resumed)).to_dict())


def run(request: dict[str, Any]) -> None:
    spec = RunSpec.from_dict(request["spec"])
    if "no_such_field" in request:
        raise UsageError("a request to train has no field 'no_such_field'.")
    directory = RunStore(Path(request["runs"])).run(spec)
    with directory.lock(request["wait"], poll_seconds=0.05):
        if directory.record() is None:
            train(spec, directory)


if __name__ == "__main__":
    sys.exit(worker.main(run))
