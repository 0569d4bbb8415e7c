"""The studies by name, and custom ones by `module:function`. Imports no study until it is used.

A new study is a file and a row of `STUDIES`, which names the options its function takes. An option that no
other study has is a row of `OPTIONS` too: that is its type, its help and its name on the command line.
tests/studies/test_every_study.py runs every row: an answer has a question, findings or verdicts, a section,
panels, tables, and sentences on its method.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_type_hints

from steepen.errors import UsageError, nearest
from steepen.utils.codec import Option, Range
from steepen.utils.imports import import_object, object_name
from steepen.utils.values import Depth, Flops, Integers, Noise, Text, parse_words

if TYPE_CHECKING:
    from steepen.studies.answer import Study
    from steepen.studies.context import StudyContext

PANEL = "This study"  # of --help
Names = Annotated[tuple[Any, ...], Text(parse_words, "words with commas, as a,b")]
# The options of studies, in the order of help and journals. One that is not given (None, nothing or False) is
# left to the study's own default.
OPTIONS: dict[str, Any] = {
    "arms": Annotated[
        Names,
        Option("Arms, e.g. vanilla,operator-1.", PANEL, python="Also Arms, and classes of blocks."),
    ],
    "rungs": Annotated[Integers, Option("Depths, e.g. 2-6, 6-20:2 or 2,3,5.", PANEL)],
    "seeds": Annotated[Integers, Option("Seeds, e.g. 0-2 or 0,1.", PANEL)],
    "parts": Annotated[
        tuple[str, ...], Option("Only this part of the study. Repeatable.", PANEL, flag="--part")
    ],
    "reference": Annotated[str | None, Option("The arm to compare the others with.", PANEL)],
    "noise": Annotated[Noise | None, Option("Known standard deviation of a run's loss.", PANEL)],
    "c0": Annotated[
        Flops | None,
        Option("C0 of the law in FLOPs. Default: of the reference's run at the depth of tuning.", PANEL),
    ],
    "lr_regret": Annotated[
        float | None,
        Range(0, 100),
        Option("Regret of a learning rate off by 2×, from a sweep; see `steepen fit --help`.", PANEL),
    ],
    "source": Annotated[
        str | None, Option("The arm whose recipe is transferred. Default: vanilla.", PANEL, flag="--from")
    ],
    "hold_out": Annotated[Depth | None, Option("The depth to predict. Default: the preset's.", PANEL)],
    "until": Annotated[
        Literal["decided"] | None,
        Option(
            "decided: run batch by batch until the question is answered or given up, or `budget` is spent.",
            PANEL,
        ),
    ],
    "question": Annotated[
        Literal["grows", "better"] | None,
        Option("The question to decide, with `until`: grows or better. Default: grows.", PANEL),
    ],
    "effect": Annotated[
        float | None,
        Range(1.001, 100),
        Option(
            "Smallest multiplier (better), or its smallest growth per decade (grows), to find with `until`. "
            "Default: 1.1.",
            PANEL,
        ),
    ],
    "from_recipe": Annotated[
        bool, Option("Start from the recipe, not from the paper's initial values.", PANEL)
    ],
}


@dataclass(frozen=True)
class StudyEntry:
    """A row of the registry. `target` is the study's function as `module:function`."""

    name: str
    target: str
    question: str = ""
    takes: str = ""  # the options of its function; those of a custom study are read from its signature
    adaptive: bool = False  # later runs depend on earlier results
    accept_diverged: bool = True  # a diverged run is a result of the sweep, not a failure of the study
    parts: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """What finds it again: its name, or the `module:function` of a custom one."""
        return self.name if STUDIES.get(self.name) is self else self.target

    @property
    def function(self) -> Callable[..., Study]:
        """The study: a generator function whose first argument is the `StudyContext`."""
        found = import_object(self.target, "study", own={entry.target for entry in STUDIES.values()})
        if not callable(found):
            raise UsageError(f"the study {self.target!r} is not a function.")
        return cast("Callable[..., Study]", found)

    @property
    def options(self) -> dict[str, Any]:
        """The types of its options by name: those of `OPTIONS`, of which a custom study may have others."""
        names = self.takes.split() or list(inspect.signature(self.function).parameters)[1:]
        ordered = sorted(names, key=lambda name: [*OPTIONS, name].index(name))
        return {name: OPTIONS.get(name) or _own_option(self.function, name) for name in ordered}

    def start(self, context: StudyContext, options: Mapping[str, Any]) -> Study:
        """The study's generator; an option it does not take is rejected."""
        for name in options:
            # The budget of a study that stops by itself is its own, not the driver's.
            if name not in self.options and not (name == "budget" and "until" in options):
                raise UsageError(self.lacks(name))
        return self.function(context, **options)

    def lacks(self, option: str) -> str:
        """The error of an option that the study does not take: which studies do, else the nearest it has."""
        own = self.options
        others = [entry.name for entry in STUDIES.values() if option in entry.takes.split()]
        known = f"these do: {', '.join(others)}" if others else f"the nearest are {nearest(option, own)}"
        return f"{self.name} does not take `{option}`; {known if own or others else 'it has no options'}."

    def check(self, context: StudyContext, options: Mapping[str, Any]) -> None:
        """Reject wrong options and recipes of other arms: run the study up to its first batch of runs."""
        next(self.start(context, options))
        if STUDIES.get(self.name) is self:  # a custom study may ask for recipes later
            context.choice.require_asked()


