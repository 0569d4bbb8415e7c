"""`eval`, `eval filter` and `eval fetch-core`: scores of checkpoints, selected tasks, the CORE bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from steepen.errors import SteepenError, UsageError
from steepen.evaluation.score_options import ScoreOptions
from steepen.requests.request import OUTPUT, Argument, Option, Request, function
from steepen.results.evaluate import EvaluatedRuns, EvaluationResult, FilteredTasks
from steepen.results.files import Written
from steepen.results.runs import Run, Runs
from steepen.utils.codec import HelpPanel, Range, option
from steepen.utils.values import Device, Several

if TYPE_CHECKING:
    from steepen.data import Dataset
    from steepen.evaluation.evaluate_many import ManyScores, Measured, WaitingRun
    from steepen.launch.base import LaunchContext
    from steepen.runs.spec import RunSpec
    from steepen.runs.store import RunDirectory, RunStore

MANY = HelpPanel("Many runs")  # panel of --help
DeviceField: TypeAlias = Annotated[Device, Option("auto, cpu, cuda, cuda:N.")]
PrecisionField: TypeAlias = Annotated[
    Literal["auto", "fp32", "bf16"], Option("auto (the run's own; bf16 for fp8 runs), fp32 or bf16.")
]


@dataclass(frozen=True, kw_only=True)
class AsJobs:
    """Whether runs are evaluated as jobs of a launcher, and of which."""

    launcher: Any = MANY(
        "Evaluate each run as a job: local, slurm, ray or module:attribute. Default: one after another in "
        "this process, or local with `jobs`.",
        python="Also the launcher's class.",
    )
    jobs: int | None = MANY("Max runs at a time.", limits=Range(1, 10_000), flag="-j")
    launcher_options: tuple[str, ...] = MANY(
        "Option of the launcher, as in `steepen study`. Repeatable.",
        (),
        flag="--launcher-option",
        metavar="KEY=VALUE",
    )


@dataclass(frozen=True)
class Evaluate(ScoreOptions, AsJobs, Request["EvaluationResult | EvaluatedRuns"]):
    """Evaluate a checkpoint: validation loss and, on request, other scores.

    The others are CORE, KL effective depth and the loss at other numbers of passes. CORE outcomes are saved
    task by task, so an interrupted evaluation resumes. Of many runs, those that have the scores already are
    skipped.
    """

    examples = (
        "steepen eval runs/HASH --data data/edu --kl-depth --passes 1-8",
        "steepen eval --hf gpt2 --data data/edu --core eval_bundle",
    )
    figure = tables = True

    runs: Annotated[
        Several,
        Argument(
            "Runs (their newest checkpoints), checkpoint directories, or a directory of runs.",
            metavar="RUNS",
            python="Also a Run, or what open_runs returns.",
        ),
    ] = ()
    data: Any = option(
        "Prepared data with the run's tokenizer; its validation tokens are used. With `hf`, any prepared "
        "data: its validation text is encoded with the model's tokenizer.",
        metavar="<path>",
        python="Also a Dataset.",
    )
    _: KW_ONLY
    hf: str | None = option(
        "Score a causal language model of transformers instead of a run: a folder, or a name on the Hugging "
        "Face Hub.",
        metavar="DIR_OR_NAME",
    )
    trust_remote_code: bool = option("With `hf`: run modeling code that comes with it.", False)
    update_record: bool | None = OUTPUT("Add the scores to the run's record. Default: for a finished run.")
    device: DeviceField = "auto"
    precision: PrecisionField = "auto"
    study: str | None = MANY("Evaluate the runs of this study.")
    studies: Path = MANY("Directory of the studies.", Path("studies"))
    split_runs: str | None = MANY(
        "Evaluate part I of N of the runs, with I from 0 to N − 1: one job each.", metavar="I/N"
    )

    def check(self) -> None:
        """Reject a request without something to score, and scores that cannot be measured."""
        paths: list[Any] = []
        for one in self.runs:
            paths += [run.path for run in one] if isinstance(one, Runs) else [one]
        named = tuple(Path(one.path if isinstance(one, Run) else one) for one in paths)
        object.__setattr__(self, "runs", named)
        if self.hf is not None and (self.runs or self.study is not None):
            raise UsageError("give a run or `hf`, not both.")
        if self.hf is None and (not (self.runs or self.study) or self.data is None):
            raise UsageError(
                "give a run directory and `data`, or `hf` with a model of transformers (or a study: `study`)."
            )
        self.check_scores()

    def run(self) -> EvaluationResult | EvaluatedRuns:
        """Measure the scores of one checkpoint, of a model of transformers, or of many runs."""
        return self._evaluate(quiet=True)

    def run_in_terminal(self, as_json: bool = False) -> Any:
        """Show progress; of several ranks one has the result."""
        from steepen.distributed.environment import process_environment

        found = self._evaluate(quiet=as_json)
        return found if process_environment().is_main else None

    def _evaluate(self, quiet: bool) -> EvaluationResult | EvaluatedRuns:
        from steepen.evaluation.evaluate_many import choose_part
        from steepen.evaluation.evaluate_run import evaluate as evaluate_run

        if self.hf is not None:
            from steepen.evaluation.hf_model import evaluate_hugging_face

            scores = evaluate_hugging_face(
                self.hf, self.data, self, device=self.device, precision=self.precision,
                trust_remote_code=self.trust_remote_code, quiet=quiet,
            )  # fmt: skip
            return EvaluationResult(scores, self.hf)
        runs = self._find_runs()
        if len(runs) != 1 or self.study is not None or self.split_runs is not None or self._launched:
            return EvaluatedRuns(self.evaluate_many(choose_part(runs, self.split_runs)))
        one = evaluate_run(runs[0], self.data, self, quiet=quiet, **self._execution)
        title, unsaved = one.checkpoint.spec.arm.title, bool(self.update_record) and not one.in_record
        return EvaluationResult(one.scores, title, one.in_record, one.saved, tuple(one.notes), unsaved)

    @property
    def _launched(self) -> bool:
        return self.launcher is not None or self.jobs is not None or bool(self.launcher_options)

    @property
    def _execution(self) -> dict[str, Any]:
        """How each checkpoint is evaluated, besides what is measured."""
        return {name: getattr(self, name) for name in ("device", "precision", "update_record")}

    def evaluate_many(self, runs: Sequence[Path]) -> ManyScores:
        """Evaluate runs in turn here or, with a launcher, each as a job; progress goes to stderr."""
        from steepen.evaluation.evaluate_many import evaluate_many
        from steepen.launch.base import find_launcher

        if self._launched:  # a wrong launcher is rejected even if no run is waiting
            find_launcher(self.launcher or "local", self.launcher_options)
        return evaluate_many(runs, self.data, self, self._measure_jobs if self._launched else self._measure)

    def _measure(self, waiting: Sequence[WaitingRun], dataset: Dataset) -> Measured:
        """The scores of runs that are evaluated here."""
        from steepen.evaluation.evaluate_run import evaluate as evaluate_run

        for one in waiting:
            try:
                yield one, evaluate_run(one.checkpoint, dataset, self, quiet=True, **self._execution)
            except SteepenError as error:
                yield one, str(error)

    def _measure_jobs(self, waiting: Sequence[WaitingRun], dataset: Dataset) -> Measured:
        """The scores of runs that are each a job of the launcher."""
        from steepen.evaluation.score_store import Evaluation
        from steepen.launch.base import LauncherBase, make_launcher
        from steepen.runs.store import RunStore

        for folder, own in _by_store(waiting).items():
            context = self.launch_context(RunStore(folder), dataset.directory)
            chosen = make_launcher(self.launcher or "local", context, self.jobs, self.launcher_options)
            try:
                for outcome in chosen.launch([one.checkpoint.spec for one in own.values()]):
                    one, measured = own[outcome.spec.hash], dict[str, Any](outcome.result or {})
                    saved = Evaluation(one.checkpoint, measured, bool(measured.pop("in_record", False)))
                    measured.pop("saved", None)
                    yield one, saved if outcome.failure is None else outcome.failure.message
            finally:
                if isinstance(chosen, LauncherBase):
                    chosen.close()

    def launch_context(self, store: RunStore, data: Path) -> LaunchContext:
        """Tasks that are `eval` of one run each, with the same scores and absolute paths."""
        from steepen.launch.base import LaunchContext

        options = {one.name: getattr(self, one.name) for one in fields(ScoreOptions)} | self._execution
        for name, value in options.items():
            options[name] = value.absolute() if isinstance(value, Path) else value

        def request(_: RunSpec, run: RunDirectory) -> dict[str, Any]:
            return {"request": "eval", "runs": [str(run.path.absolute())]}

        return LaunchContext(data, store, options, request=request)

    def _find_runs(self) -> list[Path]:
        from steepen.evaluation.evaluate_many import find_runs

        paths = list(self.runs)
        if self.study is not None:
            from steepen.studies.driver.journal import Journal, find_study_folder

            entry = Journal.read(find_study_folder(self.study, self.studies)).entry
            paths += [Path(entry.runs_directory) / run.run for run in entry.runs]
        # A single path may also be a checkpoint, or wrong in a way that its evaluation names.
        return paths if len(paths) == 1 and not any(paths[0].glob("*/record.json")) else find_runs(paths)


def _by_store(waiting: Sequence[WaitingRun]) -> dict[Path, dict[str, WaitingRun]]:
    """Runs by their store and hash, by which a launcher finds them."""
    stores: dict[Path, dict[str, WaitingRun]] = {}
    for one in waiting:
        name = one.checkpoint.spec.hash
        if one.run.name != name:
            raise UsageError(
                f"{one.run} cannot go to a launcher: it is not a run directory named by its hash ({name}); "
                "leave out `launcher` and `jobs`."
            )
        stores.setdefault(one.run.parent, {})[name] = one
    return stores


@dataclass(frozen=True)
class FilterTasks(Request[FilteredTasks]):
    """Select tasks above chance that improve with training, from the CORE scores of reference runs.

    The paper's two criteria: the run with the most tokens is at least two points above chance, and Kendall's
    τ_b between training tokens and accuracy is at least 0.50.
    """

    examples = ("steepen eval filter runs --out tasks.txt",)
    tables = True

    paths: Annotated[
        tuple[Path, ...],
        Argument("Stores, run directories or record.json files of the reference arm.", metavar="RUNS"),
    ]
    _: KW_ONLY
    arm: str = option("Only runs of this arm; the paper's reference is vanilla.", "vanilla")
    min_gap: float = option("Minimum accuracy above chance of the largest run.", 0.02, Range(-1, 1))
    min_tau: float = option("Minimum Kendall τ_b of accuracy with training tokens.", 0.50, Range(-1, 1))
    out: Path | None = option("Write the selected labels to a file, one per line.")

    def run(self) -> FilteredTasks:
        """Read the scores and apply both criteria."""
        from steepen.evaluation.scored_runs import filter_scored_tasks, read_scored_runs

        runs = read_scored_runs(self.paths)
        found = FilteredTasks(self.arm, *filter_scored_tasks(runs, self.arm, self.min_gap, self.min_tau))
        if self.out is not None:
            self.out.write_text("".join(f"{label}\n" for label in found.selected), encoding="utf-8")
        return found


@dataclass(frozen=True, kw_only=True)
class FetchCore(Request[Written]):
    """Download the CORE bundle (22 tasks, 91,037 examples) and verify its content.

    An interrupted download continues when the command is run again. Without a connection, download and unpack
    it elsewhere.
    """

    examples = ("steepen eval fetch-core --out eval_bundle",)

    out: Path = option("Directory to write.", Path("eval_bundle"))
    address: str | None = option("Download the archive from here instead of the public address.")

    def run(self) -> Written:
        """Download, unpack and verify."""
        from steepen.evaluation.core.fetch import ADDRESS, fetch_core
        from steepen.utils.progress import stage_progress

        with stage_progress(quiet=False) as progress:
            bundle = fetch_core(
                self.out,
                self.address or ADDRESS,
                progress=lambda done, total: progress("download", done, total or done),
            )
        counts = {"tasks": len(bundle.tasks), "examples": bundle.examples}
        sentence = f"{counts['tasks']} tasks, {counts['examples']:,} examples, verified."
        return Written(bundle.directory, contents=counts, sentence=sentence)


evaluate = function(Evaluate)
