"""Scores of a study's runs: what `steepen study --score` and `steepen.study(score=)` share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from steepen.errors import UsageError

if TYPE_CHECKING:
    from steepen.evaluation.evaluate_run import EvaluationRequest
    from steepen.launch.base import Launcher

SCORES = ("core", "nll", "kl-depth")


def score_request(names: Sequence[str], bundle: Path | None) -> EvaluationRequest | None:
    """The request for these scores: core and nll (both of the CORE bundle), kl-depth; None without any."""
    for name in names:
        if name not in SCORES:
            raise UsageError(f"--score {name!r} is not known: use {', '.join(SCORES)}.")
    if not names:
        return None
    wants_core = bool({"core", "nll"} & set(names))
    if wants_core and bundle is None:
        raise UsageError("--score core and nll need the CORE tasks: give their directory with --core.")
    from steepen.evaluation.core.bundle import Bundle
    from steepen.evaluation.core.run_suite import CoreOptions
    from steepen.evaluation.evaluate_run import EvaluationRequest

    opened = Bundle.open(bundle) if wants_core and bundle is not None else None
    return EvaluationRequest(core=opened, core_options=CoreOptions(), kl_depth="kl-depth" in names)


def score_runs(
    runs: Sequence[Path],
    data: Path,
    request: EvaluationRequest,
    *,
    device: str = "auto",
    launcher: str | Callable[..., Launcher] = "local",
    jobs: int | None = None,
    launcher_options: Sequence[str] = (),
) -> None:
    """Evaluate the finished runs of a study where it trains them, with progress on standard error.

    One local run at a time is evaluated in this process.
    """
    from steepen.api.launched_scores import evaluate_on_launcher
    from steepen.evaluation.evaluate_many import evaluate_many

    def print_message(text: str) -> None:
        print(text, file=sys.stderr)

    finished = [run for run in runs if (run / "record.json").is_file()]
    if launcher == "local" and (jobs == 1 or len(finished) < 2):
        found = evaluate_many(finished, data, request, report=print_message, device=device, quiet=True)
    else:
        found = evaluate_on_launcher(
            finished, data, request, report=print_message, launcher=launcher, jobs=jobs,
            launcher_options=launcher_options, device=device,
        )  # fmt: skip
    for run, why in found.failed.items():
        print_message(f"{run.name} was not evaluated: {why}")
