"""`steepen.study`, `steepen.ladder` and `steepen.open_study`: run a study, or look at one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.api.plans import recipe_names
from steepen.api.result import Result, marked_rows, new_axes, wrap
from steepen.errors import UsageError
from steepen.results.fit import verdict_words
from steepen.results.runs import Runs, open_runs

if TYPE_CHECKING:
    from steepen.model.arm import Arm
    from steepen.studies.answer import Answer
    from steepen.studies.driver.dry_run import DryRunReport
    from steepen.studies.driver.journal import Journal
    from steepen.studies.driver.study_status import StudyStatus
    from steepen.studies.preset import Preset


def ladder(
    arms: Sequence[str | Arm | type] = (),
    preset: str | Path | Preset = "tiny",
    *,
    reference: str | None = None,
    rungs: Sequence[int] = (),
    seeds: Sequence[int] = (),
    noise: float | None = None,
    **settings: Any,
) -> Study:
    """Train ladders of some arms and judge each against the reference; resumes if it was interrupted.

    `arms` are names, `Arm`s, or classes of blocks. `settings` are those of `steepen.study`.
    """
    options = {"reference": reference, "noise": noise, "rungs": list(rungs), "seeds": list(seeds)}
    given = {name: value for name, value in options.items() if value not in (None, [])}
    return study("ladder", preset, arms=arms, options=given, **settings)


def study(
    name: str | Callable[..., Any],
    preset: str | Path | Preset = "tiny",
    *,
    arms: Sequence[str | Arm | type] = (),
    options: Mapping[str, Any] | None = None,
    data: str | Path | None = None,
    recipe: str | Path | Sequence[str | Path] = (),
    tpp: float | None = None,
    epochs: int = 1,
    optimizer: str | Callable[..., Any] | None = None,
    sweep_flops: str | None = None,
    score: str | Sequence[str] = (),
    core: str | Path | None = None,
    track: str | Sequence[str] = (),
    runs: str | Path = "runs",
    studies: str | Path = "studies",
    label: str | None = None,
    launcher: Any = "local",
    jobs: int | None = None,
    launcher_options: Sequence[str] = (),
    device: str = "auto",
    gpus_per_run: int | str = 1,
    shard: str = "optimizer",
    budget: str | None = None,
    retry_diverged: bool = False,
) -> Study:
    """Run a study to its answer; the same call resumes it, and no finished run is repeated.

    `name` is one of `steepen study --help`, or a generator function; `options` are the study's own, as
    `{"rungs": [2, 3], "parts": ["drift"]}`. `launcher` is a name or a class, `optimizer` a name or a factory.
    `score` ("core", "nll", "kl-depth") evaluates every run, and the study answers again with scores; `core`
    is the directory of the CORE bundle. `track` are trackers that every run logs to ("wandb", "tensorboard",
    "mlflow", "trackio"). Progress goes to standard error.
    """
    from steepen.api.study_data import write_recipes
    from steepen.api.study_scores import score_request, score_runs
    from steepen.launch.budget import Budget
    from steepen.studies.driver.launch import launch_study
    from steepen.training.trackers import check_trackers

    trackers = check_trackers(_words(track), installed=True)
    request = score_request(_words(score), None if core is None else Path(core))
    chosen = _choose(
        name, preset, arms, options, data, recipe, tpp, epochs, optimizer, sweep_flops, Path(runs),
        dry_run=False, studies=Path(studies), label=label,
    )  # fmt: skip
    title = chosen.title

    def launch() -> Answer:
        return launch_study(
            chosen.start,
            chosen.settings(
                runs=Path(runs), launcher=launcher, jobs=jobs, options=tuple(launcher_options), device=device,
                gpus_per_run=str(gpus_per_run), shard=shard, trackers=trackers,
            ),
            name=title,
            options=chosen.journal_options(name),
            studies=Path(studies),
            budget=None if budget is None else Budget.parse(budget),
            accept_diverged=chosen.entry.accept_diverged,
            retry_diverged=retry_diverged,
        )  # fmt: skip

    answer = launch()
    if request is not None:
        scored = [Path(runs) / run for run in dict.fromkeys(answer.runs)]
        score_runs(
            scored, chosen.folder, request, device=device, launcher=launcher, jobs=jobs,
            launcher_options=tuple(launcher_options),
        )  # fmt: skip
        answer = launch()  # the same answer, with the scores
    write_recipes(answer, Path(studies) / title)
    return open_study(title, studies)


def dry_run_study(
    name: str | Callable[..., Any],
    preset: str | Path | Preset = "tiny",
    *,
    arms: Sequence[str | Arm | type] = (),
    options: Mapping[str, Any] | None = None,
    data: str | Path | None = None,
    recipe: str | Path | Sequence[str | Path] = (),
    tpp: float | None = None,
    epochs: int = 1,
    optimizer: str | Callable[..., Any] | None = None,
    sweep_flops: str | None = None,
    runs: str | Path = "runs",
    gpu: str | None = None,
    mfu: float | None = None,
    jobs: int | None = None,
    dollars_per_hour: float | None = None,
    gpus_per_run: int | str = 1,
    shard: str = "optimizer",
) -> DryRunReport:
    """The runs that a study would make next, with FLOPs, time and cost; starts nothing (`--dry-run`)."""
    from steepen.studies.driver.launch import dry_run_study as dry_run
    from steepen.studies.synthetic import SIMULATED_RECORDS

    chosen = _choose(
        name, preset, arms, options, data, recipe, tpp, epochs, optimizer, sweep_flops, Path(runs),
        dry_run=True,
    )  # fmt: skip
    return dry_run(
        chosen.start,
        chosen.settings(
            runs=Path(runs), launcher="local", jobs=jobs, gpu=gpu, mfu=mfu, gpus_per_run=str(gpus_per_run),
            shard=shard,
        ),
        stand_ins=SIMULATED_RECORDS if chosen.entry.adaptive else (),
        accept_diverged=chosen.entry.accept_diverged,
        dollars_per_hour=dollars_per_hour,
    )  # fmt: skip


@dataclass(frozen=True)
class _Chosen:
    """A study with its preset, data and options."""

    entry: Any
    preset: Preset
    context: Any
    given: dict[str, Any]
    arm_names: list[str]
    folder: Path
    title: str  # name of its directory
    optimizer: str | None = None
    sweep_flops: str | None = None

    def start(self) -> Any:
        return self.entry.start(self.context, self.given)

    def settings(self, *, launcher: Any, **settings: Any) -> Any:
        from steepen.studies.driver.launch import LaunchSettings
        from steepen.utils.imports import object_name

        return LaunchSettings(self.folder, launcher=object_name(launcher, "launcher"), **settings)

    def journal_options(self, name: str | Callable[..., Any]) -> dict[str, Any]:
        """What study.json keeps; the same as the command line's, so that either resumes the other."""
        choice, given = self.context.choice, {**self.given}
        if self.arm_names:
            given["arms"] = self.arm_names
        rest = {
            "recipe": choice.name, "tpp": choice.tpp, "sweep_flops": self.sweep_flops,
            "optimizer": self.optimizer,
        }  # fmt: skip
        custom = self.entry.target if callable(name) or ":" in name else self.entry.name
        return {
            "study": custom, "preset": self.preset.name, "data": self.context.data.identity,
            "epochs": self.context.epochs, "recipes": sorted(choice.files), **given,
            **{key: value for key, value in rest.items() if value is not None},
        }  # fmt: skip


