"""The family of architectures as a panel: the blocks that each arm executes, in order."""

from __future__ import annotations

from collections.abc import Sequence

from steepen.model.arm import Arm
from steepen.studies.answer import Axis, Panel, Series

STAGES = ("prelude", "core, first pass", "core, own weights", "core, shared weights", "coda")


def family_panel(arms: Sequence[Arm], depth: int = 8) -> Panel:
    """One row for each arm: prelude, every pass of the core, and coda; crosses are boundary operators.

    Growing arms show the passes they end with; those that growth adds are hollow.
    """
    places: dict[str, list[tuple[float, float, bool]]] = {stage: [] for stage in STAGES}
    operators: list[tuple[float, float]] = []
    for row, arm in enumerate(arms):
        blocks = arm.shape(depth).allocation
        x = 0.0

        def add(stage: str, count: int, solid: bool = True, row: int = row) -> None:
            nonlocal x
            places[stage] += [(x + i + 1, float(row), solid) for i in range(count)]
            x += count

        add("prelude", blocks.prelude)
        for number in range(1, arm.passes.final + 1 if blocks.core else 1):
            if number > 1 and arm.core_boundary != "identity":
                operators.append((x + 0.5, float(row)))
            stage = "core, first pass" if number == 1 else STAGES[3 if arm.tied else 2]
            add(stage, blocks.core, number <= arm.passes.initial)
        if arm.coda_boundary != "identity":
            operators.append((x + 0.5, float(row)))
        add("coda", blocks.coda)
    series: list[Series] = []
    for stage, found in places.items():
        for solid in (True, False):
            own = [(x, y) for x, y, filled in found if filled == solid]
            if own:
                xs, ys = tuple(p[0] for p in own), tuple(p[1] for p in own)
                label = stage if solid else f"{stage}, after growth"
                series.append(Series(label, "points", xs, ys, marker="square", filled=solid))
    if operators:
        xs, ys = tuple(p[0] for p in operators), tuple(p[1] for p in operators)
        series.append(Series("boundary operator", "points", xs, ys, marker="cross"))
    return Panel(
        f"Blocks executed at d{depth}",
        Axis("executed block"),
        Axis("", names=tuple(arm.title for arm in arms), reverse=True),
        tuple(series),
        caption="Left to right: prelude, core passes, coda.",
    )
