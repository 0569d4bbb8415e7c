"""The table of arms: the paper's eight and every ablation, one row each."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from steepen.errors import UsageError, nearest, shorten
from steepen.model.arm import AllocationRule, Arm
from steepen.model.block_options import parse_block_options
from steepen.model.stages import AXES, CHOICES, StageSchedule, parse_growth
from steepen.utils.imports import import_object, trust_code

NORM_AND_INJECT = "norm+inject"
ONE, TWO, GROW = StageSchedule.fixed(1), StageSchedule.fixed(2), StageSchedule.growing(2, 4)


def _arm(
    name: str, title: str, passes: StageSchedule, about: str, *, operator: bool, tied: bool, recipe: str = ""
) -> Arm:
    boundary = NORM_AND_INJECT if operator else "identity"
    return Arm(name, title, boundary, boundary, tied, passes, recipe=recipe or name, about=about)


# Families with K passes: title, with the operator or not, passes share a core or not, what they are.
_FAMILIES = {
    "loop": ("Loop", True, True, "one core applied {}×, boundary operator"),
    "untied": ("Untied", True, False, "{} untied cores, boundary operator"),
    "tied-vanilla": ("Tied Vanilla", False, True, "no operator, one core applied {}×"),
    "untied-vanilla": ("Untied Vanilla", False, False, "no operator, {} untied cores, Vanilla's recipe"),
}


def family_arm(family: str, passes: int) -> Arm:
    """An arm with K passes: loop-3, untied-3, tied-vanilla-3 or untied-vanilla-3."""
    title, operator, tied, about = _FAMILIES[family]
    # The paper tunes K = 2; its sweeps over K use Operator-1's recipe.
    recipe = "vanilla" if not operator else f"{family}-2" if passes == 2 else "operator-1"
    name, title, schedule = f"{family}-{passes}", f"{title}-{passes}", StageSchedule.fixed(passes)
    return _arm(name, title, schedule, about.format(passes), operator=operator, tied=tied, recipe=recipe)


def _variant(base: Arm, name: str, title: str, about: str, **changes: Any) -> Arm:
    """An ablation of an arm; it follows the arm's recipe."""
    return replace(base, name=name, title=title, about=about, **changes)


def _operator_ablations(base: Arm) -> list[Arm]:
    """The three operator ablations of one arm (Table "Boundary-operator ablations…")."""
    rows = (
        ("norm-only", "norm only", "norm", "norm", "norm at the boundaries, no injection"),
        ("inject-only", "injection only", "inject", "inject", "injection at the boundaries, no norm"),
        ("no-coda-injection", "no coda injection", NORM_AND_INJECT, "norm",
         "full operator in the core, norm before the coda"),
    )  # fmt: skip
    return [
        _variant(base, f"{base.name}-{key}", f"{base.title}, {words}", about, core_boundary=core,
                 coda_boundary=coda)
        for key, words, core, coda, about in rows
    ]  # fmt: skip


def _width_only(base: Arm, blocks: int) -> Arm:
    """An arm whose blocks stay those of executed depth 11 while its width grows (Figure "Width-only…")."""
    name, title = f"width-only-{base.name}", f"{base.title}, width only"
    allocation = replace(base.allocation, blocks=blocks)
    return _variant(base, name, title, "executed depth 11 at every width", allocation=allocation)


