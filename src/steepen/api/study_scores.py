"""Scores of a study's runs: what `steepen study --score` and `steepen.study(score=)` share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.errors import UsageError

if TYPE_CHECKING:
    from steepen.evaluation.score_options import ScoreOptions

SCORES = ("core", "nll", "kl-depth")


def score_request(names: Sequence[str], bundle: Path | None) -> ScoreOptions | None:
    """What is measured for core and nll (both of the CORE bundle) and kl-depth; None without any."""
    from steepen.evaluation.score_options import ScoreOptions

    for name in names:
        if name not in SCORES:
            raise UsageError(f"`score` {name!r} is not known: use {', '.join(SCORES)}.")
    if not names:
        return None
    wants_core = bool({"core", "nll"} & set(names))
    if wants_core and bundle is None:
        raise UsageError("`score` core and nll need the CORE tasks: give their directory with `core`.")
    found = ScoreOptions(core=bundle if wants_core else None, kl_depth="kl-depth" in names)
    found.check_scores()
    return found


def score_runs(runs: Sequence[Path], data: Path, scores: ScoreOptions, **where: Any) -> None:
    """Evaluate the finished runs of a study where it trains them; a single local one in this process.

    `where` are launcher, jobs, launcher_options and device.
    """
    from steepen.requests.evaluate import evaluate_runs

    finished = [run for run in runs if (run / "record.json").is_file()]
    if where.get("launcher", "local") == "local" and (where.get("jobs") == 1 or len(finished) < 2):
        where = {"device": where.get("device", "auto")}
    for run, why in evaluate_runs(finished, data, scores, **where).failed.items():
        print(f"{run.name} was not evaluated: {why}", file=sys.stderr)
