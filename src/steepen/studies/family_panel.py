"""The family of architectures as a panel: the blocks that each arm executes, in order."""

from __future__ import annotations

from collections.abc import Sequence

from steepen.model.arm import Arm
from steepen.studies.answer import Axis, Panel, Series


def family_panel(arms: Sequence[Arm], depth: int = 8) -> Panel:
    """One row for each arm: prelude, every pass of the core, and coda; crosses are boundary operators.

    A colour stands for stored weights: passes that share a core have its colour. Growing arms show the passes
    they end with; those that growth adds are hollow.
    """
    places: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    operators: list[tuple[float, float]] = []
    for row, arm in enumerate(arms):
        blocks = arm.shape(depth).allocation
        x = 0.0

        def add(stage: str, count: int, solid: bool = True, row: int = row) -> None:
            nonlocal x
            places.setdefault((stage, solid), []).extend((x + i + 1, float(row)) for i in range(count))
            x += count

        add("prelude", blocks.prelude)
        for number in range(1, arm.passes.final + 1 if blocks.core else 1):
            if number > 1 and arm.core_boundary != "identity":
                operators.append((x + 0.5, float(row)))
            add(f"core {1 if arm.tied else number}", blocks.core, number <= arm.passes.initial)
        if arm.coda_boundary != "identity":
            operators.append((x + 0.5, float(row)))
        add("coda", blocks.coda)
    series: list[Series] = []
    order = {"prelude": 0, "coda": 2}
    stages = sorted({stage for stage, _ in places}, key=lambda name: (order.get(name, 1), name))
    for stage in stages:
        for solid in (True, False):
            own = places.get((stage, solid), [])
            if own:
                xs, ys = tuple(p[0] for p in own), tuple(p[1] for p in own)
                note = "" if solid else "added by growth"
                series.append(Series(stage, "points", xs, ys, marker="block", filled=solid, note=note))
    if operators:
        xs, ys = tuple(p[0] for p in operators), tuple(p[1] for p in operators)
        series.append(Series("boundary operator", "points", xs, ys, marker="cross"))
    return Panel(
        f"Blocks executed at d{depth}",
        Axis("executed block"),
        Axis("", names=tuple(arm.title for arm in arms), reverse=True),
        tuple(series),
        caption="Left to right: prelude, core passes, coda. Passes of one colour share their weights.",
    )
