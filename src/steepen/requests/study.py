"""`study`: run a study to its answer, or say what it would cost.

Every study is a request of its own, `request_of("ladder")`: the fields of `StudyRequest` and the options that
the study takes (`studies/registry.py`). Its steps are those of `StudyRequest.run`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, cast, get_args

from steepen.errors import UsageError
from steepen.requests.launching import COST, Launching
from steepen.requests.request import Option, Request, fields_of, replace_fields
from steepen.studies.registry import OPTIONS, PANEL, StudyEntry, find_study
from steepen.utils.codec import HelpPanel, Range
from steepen.utils.values import Text, parse_words

if TYPE_CHECKING:
    from steepen.results.dry_run import DryRun
    from steepen.results.study import Study
    from steepen.studies.answer import Answer
    from steepen.studies.context import DatasetInfo, StudyContext
    from steepen.studies.preset import Preset

# Panels of --help.
EVERY = HelpPanel("Every study")
FILES = HelpPanel("Data and files")

Scores: TypeAlias = Annotated[
    tuple[Literal["core", "nll", "kl-depth"], ...],
    Text(parse_words, "core, nll and kl-depth, separated by commas"),
]


@dataclass(frozen=True)
class StudyRequest(Launching, Request[Any]):
    """The same command resumes a study after a kill; no finished run is repeated."""

    entry: ClassVar[StudyEntry]
    first_panel = PANEL

    preset: Any = EVERY(
        "tiny, mini, paper, or a custom YAML file; with other fields: tiny+context=128.",
        "tiny",
        python="Also a Preset.",
    )
    _: KW_ONLY
    recipe: tuple[str | Path, ...] = EVERY(
        "Recipe instead of the preset's: paper, paper-fixed-rho, paper-affine-rho, paper-constant-lr, or a "
        "file of fit-recipe or growth-timing. Repeatable.",
        (),
    )
    tpp: float | None = EVERY(
        "Tokens per initial stored parameter of every arm, instead of its recipe's.", limits=Range(1e-6, 1e9)
    )
    optimizer: Any = EVERY(
        "Optimizer of every run: authors, muon, normuon, adamw or module:factory. Fit its recipe first "
        "(`steepen study fit-recipe --optimizer NAME`).",
        shown="authors",
        python="Also a factory.",
    )
    sweep_flops: Literal["total", "matrix"] | None = EVERY(
        "What the FLOPs of sweeps count: total, or matrix (without attention, as the paper's). Default: the "
        "preset's."
    )
    score: Scores = EVERY("Also evaluate every run, then answer again: core, nll, kl-depth, with commas.", ())
    core: Path | None = FILES("Directory of the CORE bundle, for `score` core and nll.")
    data: Path | None = FILES("Data directory made by `steepen data prepare`. Default: the preset's own.")
    epochs: int = FILES("Maximum number of epochs (repeats of the data).", 1, Range(1, 10**6))
    studies: Path = FILES("Directory of journals and answers.", Path("studies"))
    name: str | None = FILES("Name of the study's directory. Default: STUDY-PRESET[-ARMS].")
    dry_run: bool = COST("Print the remaining runs with FLOPs, time and cost; start none.", False)

    @classmethod
    def verb_name(cls) -> str:
        """The words that JSON and the command line have."""
        return f"study {cls.entry.key}"

    @classmethod
    def check_words(cls, words: Sequence[str]) -> None:
        """Reject an option of other studies, and name them."""
        flags = dict[str, str]()
        for name, hint in OPTIONS.items():
            shown = next(one for one in get_args(hint) if isinstance(one, Option))
            flags[name] = shown.flag or f"--{name.replace('_', '-')}"
        given = {word.partition("=")[0] for word in words}
        for name in OPTIONS.keys() - cls.entry.options.keys():
            if flags[name] in given:
                raise UsageError(replace_fields(cls.entry.lacks(name), flags.get))

    def check(self) -> None:
        """Reject what would fail when the first run starts, or when its scores are asked for."""
        self.check_launching()
        if {"core", "nll"} & set(self.score) and self.core is None:
            raise UsageError("`score` core and nll need the CORE tasks: give their directory with `core`.")

    @property
    def given(self) -> dict[str, Any]:
        """The study's own options that were given."""
        own = {name: getattr(self, name) for name in self.entry.options}
        if own.get("until"):
            own["budget"] = self.budget
        return {name: value for name, value in own.items() if value not in (None, (), False)}

    def run(self) -> Study | DryRun:
        """Open the preset and the data, check the options on them, and drive the study to its answer."""
        from steepen.studies.context import assumed_data, open_data
        from steepen.studies.preset import Preset, load_preset

        preset = self.preset if isinstance(self.preset, Preset) else load_preset(str(self.preset))
        if self.sweep_flops is not None:
            preset = replace(preset, sweep_flops=self.sweep_flops)
        if not self.dry_run:
            self.check_device()
        # Wrong options are rejected before data is prepared: on assumed data, which has all tokens it needs.
        self.entry.check(self._context(preset, assumed_data(preset)), self.given)
        title = self.name or self._title(preset)
        folder, facts = open_data(preset, self.data, self.runs, self.dry_run, (self.studies, title))
        context = self._context(preset, facts)
        self.entry.check(context, self.given)  # and again on the real data, before a journal is written
        for note in _notes(context, folder):
            print(f"note: {note}", file=sys.stderr)
        launching = replace(
            self,
            sample_every=self.sample_every or preset.sample_every,
            sample_prompt=self.sample_prompt or preset.sample_prompts,
        )
        if self.dry_run:
            return launching._dry_run(context, folder)
        return launching._drive(context, folder, title)

    def _context(self, preset: Preset, facts: DatasetInfo) -> StudyContext:
        from steepen.recipe.recipe_choice import choose_recipes
        from steepen.studies.context import StudyContext

        choice = choose_recipes(list(map(str, self.recipe)), self.tpp)
        context = StudyContext(preset, facts, epochs=self.epochs, choice=choice)
        return context.with_optimizer(self._optimizer_name)

    @property
    def _optimizer_name(self) -> str | None:
        from steepen.utils.imports import object_name

        return None if self.optimizer is None else object_name(self.optimizer, "optimizer")

    def _arm_names(self) -> list[str]:
        """Names as they were given, and those of objects."""
        from steepen.model.arms import find_arm

        return [arm if isinstance(arm, str) else find_arm(arm).name for arm in self.given.get("arms", ())]

    def _title(self, preset: Preset) -> str:
        """The default name of the study's folder: study, preset, arms, parts, and the optimizer if named."""
        words = [self.entry.name, preset.name, *self._arm_names(), *self.given.get("parts", ())]
        words += ["until-decided"] if "until" in self.given else []
        words += [] if self.optimizer is None else [str(self._optimizer_name)]
        return re.sub(r"[^A-Za-z0-9_+.-]+", "-", "-".join(words))[:100]

    def _journal_options(self, context: StudyContext) -> dict[str, Any]:
        """What study.json keeps, and what another study of the same name must agree with."""
        choice = context.choice
        arms = {"arms": self._arm_names()} if "arms" in self.given else {}
        rest = {"recipe": choice.name, "tpp": self.tpp, "sweep_flops": self.sweep_flops,
                "optimizer": self._optimizer_name}  # fmt: skip
        return {
            "study": self.entry.key, "preset": context.preset.name, "data": context.data.identity,
            "epochs": self.epochs, "recipes": sorted(choice.files), **self.given, **arms,
            **{key: value for key, value in rest.items() if value is not None},
        }  # fmt: skip

    def _drive(self, context: StudyContext, folder: Path, title: str) -> Study:
        """Run the study to its answer, with scores where they are asked for, and write fitted recipes."""
        from steepen.launch.base import LauncherBase
        from steepen.launch.batch_progress import BatchProgress
        from steepen.recipe.recipe_choice import write_recipe
        from steepen.results.study import open_study
        from steepen.studies.driver.drive import drive
        from steepen.studies.driver.journal import Journal

        def answer() -> Answer:
            launcher, speed = self.make_launcher(folder), self.speed()
            try:
                return drive(
                    self.entry.start(context, self.given), self.store, launcher,
                    journal=Journal.open(self.studies, title, self._journal_options(context), self.runs),
                    budget=None if "until" in self.given else self.limit(),
                    accept_diverged=self.entry.accept_diverged,
                    retry_diverged=self.retry_diverged, progress=BatchProgress(self.store, speed=speed),
                )  # fmt: skip
            finally:
                if isinstance(launcher, LauncherBase):
                    launcher.close()

        found = answer()
        if self.score:
            self._score([self.runs / run for run in dict.fromkeys(found.runs)], folder)
            found = answer()  # the same runs, with the scores
        for path, file in found.recipe_files(self.studies / title).items():
            write_recipe(path, file)
        return open_study(title, self.studies)

    def _score(self, runs: Sequence[Path], data: Path) -> None:
        """Evaluate the finished runs where the study trains them; a single local one in this process."""
        from steepen.requests.evaluate import Evaluate

        finished = tuple(run for run in runs if (run / "record.json").is_file())
        if not finished:
            return
        where: dict[str, Any] = {}
        if not self.on_this_machine or (self.jobs != 1 and len(finished) > 1):
            where = {"launcher": self.launcher_name, "jobs": self.jobs}
            where["launcher_options"] = self.launcher_options
        request = Evaluate(
            finished, data, core=self.core if {"core", "nll"} & set(self.score) else None,
            kl_depth="kl-depth" in self.score, device=self.device, **where,
        )  # fmt: skip
        for run, why in request.evaluate_many(finished).failed.items():
            print(f"{run.name} was not evaluated: {why}", file=sys.stderr)

    def _dry_run(self, context: StudyContext, folder: Path) -> DryRun:
        from steepen.studies.driver.dry_run import dry_run
        from steepen.studies.synthetic import SIMULATED_RECORDS

        # On a named GPU the cores of this machine say nothing about how many runs there are at a time.
        launcher = self.make_launcher(folder)  # rejects a wrong one
        named, _ = self.named_gpus
        slots = self.jobs or named or 1 if self.gpu and self.on_this_machine else launcher.slots
        found = dry_run(
            lambda: self.entry.start(context, self.given), self.store, self.speed(), slots,
            stand_ins=SIMULATED_RECORDS if self.entry.adaptive else (),
            accept_diverged=self.entry.accept_diverged, dollars_per_hour=self.dollars_per_hour,
            on_cpu=self.estimated_on_cpu(), available=named,
        )  # fmt: skip
        if "until" not in self.given or found.complete:
            return found
        limit = self.limit()
        if limit is None:
            return replace(found, limit="the FLOPs of the whole ladder")
        return replace(found, limit=f"{self.budget}{'' if limit.flops is None else ' FLOPs'}")


