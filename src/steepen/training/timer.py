"""Training time, without evaluation, compilation and checkpoints."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from steepen.training.device import synchronise


def process_seconds() -> float | None:
    """Since when this process has been running, where the system tells (Linux)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


class TrainingTimer:
    """Runs while steps are made. `lap` waits for the device, so the time includes what was asked of it."""

    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self.device = device
        self.seconds = seconds  # up to the last lap
        self._since: float | None = None

    def start(self) -> None:
        """Let the clock run, if it stands."""
        if self._since is None:
            synchronise(self.device)
            self._since = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap or start; added to the total."""
        if self._since is None:
            return 0.0
        synchronise(self.device)
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self.seconds += seconds
        return seconds

    def pause(self) -> None:
        """Stop the clock until the next start."""
        self.lap()
        self._since = None
