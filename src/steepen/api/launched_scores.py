"""Evaluate many runs on a launcher: local worker processes, Slurm or Ray, one run a job."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.errors import UsageError

if TYPE_CHECKING:
    from steepen.evaluation.evaluate_many import ManyScores, WaitingRun
    from steepen.evaluation.evaluate_run import EvaluationRequest
    from steepen.launch.base import Launcher

PROGRAM = ("-m", "steepen.api.launched_scores")


def evaluate_on_launcher(
    runs: Sequence[Path],
    data: Path,
    request: EvaluationRequest,
    *,
    report: Callable[[str], None],
    launcher: str | Callable[..., Launcher] = "local",
    jobs: int | None = None,
    launcher_options: Sequence[str] = (),
    device: str = "auto",
    precision: str = "auto",
    update_record: bool | None = None,
) -> ManyScores:
    """Evaluate finished runs as jobs of a launcher; as `evaluate_many` in all else."""
    from steepen.data import Dataset
    from steepen.evaluation.evaluate_many import TimeLeft, find_waiting_runs, finish_run
    from steepen.evaluation.evaluate_run import Evaluation
    from steepen.launch.base import LaunchContext, LauncherBase
    from steepen.launch.registry import find_launcher, make_launcher
    from steepen.runs.store import RunStore

    find_launcher(launcher, jobs, launcher_options)  # rejects a wrong one even if no run is waiting
    found, waiting = find_waiting_runs(runs, Dataset.open(data).identity, request, report)
    stores: dict[Path, dict[str, WaitingRun]] = {}
    for one in waiting:
        spec = one.checkpoint.spec
        if one.run.name != spec.hash:
            raise UsageError(
                f"{one.run} cannot go to a launcher: it is not a run directory named by its hash "
                f"({spec.hash}); leave out --launcher and --jobs."
            )
        stores.setdefault(one.run.parent, {})[spec.hash] = one
    words = tuple(request_words(request))
    words += () if device == "auto" else ("--device", device)
    words += () if precision == "auto" else ("--precision", precision)
    if update_record is not None:
        words += ("--update-record",) if update_record else ("--no-update-record",)
    left = TimeLeft([one.cost for one in waiting], time.monotonic())
    for folder, own in stores.items():
        context = LaunchContext(
            data,
            RunStore(folder),
            {"words": words},
            request=lambda _, run: {"run": str(run.path.absolute())},
            program=PROGRAM,
        )
        chosen = make_launcher(launcher, context, jobs, launcher_options)
        try:
            for outcome in chosen.launch([one.checkpoint.spec for one in own.values()]):
                one = own[outcome.spec.hash]
                scores: dict[str, Any] = {} if outcome.record is None else outcome.record.evaluation
                failure = None if outcome.failure is None else outcome.failure.message
                if failure is None:
                    found.evaluated.append(Evaluation(one.checkpoint, scores, in_record=bool(scores)))
                finish_run(found, one, scores, failure, left, report)
        finally:
            if isinstance(chosen, LauncherBase):
                chosen.close()
    return found


def request_words(request: EvaluationRequest) -> list[str]:
    """The options of `steepen eval` that make this request; paths are absolute, for other machines."""
    words: list[str] = []

    def add(option: str, value: object) -> None:
        if value is not None:
            words.extend((f"--{option}", str(value)))

    options = request.core_options
    if request.core is not None:
        add("core", request.core.directory.absolute())
        if options is not None:
            add("seeds", None if options.seeds is None else ",".join(map(str, options.seeds)))
            add("examples", options.examples)
            add("tasks", None if options.tasks is None else ",".join(options.tasks))
            add("token-budget", options.token_budget)
            add("convention", options.convention)
    if request.kl_depth:
        words.append("--kl-depth")
        add("kl-threshold", request.kl_threshold)
        add("kl-direction", request.kl_direction)
        add("kl-depth-tokens", request.kl_depth_tokens)
    if request.passes:
        add("passes", ",".join(map(str, request.passes)))
    add("validation-tokens", request.validation_tokens)
    return words


def run_in_worker(task: dict[str, Any]) -> None:
    """Evaluate one run in a worker, until `eval` is a request."""
    from steepen.errors import Failure, RemoteError
    from steepen.requests.app import main

    code = main(["eval", task["run"], "--data", task["data"], *task["words"]])
    if code:
        raise RemoteError(Failure("Failed", "its evaluation failed; see its log.txt.", code))


if __name__ == "__main__":
    import sys

    from steepen.requests import worker

    sys.exit(worker.main(run_in_worker))
