"""Experiment trackers (W&B, TensorBoard). One that fails is dropped with a message; the run continues."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from steepen.runs.spec import RunSpec


class Tracker(Protocol):
    """Interface of a tracker."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log the metrics of one step."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


class WandbTracker:
    """Weights & Biases; the run id is the spec's hash."""

    def __init__(self, spec: RunSpec, directory: Path) -> None:
        wandb = importlib.import_module("wandb")
        self.run: Any = wandb.init(
            project="steepen",
            id=spec.hash,
            name=f"{spec.arm.name}-d{spec.shape.depth}-{spec.hash}",
            config=spec.to_dict(),
            dir=str(directory),
            resume="allow",
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log the metrics of one step."""
        self.run.log(values, step=step)

    def close(self) -> None:
        """Finish the W&B run."""
        self.run.finish()


class TensorBoardTracker:
    """TensorBoard event files in the run directory."""

    def __init__(self, spec: RunSpec, directory: Path) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self.writer: Any = module.SummaryWriter(str(directory / "tensorboard"))

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log the metrics of one step."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self.writer.close()


_KINDS: dict[str, Callable[[RunSpec, Path], Tracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorBoardTracker,
}


class Trackers:
    """The trackers of a run; one that fails is dropped with a message."""

    def __init__(
        self, names: tuple[str, ...], spec: RunSpec, directory: Path, say: Callable[[str], None]
    ) -> None:
        self.say = say
        self.active: dict[str, Tracker] = {}
        for name in names:
            self._guard(name, lambda name=name: self.active.__setitem__(name, _KINDS[name](spec, directory)))

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log to every tracker that still works."""
        for name, tracker in list(self.active.items()):
            self._guard(name, lambda tracker=tracker: tracker.log(step, values))

    def close(self) -> None:
        """Close them all."""
        for name, tracker in list(self.active.items()):
            self._guard(name, tracker.close)

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.active.pop(name, None)
            self.say(
                f"the tracker {name} failed ({type(error).__name__}: {error}); the run continues without it."
            )
