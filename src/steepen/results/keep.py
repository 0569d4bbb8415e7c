"""What `keep` returns: yes, no or undecided, with the gain and the noise floor at every scale."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from steepen.results.result import Result
from steepen.results.table import Column
from steepen.results.text import Block, Paragraph
from steepen.utils.formatting import format_flops

if TYPE_CHECKING:
    from steepen.laws.keep import KeepAnswer

EXIT_CODES = {"yes": 0, "undecided": 3, "no": 4}
STYLES = {"yes": "bold green", "undecided": "yellow", "no": "bold red"}


def _floor(value: float) -> str:
    """The noise floor; where no seed was repeated there is none."""
    return "unknown" if math.isinf(value) else f"{value:.4f}"


@dataclass(frozen=True)
class KeepRow:
    """The arm against the reference at one scale."""

    flops: Annotated[float, Column("at", format_flops)]
    gain: Annotated[float, Column("gain in loss", "+.4f")]
    noise_floor: Annotated[float, Column("noise floor", _floor)]
    p_value: Annotated[float, Column("p", ".1g")]
    answer: str
    seeds: int
    reference_seeds: Annotated[int, Column("ref. seeds")]


@dataclass(frozen=True, eq=False, repr=False)
class KeepResult(Result):
    """Whether to keep a change: `found` has the answer, the reason and what to run next."""

    schema = "steepen.keep/1"

    found: KeepAnswer

    @property
    def exit_code(self) -> int:
        """0 for yes, 4 for no, 3 for undecided."""
        return EXIT_CODES[self.found.answer]

    @property
    def rows(self) -> list[KeepRow]:
        """One row per scale that both arms have."""
        return [
            KeepRow(s.flops, s.gain, s.noise_floor, s.p_value, s.answer, s.seeds, s.reference_seeds)
            for s in self.found.scales
        ]

    def headline(self) -> str:
        """The answer in one line."""
        return f"keep {self.found.arm} in place of {self.found.reference}? {self.found.answer}"

    def to_dict(self) -> dict[str, Any]:
        """The answer, the scales, and the verdict of the laws (null without one)."""
        found = self.found
        verdict = None if found.verdict is None else found.verdict.to_dict()
        return {**asdict(found), "scales": self.to_rows(), "verdict": verdict}

    def blocks(self, width: int) -> Iterable[Block]:
        """The answer and its reason, the scales, and what to run next."""
        found = self.found
        shared = f"level {found.level:.2g}" + f" (shared among {found.tried} changes)" * (found.tried > 1)
        if self.rows:
            yield self.table(f"gains below the noise floor are not told from the noise of seeds; {shared}")
        yield Paragraph(f" {found.reason}", f"{found.answer}:", STYLES[found.answer])
        if found.next_step:
            yield Paragraph(f" {found.next_step}", "next:", "bold")