def _choose(
    name: str | Callable[..., Any],
    preset: str | Path | Preset,
    arms: Sequence[str | Arm | type],
    options: Mapping[str, Any] | None,
    data: str | Path | None,
    recipe: str | Path | Sequence[str | Path],
    tpp: float | None,
    epochs: int,
    optimizer: str | Callable[..., Any] | None,
    sweep_flops: str | None,
    runs: Path,
    *,
    dry_run: bool,
    studies: Path = Path("studies"),
    label: str | None = None,
) -> _Chosen:
    from steepen.api.study_data import assumed_data, open_data, study_title, tokenizer_note, with_sweep_flops
    from steepen.model.arms import find_arm
    from steepen.recipe.recipe_choice import choose_recipes
    from steepen.studies.context import StudyContext
    from steepen.studies.preset import Preset, load_preset
    from steepen.studies.registry import find_study
    from steepen.utils.imports import object_name

    if isinstance(arms, str):
        raise UsageError(f"arms is {arms!r}; give a list of arms, such as [{arms!r}].")
    entry = find_study(name)
    found = preset if isinstance(preset, Preset) else load_preset(str(preset))
    found = with_sweep_flops(found, sweep_flops)
    optimizer = None if optimizer is None else object_name(optimizer, "optimizer")
    choice = choose_recipes(recipe_names(recipe), tpp)
    chosen_arms = [find_arm(arm) for arm in arms]
    given: dict[str, Any] = {**(options or {}), **({"arms": chosen_arms} if chosen_arms else {})}
    # Reject wrong options before data is prepared.
    planned = StudyContext(found, assumed_data(found), epochs=epochs, choice=choice)
    entry.check(planned.with_optimizer(optimizer), given)
    # A name that was given stays as given in the journal, as on the command line.
    names = [arm if isinstance(arm, str) else found_arm.name
             for arm, found_arm in zip(arms, chosen_arms, strict=True)]  # fmt: skip
    title = label or study_title(entry, found, {**given, "arms": names}, optimizer)
    folder, facts = open_data(found, None if data is None else Path(data), runs, dry_run, (studies, title))
    if (note := tokenizer_note(found, folder, facts)) is not None:
        print(f"note: {note}", file=sys.stderr)
    context = StudyContext(found, facts, epochs=epochs, choice=choice).with_optimizer(optimizer)
    return _Chosen(entry, found, context, given, names, folder, title, optimizer, sweep_flops)


