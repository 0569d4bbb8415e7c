"""The table of arms: the paper's eight and every ablation, one row each."""

from __future__ import annotations

import re
from dataclasses import replace

from steepen.errors import UsageError, nearest, shorten
from steepen.model.arm import AllocationRule, Arm, PassSchedule
from steepen.utils.imports import import_object, trust_code

NORM_AND_INJECT = "norm+inject"
UNSPLIT = AllocationRule(unsplit=True)


def _with_operator(
    name: str, title: str, passes: PassSchedule, *, tied: bool, recipe: str, about: str
) -> Arm:
    return Arm(
        name, title, NORM_AND_INJECT, NORM_AND_INJECT, tied=tied, passes=passes, recipe=recipe, about=about
    )


def _without_operator(
    name: str, title: str, passes: PassSchedule, *, tied: bool, recipe: str, about: str
) -> Arm:
    return Arm(name, title, tied=tied, passes=passes, recipe=recipe, about=about)


def loop(passes: int) -> Arm:
    """Loop-K: one core, applied K times, with the boundary operator."""
    about = f"one core applied {passes}×, boundary operator"
    recipe = "loop-2" if passes == 2 else "operator-1"  # the paper tunes K = 2; its sweeps use Operator-1's
    return _with_operator(
        f"loop-{passes}", f"Loop-{passes}", PassSchedule.fixed(passes), tied=True, recipe=recipe, about=about
    )


def untied(passes: int) -> Arm:
    """Untied-K: K separate cores, with the boundary operator."""
    about = f"{passes} untied cores, boundary operator"
    recipe = "untied-2" if passes == 2 else "operator-1"  # as in `loop`
    return _with_operator(
        f"untied-{passes}",
        f"Untied-{passes}",
        PassSchedule.fixed(passes),
        tied=False,
        recipe=recipe,
        about=about,
    )


def tied_vanilla(passes: int) -> Arm:
    """Tied Vanilla-K: a transformer that repeats its core, no boundary operator."""
    return _without_operator(
        f"tied-vanilla-{passes}",
        f"Tied Vanilla-{passes}",
        PassSchedule.fixed(passes),
        tied=True,
        recipe="vanilla",
        about=f"no operator, one core applied {passes}×",
    )


def untied_vanilla(passes: int) -> Arm:
    """Untied Vanilla-K: a deeper transformer with Vanilla's recipe unchanged."""
    return _without_operator(
        f"untied-vanilla-{passes}",
        f"Untied Vanilla-{passes}",
        PassSchedule.fixed(passes),
        tied=False,
        recipe="vanilla",
        about=f"no operator, {passes} untied cores, Vanilla's recipe",
    )


def _ablations(base: Arm) -> list[Arm]:
    """The three operator ablations of one arm (Table "Boundary-operator ablations…")."""
    rows = [
        ("norm-only", "norm only", "norm", "norm", "norm at the boundaries, no injection"),
        (
            "inject-only",
            "injection only",
            "inject",
            "inject",
            "injection at the boundaries, no norm",
        ),
        (
            "no-coda-injection",
            "no coda injection",
            NORM_AND_INJECT,
            "norm",
            "full operator in the core, norm before the coda",
        ),
    ]
    return [
        replace(
            base,
            name=f"{base.name}-{key}",
            title=f"{base.title}, {words}",
            core_boundary=core,
            coda_boundary=coda,
            about=about,
        )
        for key, words, core, coda, about in rows
    ]


def _width_only(base: Arm, blocks: int) -> Arm:
    """An arm whose blocks stay those of executed depth 11 while its width grows (Figure "Width-only…")."""
    return replace(
        base,
        name=f"width-only-{base.name}",
        title=f"{base.title}, width only",
        allocation=replace(base.allocation, blocks=blocks),
        about="executed depth 11 at every width",
    )


