"""`ledger`: registered forecasts with their scores, and how well they did over all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from steepen.errors import UsageError
from steepen.requests.request import Argument, Request, function
from steepen.results.ledger import LedgerResult


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
