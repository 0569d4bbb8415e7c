"""Passes at test time: the loss with more or fewer core passes than the network was trained at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from steepen.data import ValidationSet
from steepen.errors import UsageError
from steepen.evaluation.validation_loss import validate
from steepen.model.network import Network


@dataclass(frozen=True)
class PassesCurve:
    """Loss at each number of passes, on one validation set."""

    trained: int
    passes: tuple[int, ...]
    losses: tuple[float, ...]
    trained_loss: float
    tokens: int
    identity: str
    left_out: tuple[int, ...] = ()  # asked for, but not there to run

    @property
    def differences(self) -> tuple[float, ...]:
        """L(k) − L(K trained) (Figure "Sensitivity to evaluation recurrence")."""
        return tuple(loss - self.trained_loss for loss in self.losses)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "trained": self.trained,
            "trained_loss": self.trained_loss,
            "passes": list(self.passes),
            "losses": list(self.losses),
            "differences": list(self.differences),
            "tokens": self.tokens,
            "identity": self.identity,
            "left_out": list(self.left_out),
        }


def runnable(network: Network, asked: Sequence[int]) -> tuple[int, ...]:
    """Those of the asked numbers of passes a network can run.

    A tied core runs any number; untied cores only as many as there are; a network without a core has none to
    repeat, and runs as it was trained.
    """
    if any(passes < 1 for passes in asked):
        raise UsageError(f"passes {min(asked)} is not valid: the core is applied at least once.")
    most = max(asked, default=0)
    if network.shape.allocation.core == 0:
        most = 1
    elif not network.arm.tied:
        most = len(network.cores)
    return tuple(sorted({passes for passes in asked if passes <= most}))


def passes_curve(
    network: Network,
    validation: ValidationSet,
    asked: Sequence[int] = tuple(range(1, 9)),
    trained: int | None = None,
    report: Callable[[int, int], None] | None = None,
) -> PassesCurve:
    """The loss at the asked numbers of passes, as far as the network can run them, and at the trained one.

    What it cannot run stands in `left_out`. `report` is told how many of how many sequences are done, over
    all numbers of passes.
    """
    trained = network.passes if trained is None else trained
    chosen = runnable(network, asked)
    losses: dict[int, float] = {}
    wanted = sorted({*chosen, trained})
    for count, passes in enumerate(wanted):

        def progress(done: int, total: int, before: int = count) -> None:
            if report:
                report(before * total + done, len(wanted) * total)

        losses[passes] = validate(network, validation, passes, progress).loss
    return PassesCurve(
        trained,
        chosen,
        tuple(losses[passes] for passes in chosen),
        losses[trained],
        validation.tokens,
        validation.identity,
        tuple(sorted({*asked} - {*chosen})),
    )
