"""`ledger`: registered forecasts with their scores, and how well they did over all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from steepen.errors import UsageError
from steepen.requests.request import Argument, Request, function
from steepen.results.result import Result
from steepen.results.table import Column
from steepen.results.text import Block, Paragraph
from steepen.utils.formatting import format_flops

if TYPE_CHECKING:
    from steepen.laws.registered_forecasts import Calibration, ScoredForecast


@dataclass(frozen=True)
class LedgerRow:
    """A registered forecast, and the run that was measured later."""

    registered: str
    arm: str
    flops: Annotated[float, Column("at", format_flops)]
    forecast: Annotated[float, Column(format=".4f")]
    low: Annotated[float, Column(format=".4f")]
    high: Annotated[float, Column(format=".4f")]
    observed: Annotated[float | None, Column(format=".4f", align="right")]
    error_in_standard_errors: Annotated[float | None, Column("error (SE)", "+.1f", align="right")]
    inside: bool | None
    confidence: Annotated[float, Column(shown=False)]


@dataclass(frozen=True, eq=False, repr=False)
class LedgerResult(Result):
    """The forecasts of a ledger; `calibration` says how the scored ones did."""

    schema = "steepen.ledger/1"

    forecasts: tuple[ScoredForecast, ...]

    @property
    def calibration(self) -> Calibration:
        """Over all scored forecasts."""
        from steepen.laws.registered_forecasts import calibration

        return calibration(self.forecasts)

    @property
    def rows(self) -> list[LedgerRow]:
        """One row per forecast, at the compute of its run where there is one."""
        return [
            LedgerRow(
                one.registered.registered[:10], one.registered.arm, one.flops or one.registered.flops,
                one.registered.forecast if one.forecast is None else one.forecast,
                *(one.interval or one.registered.interval), one.observed, one.error_in_standard_errors,
                one.inside, one.registered.confidence,
            )
            for one in self.forecasts
        ]  # fmt: skip

    def headline(self) -> str:
        """How many forecasts, scored and inside."""
        found = self.calibration
        return f"{found.forecasts} registered forecasts, {found.scored} scored, {found.inside} inside"

    def to_dict(self) -> dict[str, Any]:
        """The forecasts and the calibration."""
        forecasts = [one.to_dict() for one in self.forecasts]
        return {"forecasts": forecasts, "calibration": asdict(self.calibration)}

    def blocks(self, width: int) -> Iterable[Block]:
        """The table, then the calibration."""
        yield self.table()
        yield Paragraph(f" {self.calibration.sentence()}", "calibration:", "bold")


@dataclass(frozen=True)
class Ledger(Request[LedgerResult]):
    """Show the forecasts of a ledger, their scores, and the calibration over all.

    `steepen fit --register FILE --budget FLOPS` adds forecasts before the runs exist, of any number of
    projects; `steepen fit --score FILE` adds what was measured later.
    """

    examples = ("steepen ledger forecasts.jsonl",)
    tables = True

    file: Annotated[Path, Argument("File that `steepen fit --register` has written.")]

    def run(self) -> LedgerResult:
        """Read the ledger."""
        from steepen.laws.registered_forecasts import read_ledger

        if not self.file.is_file():
            raise UsageError(f"there are no registered forecasts at {self.file}; fit --register writes them.")
        return LedgerResult(tuple(read_ledger(self.file)))


ledger = function(Ledger)
