"""Metrics of a run: metrics.jsonl, the log that defers reading losses from the device, training time, the
size of the residual stream.

metrics.jsonl holds one line per step and one per validation. It is for inspection, status and ETA; analysis
reads records.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor

from steepen.model.network import Network
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunLost, read_lines
from steepen.training.checkpoint import CheckpointWriter
from steepen.training.device import synchronize
from steepen.training.step_schedule import StepSchedule
from steepen.training.stopping import diverged
from steepen.utils.files import open_without_links, write_atomically
from steepen.utils.formatting import format_clock, format_count
from steepen.utils.progress import Progress, ProgressDisplay, ProgressRow

if TYPE_CHECKING:
    from steepen.training.trackers import Trackers


class MetricsFile:
    """Appends lines to metrics.jsonl; opened at step n, it first drops what was logged after n.

    `scored` are the steps whose validation the checkpoint has: another validation is repeated, so its line
    is dropped too.
    """

    def __init__(
        self,
        path: Path | None,
        step: int,
        scored: Collection[int] = (),
        print_message: Callable[[str], None] | None = None,
    ) -> None:
        self.losses: list[float] = []
        self.path = path
        self.file: TextIO | None = None
        if path is None:  # a rank that does not log
            return
        lines, damaged = read_lines(path)
        if damaged and print_message is not None:
            print_message(
                f"{path} has {damaged:,} damaged {'line' if damaged == 1 else 'lines'}, now dropped."
            )
        kept = _lines_before(lines, step, scored)
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
        self.losses = [line["loss"] for line in kept if "loss" in line]
        self.file = open(path, "a", encoding="utf-8", opener=open_without_links)  # noqa: SIM115

    def write(self, **values: Any) -> None:
        """Append a line."""
        if "loss" in values:
            self.losses.append(values["loss"])
        if self.file is not None:
            self.file.write(json.dumps(values) + "\n")

    def require_directory(self) -> None:
        """Raise RunLost if the run's directory was deleted, moved or replaced since the file was opened."""
        if self.file is None or self.path is None:
            return
        try:
            here = os.path.samestat(os.fstat(self.file.fileno()), self.path.stat())
        except OSError:
            here = False
        if not here:
            raise RunLost(
                f"the run's directory {self.path.parent} was deleted or moved while it was trained; put it "
                "back and run the same command to resume, or start over."
            )

    def sync(self) -> None:
        """Flush and fsync."""
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self) -> None:
        """Flush, fsync and close."""
        self.sync()
        if self.file is not None:
            self.file.close()


def _lines_before(
    lines: Iterable[dict[str, Any]], step: int, scored: Collection[int]
) -> list[dict[str, Any]]:
    """The lines of what is not repeated by a run that resumes at a step: one of each step and kind."""
    kept: dict[tuple[int, str], dict[str, Any]] = {}
    for line in lines:
        kind = next((kind for kind in ("loss", "growth_loss_after") if kind in line), "validation")
        # Growth comes after the checkpoint of its step, and is repeated from there.
        last = step - 1 if kind == "growth_loss_after" else step
        if line["step"] <= last and (kind != "validation" or line["step"] in scored):
            kept[line["step"], kind] = line
    return list(kept.values())