def _build() -> dict[str, Arm]:
    vanilla = replace(
        _without_operator(
            "vanilla",
            "Vanilla",
            PassSchedule.fixed(1),
            tied=True,
            recipe="vanilla",
            about="a standard transformer",
        ),
        allocation=UNSPLIT,
    )
    deep_vanilla = _without_operator(
        "deep-vanilla",
        "Deep Vanilla",
        PassSchedule.fixed(2),
        tied=False,
        recipe="deep-vanilla",
        about="Untied-2 without the operator: deeper, own recipe",
    )
    operator_1 = _with_operator(
        "operator-1",
        "Operator-1",
        PassSchedule.fixed(1),
        tied=True,
        recipe="operator-1",
        about="Vanilla's blocks with the boundary operator",
    )
    loop_2, untied_2 = loop(2), untied(2)
    grow = PassSchedule.growing(2, 4)
    loop_grow = _with_operator(
        "loop-grow",
        "Loop-Grow",
        grow,
        tied=True,
        recipe="loop-grow",
        about="Loop-2 whose passes double in mid-training",
    )
    untied_grow = _with_operator(
        "untied-grow",
        "Untied-Grow",
        grow,
        tied=False,
        recipe="untied-grow",
        about="Untied-2 whose cores are copied in mid-training",
    )
    deep_vanilla_grow = _without_operator(
        "deep-vanilla-grow",
        "Deep Vanilla Grow",
        grow,
        tied=False,
        recipe="deep-vanilla-grow",
        about="Deep Vanilla whose core blocks are copied in mid-training",
    )
    deeper = AllocationRule(per_depth=2)
    rows = [
        vanilla,
        deep_vanilla,
        operator_1,
        loop_2,
        untied_2,
        loop_grow,
        untied_grow,
        deep_vanilla_grow,
        *_ablations(loop_2),
        *_ablations(untied_2),
        replace(
            loop_2,
            name="loop-2-2-c-3",
            title="Loop-2, 2/C/3",
            allocation=AllocationRule(prelude=2, coda=3),
            about="only the core grows with depth",
        ),
        replace(
            loop_2,
            name="loop-2-nci-2-c-3",
            title="Loop-2, no coda injection, 2/C/3",
            coda_boundary="norm",
            allocation=AllocationRule(prelude=2, coda=3),
            about="the same with norm before the coda, as the paper's authors ran it",
        ),
        replace(
            operator_1,
            name="operator-1-1-c-2",
            title="Operator-1, 1/C/2",
            allocation=AllocationRule(prelude=1, coda=2),
            about="only the core grows with depth",
        ),
        replace(
            vanilla,
            name="deeper-vanilla",
            title="Deeper Vanilla",
            allocation=AllocationRule(per_depth=2, unsplit=True),
            about="twice the blocks at the same width (1:64)",
        ),
        replace(
            operator_1,
            name="deeper-operator-1",
            title="Deeper Operator-1",
            allocation=deeper,
            about="twice the blocks at the same width (1:64)",
        ),
        _width_only(vanilla, 11),
        _width_only(deep_vanilla, 8),
        _width_only(operator_1, 11),
        _width_only(loop_2, 8),
        _width_only(untied_2, 8),
        tied_vanilla(2),
        untied_vanilla(2),
        replace(
            loop_grow,
            name="random-loop-grow",
            title="Random Loop-Grow",
            passes=PassSchedule.growing(2, 2, 3, 4, 5, 6),
            about="after growth K is drawn from 2..6 at every step",
        ),
    ]
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
_FAMILIES = {"loop": loop, "untied": untied, "tied-vanilla": tied_vanilla, "untied-vanilla": untied_vanilla}


def find_arm(name: str | Arm | type) -> Arm:
    """Find an arm: a row of the table, one of the paper's names, a family with its K (loop-3),
    "module:attribute", an Arm itself, or the class of a block, which makes a vanilla arm of that block.
    """
    if isinstance(name, Arm):
        return _with_own_title(name)
    if isinstance(name, type):
        return _from_block(name)
    if ":" in name:
        return _from_module(name)
    key = arm_key(name)
    if key in ARMS or key in _ALIASES:
        return ARMS[_ALIASES.get(key, key)]
    family, _, count = key.rpartition("-")
    if key in _FAMILIES:  # K defaults to 2
        return _FAMILIES[key](2)
    if family in _FAMILIES and re.fullmatch(r"[1-9]\d{0,8}", count):
        return _FAMILIES[family](int(count))
    choices = [*ARMS, *_ALIASES, *(f"{family}-K" for family in _FAMILIES)]
    raise UsageError(
        f"there is no arm {shorten(name)!r}; the nearest are {nearest(key, choices)} "
        "(`steepen arms` lists all)."
    )


def paper_names(arm: str) -> list[str]:
    """Other names of an arm of the table, as the paper and its authors' tables write them."""
    return [name for name, own in PAPER_NAMES.items() if own == arm]


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
