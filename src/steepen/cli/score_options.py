"""What to score: options of `steepen eval` and `train` as an evaluation request."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.cli.parse_lists import parse_integers, parse_words

if TYPE_CHECKING:
    from steepen.evaluation.evaluate_run import EvaluationRequest


def make_request(
    core: Path | None,
    *,
    passes: str | None = None,
    examples: int | None = None,
    convention: str = "authors",
    seeds: str | None = None,
    tasks: str | None = None,
    token_budget: int | None = None,
    **rest: Any,
) -> EvaluationRequest:
    """Parse the options into a request; raises for a wrong one before anything is loaded."""
    from steepen.evaluation.core.bundle import Bundle
    from steepen.evaluation.core.run_suite import CoreOptions
    from steepen.evaluation.evaluate_run import EvaluationRequest

    options = CoreOptions(
        None if seeds is None else tuple(parse_integers("--seeds", seeds)),
        examples,
        _labels(tasks),
        token_budget,
        convention=convention,
    )
    return EvaluationRequest(
        core=None if core is None else Bundle.open(core),
        core_options=options,
        passes=() if passes is None else tuple(parse_integers("--passes", passes, minimum=1)),
        **rest,
    )


def _labels(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    if text in ("core17", "core22"):
        from steepen.evaluation.core import suite

        return suite.CORE17 if text == "core17" else suite.CORE22
    return tuple(dict.fromkeys(parse_words(text)))