def _build() -> dict[str, Arm]:
    stack, deeper = AllocationRule(unsplit=True), AllocationRule(per_depth=2)
    fixed_2_3, fixed_1_2 = AllocationRule(prelude=2, coda=3), AllocationRule(prelude=1, coda=2)
    core_only, doubled = "only the core grows with depth", "twice the blocks at the same width (1:64)"
    plain: dict[str, Any] = {"operator": False, "tied": False}
    main = [
        Arm("vanilla", "Vanilla", allocation=stack, about="a standard transformer"),
        _arm("deep-vanilla", "Deep Vanilla", TWO, "Untied-2 without the operator: deeper, own recipe",
             **plain),
        _arm("operator-1", "Operator-1", ONE, "Vanilla's blocks with the boundary operator",
             operator=True, tied=True),
        family_arm("loop", 2),
        family_arm("untied", 2),
        _arm("loop-grow", "Loop-Grow", GROW, "Loop-2 whose passes double in mid-training",
             operator=True, tied=True),
        _arm("untied-grow", "Untied-Grow", GROW, "Untied-2 whose cores are copied in mid-training",
             operator=True, tied=False),
        _arm("deep-vanilla-grow", "Deep Vanilla Grow", GROW,
             "Deep Vanilla whose core blocks are copied in mid-training", **plain),
    ]  # fmt: skip
    vanilla, _, operator_1, loop_2, untied_2, loop_grow, *_ = main
    rows = [
        *main,
        *_operator_ablations(loop_2),
        *_operator_ablations(untied_2),
        _variant(loop_2, "loop-2-2-c-3", "Loop-2, 2/C/3", core_only, allocation=fixed_2_3),
        _variant(loop_2, "loop-2-nci-2-c-3", "Loop-2, no coda injection, 2/C/3",
                 "the same with norm before the coda, as the paper's authors ran it",
                 coda_boundary="norm", allocation=fixed_2_3),
        _variant(operator_1, "operator-1-1-c-2", "Operator-1, 1/C/2", core_only, allocation=fixed_1_2),
        _variant(vanilla, "deeper-vanilla", "Deeper Vanilla", doubled,
                 allocation=replace(deeper, unsplit=True)),
        _variant(operator_1, "deeper-operator-1", "Deeper Operator-1", doubled, allocation=deeper),
        *(_width_only(arm, 11) if arm.passes == ONE else _width_only(arm, 8) for arm in main[:5]),
        family_arm("tied-vanilla", 2),
        family_arm("untied-vanilla", 2),
        _variant(loop_grow, "random-loop-grow", "Random Loop-Grow",
                 "after growth K is drawn from 2..6 at every step",
                 passes=StageSchedule.growing(2, 2, 3, 4, 5, 6)),
    ]  # fmt: skip
    return {arm.name: arm for arm in rows}


ARMS: dict[str, Arm] = _build()
MAIN_ARMS = tuple(list(ARMS)[:8])

# The paper's names of ablations and those of its authors' tables, where they are not ours.
PAPER_NAMES: dict[str, str] = {
    "Deep Vanilla + norm": "untied-2-norm-only",
    "Deep Vanilla + injection": "untied-2-inject-only",
    "Untied-2-no-injection": "untied-2-norm-only",
    "Untied-2-no-norm": "untied-2-inject-only",
    "Loop-2-no-injection": "loop-2-norm-only",
    "Loop-2-no-norm": "loop-2-inject-only",
    "Loop-2-no-coda-inj": "loop-2-no-coda-injection",
    "Untied-2-no-coda-inj": "untied-2-no-coda-injection",
    "Loop-2 NCI": "loop-2-no-coda-injection",
    "Untied-2 NCI": "untied-2-no-coda-injection",
    "Loop-2 2C3": "loop-2-2-c-3",
    "Loop-2-no-coda-inj 2/C/3": "loop-2-nci-2-c-3",
    "Loop-2-no-coda-injection-2C3": "loop-2-nci-2-c-3",
    "Loop-2-no-coda-injection 2/C/3": "loop-2-nci-2-c-3",
    "Operator-1 1C2": "operator-1-1-c-2",
    "Vanilla width-only": "width-only-vanilla",
    "Deep Vanilla width-only": "width-only-deep-vanilla",
    "Operator-1 width-only": "width-only-operator-1",
    "Loop-2 width-only": "width-only-loop-2",
    "Untied-2 width-only": "width-only-untied-2",
    "Random recurrence": "random-loop-grow",
    "Loop-Grow random": "random-loop-grow",
}


def arm_key(name: str) -> str:
    """A name in the form the table is keyed by: Deep Vanilla + norm → deep-vanilla-norm."""
    return re.sub(r"[-_/ +,]+", "-", name.strip().lower()).strip("-")


