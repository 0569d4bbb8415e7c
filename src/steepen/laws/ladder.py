"""A ladder: the losses of one arm at its rungs of compute, with the seeds of each rung."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steepen.errors import UsageError, nearest
from steepen.laws.fits.solver import Array, Mask
from steepen.laws.table import MIN_ARM_RUNGS, MIN_REFERENCE_RUNGS, Table


@dataclass(frozen=True, eq=False)
class Ladder:
    """An arm's rungs in order of compute. `loss` is the mean over seeds, `runs` the loss of each.

    Fits use rung means, weighted by the number of seeds: the residual variance is then estimated from
    rung means, so an error that all seeds of a rung share (a badly scaled learning rate) counts as noise.
    """

    arm: str
    flops: Array
    loss: Array
    runs: tuple[Array, ...]
    row_labels: tuple[str, ...]  # file and line of each rung, for messages

    @property
    def seeds(self) -> Array:
        """Number of runs at each rung."""
        return np.array([len(runs) for runs in self.runs], dtype=float)

    def keep(self, mask: Mask) -> Ladder:
        """The rungs where the mask is true."""
        index = np.flatnonzero(mask)
        return Ladder(
            self.arm, self.flops[index], self.loss[index],
            tuple(self.runs[i] for i in index), tuple(self.row_labels[i] for i in index),
        )  # fmt: skip


def make_ladder(arm: str, flops: Array, loss: Array) -> Ladder:
    """A ladder from two arrays; runs of the same compute are seeds of one rung."""
    loss = np.asarray(loss, float)
    rungs, where = np.unique(np.asarray(flops, float), return_inverse=True)
    runs = tuple(loss[where == i] for i in range(len(rungs)))
    row_labels = tuple(f"{arm} at {value:.3g} FLOPs" for value in rungs)
    return Ladder(arm, rungs, np.array([values.mean() for values in runs]), runs, row_labels)


def read_ladders(table: Table) -> dict[str, Ladder]:
    """The ladders of a table with columns arm, flops, loss and perhaps seed, in the order arms appear."""
    table.require(["arm", "flops", "loss"])
    arms, flops, loss = table.names("arm"), table.numbers("flops"), table.numbers("loss")
    seeds = table.seeds()
    seen: dict[tuple[str, float, str], int] = {}
    rungs: dict[str, dict[float, list[int]]] = {}
    for row, key in enumerate(zip(arms, flops.tolist(), seeds, strict=True)):
        if key in seen:
            what = f"seed {key[2]} of " if key[2] else ""
            raise UsageError(
                f"{table.place(row)}: {what}arm '{key[0]}' at {key[1]:g} FLOPs is already at {table.row_word}"
                f" {table.lines[seen[key]]}; keep one, or tell repeats apart in a seed column."
            )
        seen[key] = row
        rungs.setdefault(key[0], {}).setdefault(key[1], []).append(row)
    ladders: dict[str, Ladder] = {}
    for arm, by_flops in rungs.items():
        ordered = sorted(by_flops.items())
        runs = tuple(loss[rows] for _, rows in ordered)
        ladders[arm] = Ladder(
            arm,
            np.array([value for value, _ in ordered]),
            np.array([values.mean() for values in runs]),
            runs,
            tuple(table.place(rows[0]) for _, rows in ordered),
        )
    return ladders


def check_ladders(ladders: dict[str, Ladder], reference: str) -> None:
    """Raise UsageError for a ladder too short for a law, or a reference that is not among the arms."""
    if reference not in ladders:
        raise UsageError(
            f"the reference '{reference}' is not among the arms; did you mean {nearest(reference, ladders)}?"
        )
    for arm, ladder in ladders.items():
        minimum = MIN_REFERENCE_RUNGS if arm == reference else MIN_ARM_RUNGS
        count = len(np.unique(ladder.flops))
        if count < minimum:
            what = "rung" if count == 1 else "rungs"
            role = "the reference" if arm == reference else "an arm"
            raise UsageError(
                f"{ladder.row_labels[-1]}: arm '{arm}' has only {count} {what}; {role} needs at"
                f" least {minimum}"
                " rungs of different compute."
            )
