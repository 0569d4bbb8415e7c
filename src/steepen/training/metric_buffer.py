"""Losses of the last steps: left on the device until they are looked at, then told to all who listen."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from steepen.runs.spec import RunSpec
from steepen.training.divergence import diverged
from steepen.training.metrics import Metrics
from steepen.training.step_schedule import StepSchedule
from steepen.training.timer import TrainingTimer
from steepen.training.trackers import Trackers
from steepen.utils.formatting import format_clock, format_count
from steepen.utils.progress import Progress, ProgressDisplay, ProgressRow


class MetricBuffer:
    """Collects each step's loss and gradient norm; a look at them makes the device catch up."""

    def __init__(
        self,
        spec: RunSpec,
        schedule: StepSchedule,
        peak: float | None,
        clock: TrainingTimer,
        listeners: tuple[Metrics, Trackers, ProgressDisplay],
        checkpoints: Path,
    ) -> None:
        self.spec, self.schedule, self.peak, self.clock = spec, schedule, peak, clock
        self.metrics, self.trackers, self.display = listeners
        self.checkpoints = checkpoints
        self.spent = schedule.cumulative_flops(spec.arm, spec.shape, spec.batch_tokens)
        self.pending: list[tuple[int, Tensor, Tensor]] = []
        self.waited = 0.0  # seconds for batches since the last look

    def add(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Take a step's results without waiting for them."""
        self.pending.append((step, loss, norm))

    def drain(self) -> None:
        """Look at all there are; raises where one is not a number."""
        if not self.pending:
            return
        steps = [step for step, _, _ in self.pending]
        losses = torch.stack([loss.double() for _, loss, _ in self.pending]).tolist()
        norms = torch.stack([norm.double() for _, _, norm in self.pending]).tolist()
        self.pending.clear()
        seconds = max(self.clock.lap(), 1e-9)
        rate = len(steps) * self.spec.batch_tokens / seconds
        waiting, self.waited = self.waited / seconds, 0.0
        for step, loss, norm in zip(steps, losses, norms, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                what = f"the loss is {loss}, the gradient's norm {norm}"
                raise diverged(self.spec, self.checkpoints, step, what)
            values = {
                "loss": loss,
                "lr": self._rate(step),
                "passes": int(self.schedule.passes[step]),
                "gradient_norm": norm,
                "tokens_per_second": rate,
                "data_wait": waiting,  # share of the time spent waiting for batches
            }
            self.metrics.write(step=step + 1, tokens=(step + 1) * self.spec.batch_tokens, **values)
            self.trackers.log(step + 1, values)
        self._show(steps, losses[-1], rate, seconds)

    def _show(self, steps: list[int], loss: float, rate: float, seconds: float) -> None:
        last = steps[-1]
        done = self.spent[last + 1]
        # FLOPs per second, so that growth is in the time that is left.
        speed = float(done - self.spent[steps[0]]) / seconds
        left = float(self.spent[-1] - done) / max(speed, 1e-9)
        mfu = f"  MFU {speed / self.peak:.1%}" if self.peak else ""
        spec, step = self.spec, last + 1
        line = (
            f"step {step:,}/{spec.steps:,}  loss {loss:.4f}  lr {self._rate(last):.2e}  "
            f"K {int(self.schedule.passes[last])}  {format_count(rate)} tok/s{mfu}  ETA {format_clock(left)}"
        )
        row = ProgressRow(f"{spec.arm.title} d{spec.shape.depth}", step, spec.steps, line)
        self.display.update(Progress((row,), line), final=step == spec.steps)

    def _rate(self, step: int) -> float:
        return self.spec.hyperparameters.learning_rate * float(self.schedule.lr_factor[step])