def _own_option(function: Callable[..., Study], name: str) -> Any:
    """An option that only a custom study has, with the type of its parameter."""
    try:
        hint = get_type_hints(function, include_extras=True).get(name, Any)
    except NameError:  # a name imported for type checkers alone
        hint = Any
    if hint in (int, float, str):
        hint |= None  # not given
    elif hint in (Sequence[int], tuple[int, ...]):
        hint = Integers
    return Annotated[hint, Option("", PANEL)]


_PACKAGE = "steepen.studies"
STUDIES: dict[str, StudyEntry] = {
    study.name: study
    for study in (
        StudyEntry(
            "ladder", f"{_PACKAGE}.ladders.ladder:ladder",
            "Which arms scale better, and is it exponent or constant?",
            "arms rungs seeds reference noise c0 lr_regret until question effect", accept_diverged=False,
        ),
        StudyEntry(
            "fit-recipe", f"{_PACKAGE}.stages.fit_recipe:fit_recipe",
            "Fit a compute-optimal recipe for one arm (stages 1 to 4).", "arms from_recipe", adaptive=True,
        ),
        StudyEntry(
            "chain-tuning", f"{_PACKAGE}.stages.chain_tuning:chain_tuning",
            "Stage 1: the best hyperparameters at the base size.", "arms parts from_recipe", adaptive=True,
            parts=(
                "learning_rate", "embedding_lr_multiplier", "head_lr_multiplier", "residual_multiplier",
                "output_multiplier", "injection_weight", "weight_decay", "embedding_init_std", "init_scale",
                "schedule", "adam",
            ),
        ),
        StudyEntry(
            "tpp", f"{_PACKAGE}.stages.tpp:tpp",
            "Stage 2: the best tokens per parameter, and whether they drift with scale.", "arms",
        ),
        StudyEntry(
            "growth-fraction", f"{_PACKAGE}.stages.growth_fraction:growth_fraction",
            "Stage 3: the fraction of tokens after growth.", "arms",
        ),
        StudyEntry(
            "lr-rule", f"{_PACKAGE}.stages.lr_rule:lr_rule",
            "Stage 4: how the learning rate must change with size.", "arms parts", adaptive=True,
            parts=("drift", "screen"),
        ),
        StudyEntry(
            "allocation", f"{_PACKAGE}.design.allocation:allocation",
            "Which fraction of the blocks belongs in the core?", "arms",
        ),
        StudyEntry(
            "passes", f"{_PACKAGE}.design.passes:passes", "How many core passes?", "parts",
            parts=("tokens", "anchor", "hyperparameters"),
        ),
        StudyEntry(
            "growth-target", f"{_PACKAGE}.design.growth_target:growth_target",
            "To how many passes should a network grow?", "arms",
        ),
        StudyEntry(
            "growth-timing", f"{_PACKAGE}.design.growth_timing:growth_timing",
            "When should a network grow, and how does that scale?", "arms",
        ),
        StudyEntry(
            "transfer", f"{_PACKAGE}.stages.transfer:transfer", "What does another arm's recipe cost?",
            "arms source rungs seeds parts", accept_diverged=False, parts=("probe", "ladder"),
        ),
        StudyEntry(
            "ablations", f"{_PACKAGE}.ladders.ablations:ablations",
            "Which design choices account for the gains?", "parts rungs seeds", adaptive=True,
            parts=("operator", "allocation", "shape", "width-only", "width-and-depth", "optimizer", "growth",
                   "axes", "random", "hyperparameters", "constant"),
        ),
        StudyEntry(
            "extrapolate", f"{_PACKAGE}.ladders.extrapolate:extrapolate",
            "Does the fitted law predict a held-out rung?", "arms rungs seeds hold_out", adaptive=True,
            accept_diverged=False,
        ),
        StudyEntry(
            "data-constrained", f"{_PACKAGE}.data_constrained:data_constrained",
            "On repeated data: more parameters or more passes?", "parts",
            parts=("grid", "regimes", "controls"),
        ),
    )
}  # fmt: skip


def find_study(study: str | Callable[..., Study]) -> StudyEntry:
    """A study by name; a custom one, by `module:function` or itself, is stopped by a run that diverges."""
    if callable(study) or ":" in study:
        target = object_name(study, "study")
        name = target.rpartition(":")[2].rpartition(".")[2].replace("_", "-")
        entry = StudyEntry(name, target, adaptive=True, accept_diverged=False)
        entry.function  # noqa: B018  (rejects a name that cannot be imported)
        return entry
    key = study.strip().lower().replace("_", "-")
    if key not in STUDIES:
        raise UsageError(
            f"there is no study {study!r}; the nearest are {nearest(key, STUDIES)} "
            "(`steepen study --help` lists all). A custom study is named module:function."
        )
    return STUDIES[key]


def choose_parts(study: str, parts: Sequence[str], default: Sequence[str] = ()) -> list[str]:
    """The parts of a study that are asked for, in its order; without any, its default ones, or all."""
    known = STUDIES[study].parts
    for part in parts:
        if part not in known:
            raise UsageError(
                f"`parts` names {part!r}, which {study} lacks; the nearest are {nearest(part, known)}."
            )
    return [part for part in known if part in (parts or default or known)]
