"""The laws of the best number of passes that a finished `passes` study has fitted."""

from __future__ import annotations

from pathlib import Path

from steepen.errors import UsageError
from steepen.laws.fits.isoflop import PowerLawFit
from steepen.recipe.passes_law import PassesLaw
from steepen.studies.answer import Answer
from steepen.studies.driver.journal import Journal, find_study_folder


def laws_of_study(study: str, studies: Path) -> tuple[PassesLaw, ...]:
    """The expansion laws of a study, tied and untied; raises UsageError if it has none."""
    entry = Journal.read(find_study_folder(study, studies)).entry
    answer = None if entry.answer is None else Answer.from_dict(entry.answer)
    found = [
        PassesLaw(one.arm == "tied", one.fit.coefficient, one.fit.exponent)
        for one in (answer.fits if answer is not None else ())
        if one.quantity == "expansion" and isinstance(one.fit, PowerLawFit)
    ]
    if not found:
        raise UsageError(
            f"the study {study} has no law of the best number of passes: it needs a finished "
            "`steepen study passes --part anchor` with optima inside its sweeps."
        )
    return tuple(found)