def _notes(context: StudyContext, folder: Path) -> list[str]:
    """What the data changes: another tokenizer than the preset's, fewer validation tokens than it wants."""
    from steepen.studies.context import tokenizer_note, whole_validation_tokens

    preset, found = context.preset, context.validation_tokens
    notes = [tokenizer_note(preset, folder, context.data)]
    wanted = whole_validation_tokens(
        preset.validation_tokens, sys.maxsize, preset.context, preset.batch_tokens
    )
    if found < wanted:
        notes.append(
            f"losses are of {found:,} validation tokens, all that the data has; the preset asks for "
            f"{wanted:,}."
        )
    return list(filter(None, notes))


def request_of(study: str | Callable[..., Any]) -> type[StudyRequest]:
    """The request of a study by name, by `module:function`, or of a function itself."""
    return _request_of(find_study(study))


@functools.cache
def _request_of(entry: StudyEntry) -> type[StudyRequest]:
    own: list[Any] = []
    for name, hint in entry.options.items():
        kind, *extras = get_args(hint)
        if name == "parts":
            words = f"Only this part of the study: {', '.join(entry.parts)}. Repeatable."
            extras = [replace(extras[0], help=words, panel=PANEL)]
        missing = False if kind is bool else () if "tuple" in str(kind) else None
        own.append((name, Annotated[(kind, *extras)], dataclasses.field(default=missing, kw_only=True)))
    question = f"{entry.question}\n\n" if entry.question else ""
    words = {
        "entry": entry,
        "examples": (f"steepen study {entry.key} --preset tiny --dry-run",),
        "__doc__": f"{question}{StudyRequest.__doc__}",
        "__module__": __name__,
    }
    name = "".join(word.capitalize() for word in re.split(r"\W", entry.name))
    return dataclasses.make_dataclass(name, own, bases=(StudyRequest,), frozen=True, namespace=words)