_ALIASES = {arm_key(name): arm for name, arm in PAPER_NAMES.items()}


def find_arm(name: str | Arm | type) -> Arm:
    """Find an arm: a row of the table, one of the paper's names, a family with its K (loop-3), each also with
    options of its block (vanilla+kv_heads=4) and stages of growth (vanilla+width=0.5-1@0.4);
    "module:attribute", an Arm itself, or the class of a block, which makes a vanilla arm of that block.
    """
    if isinstance(name, Arm):
        return _with_own_title(name)
    if isinstance(name, type):
        return _from_block(name)
    if "=" in name.partition("+")[2]:
        return _with_options(name)
    if ":" in name:
        return _from_module(name)
    key = arm_key(name)
    if key in ARMS or key in _ALIASES:
        return ARMS[_ALIASES.get(key, key)]
    family, _, count = key.rpartition("-")
    if key in _FAMILIES:  # K defaults to 2
        return family_arm(key, 2)
    if family in _FAMILIES and re.fullmatch(r"[1-9]\d{0,8}", count):
        return family_arm(family, int(count))
    choices = [*ARMS, *_ALIASES, *(f"{family}-K" for family in _FAMILIES)]
    raise UsageError(
        f"there is no arm {shorten(name)!r}; the nearest are {nearest(key, choices)} "
        "(`steepen arms` lists all)."
    )


def paper_names(arm: str) -> list[str]:
    """Other names of an arm of the table, as the paper and its authors' tables write them."""
    return [name for name, own in PAPER_NAMES.items() if own == arm]


def _with_options(name: str) -> Arm:
    """An arm with options of its block and stages of growth: operator-1+kv_heads=4+blocks=1-all@0.3."""
    base, *settings = (part.strip() for part in name.split("+"))
    arm, (growth, options) = find_arm(base), _split(settings)
    passes = parse_growth(arm.passes, growth) if growth else arm.passes
    name = "+".join([arm.name, *settings])
    title = ", ".join([arm.title, *(setting.replace("_", " ").replace("=", " ") for setting in settings)])
    return replace(arm, name=name, title=title, passes=passes, block_options=parse_block_options(options))


def _split(settings: list[str]) -> tuple[list[str], list[str]]:
    """Settings of growth, and options of the block; the last number of experts is an option of the arm's."""
    growth, options = list[str](), list[str]()
    for setting in settings:
        axis, _, sizes = setting.partition("=")
        if axis not in (*AXES, *CHOICES) or (axis == "experts" and "-" not in sizes):
            options.append(setting)
        elif last := re.fullmatch(r"(experts=.*-)(\d+)(@.*)?", setting):
            growth.append(f"{last[1]}all{last[3] or ''}")
            options.append(f"experts={last[2]}")
        else:
            growth.append(setting)
    return growth, options


def without_growth(name: str) -> str:
    """The name of an arm without its settings of growth: vanilla+experts=1-8@0.5 → vanilla+experts=8."""
    base, *settings = name.split("+")
    return "+".join([base, *_split(settings)[1]])


def _from_module(path: str) -> Arm:
    arm = import_object(path, "arm", values=Arm)
    if isinstance(arm, type):
        return _from_block(arm)
    if not isinstance(arm, Arm):
        raise UsageError(f"{path!r} is a {type(arm).__name__}, not a steepen.model.arm.Arm.")
    trust_code(arm.custom_code)
    return _with_own_title(arm)


def _with_own_title(arm: Arm) -> Arm:
    """The arm; titled by its own name if it was made from one of the table and kept its title."""
    borrowed = any(known.title == arm.title and known.name != arm.name for known in ARMS.values())
    return replace(arm, title=arm.name) if borrowed else arm


def _from_block(block: type) -> Arm:
    """Vanilla with a custom block; SquaredRelu becomes the arm squared-relu."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", block.__name__).lower().replace("_", "-")
    about = (block.__doc__ or "").strip().partition("\n")[0]
    return replace(ARMS["vanilla"], name=name, title=name, block=block, about=about)