class RunLog:
    """The numbers of a run, in metrics.jsonl, the trackers and the display; and the time that steps take.

    Losses and gradient norms stay on the device until `drain`, which synchronizes and logs them.
    """

    def __init__(
        self,
        spec: RunSpec,
        schedule: StepSchedule,
        timer: TrainingTimer,
        metrics: MetricsFile,
        trackers: Trackers | None,
        display: ProgressDisplay,
        writer: CheckpointWriter,
        peak: float | None,  # FLOP/s of the device, for the MFU
    ) -> None:
        self.spec, self.schedule, self.timer, self.peak = spec, schedule, timer, peak
        self.metrics, self.trackers, self.display = metrics, trackers, display
        self.writer, self.world = writer, writer.world
        self.cumulative_flops = schedule.cumulative_flops(spec.batch_tokens)
        self.pending: list[tuple[int, Tensor, Tensor]] = []
        self.data_seconds = 0.0  # spent waiting for batches since the last drain
        self.checkpoint_seconds = 0.0  # for which training has stood still to save, since the last drain

    def add(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Queue a step's loss and gradient norm (scalars on the device) without synchronizing."""
        self.pending.append((step, loss, norm))

    def write(self, step: int, values: dict[str, float], **of_file: int) -> None:
        """Log values after a step; `of_file` go to metrics.jsonl only."""
        self.metrics.write(step=step, **of_file, **values)
        if self.trackers is not None:
            self.trackers.log(step, values)

    def pause(self) -> None:
        """Log the queued steps and stop the clock: what follows is no training."""
        self.drain()
        self.timer.pause()

    def drain(self) -> None:
        """Log the queued steps; raises Diverged where a loss or norm is not finite."""
        if not self.pending:
            return
        self.metrics.require_directory()
        steps = [step for step, _, _ in self.pending]
        self.world.progress(steps[-1] + 1, "reading the losses")
        own_losses = torch.stack([loss.double() for _, loss, _ in self.pending])
        losses = self.world.all_reduce_(own_losses.clone()).tolist()  # each rank has its part of the mean
        norms = torch.stack([norm.double() for _, _, norm in self.pending]).tolist()
        self.pending.clear()
        seconds = max(self.timer.lap(), 1e-9)
        rate = len(steps) * self.spec.batch_tokens / seconds
        data_wait, self.data_seconds = self.data_seconds / seconds, 0.0
        for step, loss, norm in zip(steps, losses, norms, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                where = self._nonfinite_rank(own_losses, steps.index(step))
                what = f"the loss is {loss}, the gradient norm {norm}{where}"
                raise diverged(self.spec, self.writer, step, what)
            values = {
                "loss": loss,
                "lr": self._lr(step),
                "passes": int(self.schedule.passes[step]),
                "gradient_norm": norm,
                "tokens_per_second": rate,
                "data_wait": data_wait,  # fraction of the time
            }
            if self.checkpoint_seconds:
                values["checkpoint_wait"] = self.checkpoint_seconds
                self.checkpoint_seconds = 0.0
            self.write(step + 1, values, tokens=(step + 1) * self.spec.batch_tokens)
        self._show(steps, losses[-1], rate, seconds)

    def _nonfinite_rank(self, own_losses: Tensor, index: int) -> str:
        """Which rank's part of a step's loss is not finite first, for the error."""
        if self.world.size == 1:
            return ""
        finite = self.world.all_gather_objects(math.isfinite(own_losses[index].item()))
        return f" (on rank {finite.index(False)})" if False in finite else ""

    def _show(self, steps: list[int], loss: float, rate: float, seconds: float) -> None:
        last = steps[-1]
        done = self.cumulative_flops[last + 1]
        # The ETA counts FLOPs, not steps: steps cost more after growth.
        speed = float(done - self.cumulative_flops[steps[0]]) / seconds
        left = float(self.cumulative_flops[-1] - done) / max(speed, 1e-9)
        mfu = f"  MFU {speed / self.peak:.1%}" if self.peak else ""
        spec, step = self.spec, last + 1
        line = (
            f"step {step:,}/{spec.steps:,}  loss {loss:.4f}  lr {self._lr(last):.2e}  "
            f"K {int(self.schedule.passes[last])}  {format_count(rate)} tok/s{mfu}  ETA {format_clock(left)}"
        )
        row = ProgressRow(f"{spec.arm.title} d{spec.shape.depth}", step, spec.steps, line)
        self.display.update(Progress((row,), line), final=step == spec.steps)

    def _lr(self, step: int) -> float:
        return self.spec.hyperparameters.learning_rate * float(self.schedule.lr_factor[step])


class TrainingTimer:
    """Accumulates training time. `lap` synchronizes the device, so queued work is included."""

    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self.device = device
        self.seconds = seconds  # total up to the last lap
        self._since: float | None = None

    def start(self) -> None:
        """Start the timer if it is paused."""
        if self._since is None:
            synchronize(self.device)
            self._since = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap or start; added to the total."""
        if self._since is None:
            return 0.0
        synchronize(self.device)
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self.seconds += seconds
        return seconds

    def pause(self) -> None:
        """Pause the timer until the next start."""
        self.lap()
        self._since = None


@contextmanager
def watch_stream(network: Network, passes: int) -> Generator[dict[str, float]]:
    """Measure the root mean square of the residual stream in the first forward pass inside the block.

    The dictionary is filled on leaving, by section: prelude, core 1 … core K, coda. Nothing is computed
    twice, and the number of a block is known outside of compiled code.
    """
    sections = network.shape.allocation.sections(passes)
    ends = {index for index, name in enumerate(sections) if sections[index + 1 : index + 2] != (name,)}
    seen: list[Tensor | None] = []

    def visit(x: Tensor) -> None:
        last = len(seen) in ends
        seen.append(x.detach().to(torch.float32).square().mean().sqrt() if last else None)
        if len(seen) == len(sections):
            network.visit = None

    found: dict[str, float] = {}
    network.visit = visit
    try:
        yield found
    finally:
        network.visit = None
    found |= {name: float(x) for name, x in zip(sections, seen, strict=False) if x is not None}