def _words(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def open_study(study: str | Path, studies: str | Path = "studies", runs: str | Path | None = None) -> Study:
    """A study by its directory, its name in `studies` or a prefix of it; `runs` where its runs are now."""
    from steepen.studies.driver.journal import Journal, find_study_folder

    folder = find_study_folder(str(study), Path(studies))
    return Study(Journal.read(folder), None if runs is None else Path(runs))


@dataclass(frozen=True, eq=False, repr=False)
class Study(Result):
    """A study: its progress, answer, verdicts, runs, figures and report."""

    journal: Journal
    runs_directory: Path | None = None  # None: where the journal says

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.journal.entry.name

    @property
    def folder(self) -> Path:
        """Its directory."""
        return self.journal.folder

    @property
    def answer(self) -> Answer | None:
        """The answer; None until the study has finished."""
        from steepen.studies.answer import Answer

        value = self.journal.entry.answer
        return None if value is None else Answer.from_dict(value)

    @property
    def verdicts(self) -> dict[str, Any]:
        """The main verdict on each arm."""
        answer = self.answer
        return {} if answer is None else {one.arm: one.verdict for one in answer.primary_verdicts}

    @property
    def runs(self) -> Runs:
        """The runs that the study requested."""
        names = {asked.run for asked in self.journal.entry.runs}
        found = open_runs(self.status().runs_directory)
        return Runs(tuple(run for run in found if run.name in names), found.directory)

    def status(self) -> StudyStatus:
        """Runs by status, FLOPs done and left, and the estimated time, from the files."""
        from steepen.studies.driver.study_status import study_status

        return study_status(self.journal, self.runs_directory)

    def headline(self) -> str:
        """Name, state and verdicts."""
        words = verdict_words(self.verdicts)
        return f"study {self.name}: {self.journal.live_status}" + (f"; {words}" if words else "")

    def summary(self) -> str:
        """The question, the verdicts and findings, and the warnings, as text of 80 columns."""
        answer = self.answer
        if answer is None:
            return f"{self.headline()}; no answer yet. {self.journal.entry.message}".rstrip()
        verdicts = [verdict.summary() for verdict in self.verdicts.values()]
        warnings = [f"note: {text}" for text in (*answer.cautions, *answer.warnings)]
        return wrap("\n".join([answer.question, *verdicts, *answer.findings, *warnings]))

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per verdict; of a study without verdicts, the rows of its first table."""
        answer = self.answer
        if answer is None:
            return [row.to_dict() for row in self.status().runs]
        if answer.verdicts:
            return [
                {
                    "arm": one.arm,
                    "measure": one.measure,
                    "verdict": one.verdict.word,
                    "claim": one.verdict.claim,
                    "by_what_claim": one.verdict.by_what_claim,
                    "delta_gamma": one.verdict.delta_gamma,
                    "delta_gamma_low": one.verdict.delta_gamma_interval[0],
                    "delta_gamma_high": one.verdict.delta_gamma_interval[1],
                    "multiplier": one.verdict.multiplier,
                    "multiplier_flops": one.verdict.multiplier_flops,
                    "p_growth": one.verdict.p_slope,
                }
                for one in answer.verdicts
            ]
        table = answer.tables[0] if answer.tables else None
        return [] if table is None else [dict(zip(table.columns, row, strict=False)) for row in table.rows]

    def shown_columns(self) -> list[str] | None:
        """Without columns that the mark "?" stands for."""
        rows = self.to_rows()
        return [name for name in rows[0] if not name.endswith("claim")] if rows else None

    def shown_rows(self) -> list[dict[str, Any]]:
        """With "?" behind an answer that is fragile, so not a claim."""
        answer, rows = self.answer, self.to_rows()
        if answer is None or not answer.verdicts:
            return rows
        return marked_rows(rows, [one.verdict.marked_word for one in answer.verdicts])

    def plot(self, ax: Any = None, panel: int | str = 0) -> Any:
        """Draw a panel of the answer, by place or by the beginning of its title; returns the Axes."""
        from steepen.report.colours import ARM_TITLES
        from steepen.report.figure import plot_panel

        panels = self.answer.panels if self.answer is not None else ()
        if isinstance(panel, str):
            found = [one for one in panels if one.title.lower().startswith(panel.lower())]
        else:
            found = list(panels)[panel : panel + 1]
        if not found:
            titles = "; ".join(one.title for one in panels) or "none: it has no answer yet"
            raise UsageError(f"{self.name} has no panel {panel!r}; its panels are {titles}.")
        ax = new_axes(ax)
        plot_panel(ax, found[0], ARM_TITLES)
        return ax

    def report(self, out: str | Path, formats: str = "pdf,svg,png") -> Path:
        """Write the page, figures and tables of the answer to a directory; returns the page's path."""
        from steepen.report.write import make_report

        return make_report(self.folder, out, formats=formats, runs=self.runs_directory)
