"""The ladders that the paper's authors publish, shipped with the package (MIT; see assets/*.LICENSE)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from steepen.errors import UsageError

PREFIX = "paper:"
ASSETS = Path(__file__).parent / "assets"
KNOWN_ANSWERS = ASSETS / "known_answers.csv"  # the numbers the paper prints, with what they are computed from


@dataclass(frozen=True)
class PaperLadders:
    """A published table of ladders, with the comparison that the paper makes on it.

    `hold_out` names the runs that the paper forecasts from the others, `c0` is the compute in FLOPs of the
    reference's d8 rung, the size at which its recipe was tuned.
    """

    name: str
    path: Path
    title: str
    reference: str = "vanilla"
    hold_out: tuple[str, ...] = ()
    c0: float = 1.0557507729327391e18


PAPER_LADDERS = {
    "fineweb": PaperLadders("fineweb", ASSETS / "fineweb_ladders.csv", "eight arms on FineWeb, 58 runs"),
    "fineweb-edu": PaperLadders(
        "fineweb-edu",
        ASSETS / "fineweb_edu_ladders.csv",
        "Vanilla and Untied Grow on FineWeb-Edu, 16 runs; the largest, d26, is held out",
        hold_out=("untied-grow:1e21",),
    ),
}


def paper_ladders(name: str) -> PaperLadders:
    """The table named `fineweb` or `fineweb-edu`, with or without `paper:` in front."""
    found = PAPER_LADDERS.get(name.removeprefix(PREFIX))
    if found is None:
        known = " and ".join(PREFIX + each for each in PAPER_LADDERS)
        raise UsageError(f"there is no data set {name!r}; the paper's ladders are {known}.")
    return found
