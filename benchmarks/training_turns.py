"""Train a few steps at a time, in turns with another process, and time each turn (for `distributed.py`).

Two processes that alternate every few seconds meet the same clocks and temperature of the GPU, so that a
difference of a few tenths of a percent shows. The first turn is not counted. A run ends after its last
turn, without a checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import steepen
from steepen.data import Dataset
from steepen.runs.store import RunStore
from steepen.training.run import train
from steepen.training.train_options import TrainOptions
from steepen.training.trainer import Trainer

WAIT_SECONDS = 300.0  # for the other process


class Measured(Exception):
    """The last turn has been timed."""


class Turns:
    """The turns of one process: numbers 2k, or 2k + 1 for the second; a file says that a turn has ended."""

    def __init__(self, folder: Path, second: bool, count: int, steps: int) -> None:
        self.folder, self.second, self.count, self.steps = folder, second, count, steps
        self.number = int(second)
        self.seconds: list[float] = []  # of each turn

    def wait(self) -> None:
        """Wait until the turn before has ended."""
        before, deadline = self.folder / f"{self.number - 1}.ended", time.monotonic() + WAIT_SECONDS
        while self.number and not before.exists():
            if time.monotonic() > deadline:
                raise SystemExit("the other process has not ended its turn")
            time.sleep(0.002)

    def end(self, trainer: Trainer) -> None:
        """Note the time of this turn and wait for the next."""
        trainer.timer.pause()  # waits for the GPU
        self.seconds.append(trainer.timer.seconds - sum(self.seconds))
        (self.folder / f"{self.number}.ended").touch()
        if len(self.seconds) > self.count:
            raise Measured
        self.number += 2
        self.wait()


def time_turns(spec: Any, data: Path, turns: Turns, options: TrainOptions) -> list[float]:
    """Train in turns; returns the tokens/s of all but the first."""
    loop, between_steps = Trainer._loop, Trainer._between_steps  # pyright: ignore[reportPrivateUsage]

    def waiting_loop(trainer: Trainer) -> None:
        turns.wait()
        loop(trainer)

    def between_turns(trainer: Trainer) -> None:
        between_steps(trainer)
        if trainer.step % turns.steps == 0:
            turns.end(trainer)

    store = RunStore(turns.folder / f"runs-{turns.second}")
    with (
        patch.object(Trainer, "_loop", waiting_loop),
        patch.object(Trainer, "_between_steps", between_turns),
        contextlib.suppress(Measured),
    ):
        train(spec, Dataset.open(data), store, options)
    gc.collect()
    return [turns.steps * spec.batch_tokens / seconds for seconds in turns.seconds[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path, help="JSON: runs, data, turns, steps, device, micro_batch")
    parser.add_argument("--second", action="store_true")
    arguments = parser.parse_args()
    plan = json.loads(arguments.plan.read_text())
    rates: list[list[float]] = []
    for number, run in enumerate(plan["runs"]):
        folder = arguments.plan.parent / f"{number}"
        folder.mkdir(exist_ok=True)
        spec = steepen.spec(data=plan["data"], **run)
        options = TrainOptions(
            device=plan["device"], micro_batch=plan["micro_batch"], checkpoint_every=spec.steps, quiet=True
        )
        turns = Turns(folder, arguments.second, plan["turns"], plan["steps"])
        rates.append(time_turns(spec, Path(plan["data"]), turns, options))
    name = "second" if arguments.second else "first"
    (arguments.plan.parent / f"{name}.json").write_text(json.dumps(rates))


if __name__ == "__main__":
    main()