def study(study: str | Callable[..., Any], preset: Any = "tiny", **settings: Any) -> Study:
    """Run a study to its answer; the same call resumes it, and no finished run is repeated.

    `study` is one of `steepen study --help`, or a generator function. `settings` are the study's own options
    and those of every study, by the names that `steepen study NAME --help` has: `arms`, `rungs`, `data`,
    `recipe`, `score`, `track`, `launcher` … Progress goes to standard error.
    """
    return cast("Study", _ask(study, preset, settings).run())


def dry_run_study(study: str | Callable[..., Any], preset: Any = "tiny", **settings: Any) -> DryRun:
    """The runs that a study would make next, with FLOPs, time and cost; starts nothing."""
    return cast("DryRun", _ask(study, preset, {**settings, "dry_run": True}).run())


def ladder(
    arms: Sequence[Any] = (), preset: Any = "tiny", *, reference: str | None = None,
    rungs: Sequence[int] = (), seeds: Sequence[int] = (), noise: float | None = None, **settings: Any,
) -> Study:  # fmt: skip
    """Train ladders of some arms and judge each against the reference; resumes if it was interrupted.

    `arms` are names, `Arm`s, or classes of blocks. `settings` are those of `steepen.study`.
    """
    own = {"arms": arms, "reference": reference, "rungs": rungs, "seeds": seeds, "noise": noise}
    return study("ladder", preset, **own, **settings)


def _ask(study: str | Callable[..., Any], preset: Any, settings: Mapping[str, Any]) -> StudyRequest:
    kind = request_of(study)
    known = {field.name for field in fields_of(kind)}
    for name in settings:
        if name not in known:
            raise UsageError(kind.entry.lacks(name))
    return kind(preset, **settings)
