"""The paper's ablation ladders: operator, allocation, shape, width only, optimizer, random passes, recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from steepen.errors import UsageError, nearest
from steepen.model.arms import find_arm
from steepen.optim.config import OptimizerConfig
from steepen.studies.answer import Answer, Study
from steepen.studies.context import StudyContext
from steepen.studies.driver.run_concurrently import run_concurrently
from steepen.studies.ladders.ladder import judged_ladders
from steepen.studies.ladders.ladder_runs import LadderSpec, ladder_spec

SECTION = "Appendix B, Additional Results for Compute-Optimal Scalings"


@dataclass(frozen=True)
class AblationGroup:
    """Arms whose ladders are compared with one another; the first is the reference."""

    part: str
    question: str
    arms: tuple[str, ...]


ABLATION_GROUPS = (
    AblationGroup(
        "operator", "Which parts of the boundary operator matter?",
        ("vanilla", "untied-2", "deep-vanilla", "untied-2-norm-only", "untied-2-inject-only",
         "untied-2-no-coda-injection"),
    ),
    AblationGroup(
        "allocation", "Must prelude, core and coda grow together?",
        ("vanilla", "loop-2", "loop-2-no-coda-injection", "loop-2-nci-2-c-3", "operator-1",
         "operator-1-1-c-2"),
    ),
    AblationGroup(
        "shape", "Do deeper shapes scale better?",
        ("vanilla", "deep-vanilla", "deeper-vanilla", "operator-1", "deeper-operator-1"),
    ),
    AblationGroup(
        "width-only", "Does the operator's gain survive when only the width grows?",
        ("width-only-deep-vanilla", "width-only-operator-1", "width-only-loop-2", "width-only-untied-2"),
    ),
    AblationGroup(
        "width-and-depth", "Does the operator's gain survive when width and depth grow?",
        ("deep-vanilla", "loop-2", "untied-2"),
    ),
    AblationGroup("optimizer", "Does Muon's gain over AdamW persist with scale?", ()),
    AblationGroup("random", "What do random passes after growth cost?", ("loop-grow", "random-loop-grow")),
    AblationGroup(
        "constant", "How do the arms compare under constant recipes?",
        ("vanilla", "operator-1", "loop-2", "untied-2", "loop-grow", "untied-grow"),
    ),
)  # fmt: skip
PARTS = tuple(group.part for group in ABLATION_GROUPS)


def ablations(
    context: StudyContext, *, parts: Sequence[str] = (), rungs: Sequence[int] = (), seeds: Sequence[int] = ()
) -> Study:
    """Appendix "Additional Results for Compute-Optimal Scalings": its ablation ladders, a part each.

    Every part has its own reference, so multipliers do not compare across parts. Arms that cannot exist at a
    preset's small depths are measured on the other rungs, or left out with a warning.
    """
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"--part {part!r} is not known here; the nearest are {nearest(part, PARTS)}.")
    works = {
        name: judged_ladders(
            context, ladders, ladders[0].label, study="ablations", section=SECTION,
            question=group.question, seeds=seeds, by_time=False,
        )
        for group in ABLATION_GROUPS
        if group.part in (parts or PARTS)
        for name, ladders in _ladders(context, group, rungs).items()
    }  # fmt: skip
    answers: list[Answer] = yield from run_concurrently(list(works.values()))
    return _joined(dict(zip(works, answers, strict=True)))


def _ladders(
    context: StudyContext, group: AblationGroup, rungs: Sequence[int]
) -> dict[str, list[LadderSpec]]:
    if group.part == "optimizer":
        return _optimizers(context, rungs)
    ladders = [ladder_spec(context, find_arm(name), rungs) for name in group.arms]
    if group.part == "constant":
        ladders = [
            replace(ladder, recipe=replace(ladder.recipe, learning_rate_exponent=0.0)) for ladder in ladders
        ]
    return {group.part: ladders}


def _optimizers(context: StudyContext, rungs: Sequence[int]) -> dict[str, list[LadderSpec]]:
    """AdamW against Muon, growing width alone and width with depth; Muon is the reference of each."""
    grid = context.preset.grids.ablations
    found: dict[str, list[LadderSpec]] = {}
    for regime, name in (("width and depth", grid.adam_arm), ("width only", f"width-only-{grid.adam_arm}")):
        muon = ladder_spec(context, find_arm(name), rungs)
        base = replace(muon.recipe.base, learning_rate=grid.adam_learning_rate)
        adam = LadderSpec(
            muon.arm,
            replace(muon.recipe, base=base, learning_rate_base=None),
            muon.depths,
            OptimizerConfig.named("adamw"),
            variant="adamw",
        )
        found[f"optimizer, {regime}"] = [muon, adam]
    return found


def _joined(answers: dict[str, Answer]) -> Answer:
    verdicts = tuple(
        replace(verdict, part=name) for name, answer in answers.items() for verdict in answer.verdicts
    )
    return Answer(
        study="ablations",
        question="Which design choices account for the gains?",
        section=SECTION,
        findings=(),
        values={name: answer.values for name, answer in answers.items()},
        verdicts=verdicts,
        fits=tuple(replace(fit, part=name) for name, answer in answers.items() for fit in answer.fits),
        panels=tuple(
            replace(panel, title=f"{name}: {panel.title}")
            for name, answer in answers.items()
            for panel in answer.panels
        ),
        tables=tuple(
            replace(table, title=f"{name}: {table.title}")
            for name, answer in answers.items()
            for table in answer.tables
        ),
        warnings=tuple(f"{name}: {note}" for name, answer in answers.items() for note in answer.warnings),
        method=(
            "Every part is judged against the first ladder of its own group.",
            *dict.fromkeys(sentence for answer in answers.values() for sentence in answer.method[1:]),
        ),
        runs=tuple(dict.fromkeys(run for answer in answers.values() for run in answer.runs)),
    )
