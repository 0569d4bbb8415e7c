"""Kernels compiled before the clock starts, so that no step pays for them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from steepen.model.mean_loss import mean_loss
from steepen.runs.spec import RunSpec
from steepen.training.device import synchronise
from steepen.training.timer import process_seconds
from steepen.training.train_step import TrainStep


def warm_up(stepper: TrainStep, spec: RunSpec, passes: int, say: Callable[[str], None]) -> None:
    """A micro-batch there and back, a step, and validation, all of which leave the run as it was."""
    started = time.monotonic()
    network, optimizer, accumulator = stepper.network, stepper.optimizer, stepper.accumulator
    device = network.embedding.device
    tokens = torch.zeros(spec.batch_sequences, spec.shape.context, dtype=torch.long, device=device)
    size = accumulator.micro_batch
    devices = [device] if device.type == "cuda" else []
    # At a checkpoint from just before growth the network has yet to grow.
    passes = min(passes, network.passes)
    with torch.random.fork_rng(devices):  # a block that draws numbers must not notice
        accumulator(tokens[:size], tokens[:size], passes)
        optimizer.zero_grad()
        optimizer.warm_up()
        stepper.warmup_and_capture(tokens, tokens, passes)
    size = accumulator.micro_batch
    mean_loss(network, [(tokens[:size], tokens[:size])])
    synchronise(device)
    age = process_seconds()
    since = "" if age is None else f", {age:.1f} s after the start"
    say(f"kernels ready in {time.monotonic() - started:.1f} s{since}.")
