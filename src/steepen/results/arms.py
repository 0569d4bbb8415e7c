"""What `arms` and `best-passes` return: the arms with their sizes, and the best core passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from steepen.errors import UsageError
from steepen.results.panel import Axis, Panel, Series
from steepen.results.result import Result
from steepen.results.table import Column, Table, columns_of, table_of
from steepen.results.text import Block, Paragraph
from steepen.utils.formatting import format_change, format_passes

if TYPE_CHECKING:
    from steepen.model.arm import Arm
    from steepen.recipe.passes_law import BestPasses

WIDE = 110  # terminal columns from which parameter counts are shown too


def _stages(stages: list[list[int]]) -> str:
    return " → ".join(map(format_passes, stages))


@dataclass(frozen=True)
class ArmRow:
    """An arm at a depth."""

    arm: str
    title: Annotated[str, Column(shown=False)]
    other_names: Annotated[list[str], Column(shown=False)]
    about: Annotated[str, Column("what it is")]
    core_boundary: Annotated[str, Column(shown=False)]
    coda_boundary: Annotated[str, Column(shown=False)]
    tied: Annotated[bool, Column(shown=False)]
    passes: Annotated[list[list[int]], Column(format=_stages, align="right")]
    allocation: Annotated[str, Column("blocks", align="right")]
    width: Annotated[int, Column(shown=False)]
    initial_executed_depth: Annotated[int, Column(shown=False)]
    executed_depth: Annotated[int, Column("executed")]
    initial_stored_parameters: Annotated[int, Column(shown=False)]
    stored_parameters: Annotated[int, Column("stored")]
    compute_active_parameters: Annotated[int, Column("compute-active")]
    recipe: Annotated[str, Column(shown=False)]


@dataclass(frozen=True, eq=False, repr=False)
class ArmsResult(Result):
    """The arms at a depth; `found["untied-2"]` is one of them."""

    depth: int
    arms: tuple[Arm, ...]

    def __iter__(self) -> Iterator[Arm]:
        """The arms, in the order of the table."""
        return iter(self.arms)

    def __len__(self) -> int:
        return len(self.arms)

    def __getitem__(self, name: str) -> Arm:
        """An arm by name; any that a run accepts."""
        from steepen.model.arms import find_arm

        return find_arm(name)

    def headline(self) -> str:
        """How many arms there are."""
        return f"{len(self.arms)} arms at depth {self.depth}"

    @property
    def rows(self) -> list[ArmRow]:
        """The arms that exist at the depth; a fixed allocation such as 2/C/3 needs a minimum."""
        return [row for arm in self.arms if (row := _arm_row(arm, self.depth)) is not None]

    def to_dict(self) -> dict[str, Any]:
        """The depth and the rows."""
        return {"depth": self.depth, "arms": self.to_rows()}

    def panels(self) -> list[Panel]:
        """The blocks that the main arms execute."""
        from steepen.model.arms import ARMS, MAIN_ARMS

        return [family_panel([ARMS[name] for name in MAIN_ARMS], self.depth)]

    def blocks(self, width: int) -> Iterable[Block]:
        """The arms, with parameter counts where the terminal has room: descriptions would be cut."""
        own = columns_of(ArmRow)
        columns = [
            own["arm"],
            Column("what it is", value=lambda row: "; also ".join([row.about, *row.other_names[:1]])),
            own["passes"],
            own["allocation"],
            Column(
                "executed",
                value=lambda row: format_change(row.initial_executed_depth, row.executed_depth),
                align="right",
            ),
        ]
        if width >= WIDE:
            stored = ("initial_stored_parameters", "stored_parameters")
            columns += [
                Column(
                    "stored",
                    value=lambda row: format_change(*(_size(getattr(row, name)) for name in stored)),
                    align="right",
                ),
                Column(
                    "compute-active", value=lambda row: _size(row.compute_active_parameters), align="right"
                ),
            ]
        title = f"Arms at d{self.depth} (width {128 * self.depth}); blocks: prelude/core/coda"
        yield table_of(self.rows, columns, title)
        if width < WIDE:
            yield Paragraph(f"Parameter counts: widen the terminal to {WIDE} columns, or use --json.")


def _arm_row(arm: Arm, depth: int) -> ArmRow | None:
    from steepen.model.arms import paper_names
    from steepen.recipe.flops import compute_active_parameters, stored_parameters

    try:
        shape = arm.shape(depth)
    except UsageError:
        return None
    first, last = arm.passes.initial, arm.passes.final
    return ArmRow(
        arm.name, arm.title, paper_names(arm.name), arm.about, arm.core_boundary, arm.coda_boundary, arm.tied,
        [list(stage.passes) for stage in arm.passes.stages], str(shape.allocation), shape.width,
        shape.allocation.executed(first), shape.allocation.executed(last),
        stored_parameters(arm, shape, first), stored_parameters(arm, shape, arm.passes.max_passes),
        compute_active_parameters(arm, shape, last), arm.recipe,
    )  # fmt: skip


def _size(value: int) -> str:
    return f"{value / 1e9:.2f}B" if value >= 1e9 else f"{value / 1e6:.1f}M"


@dataclass(frozen=True, eq=False, repr=False)
class BestPassesResult(Result):
    """K*, its expansion and tokens per parameter: one row for each family and compute."""

    rows: Sequence[BestPasses] = ()  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]

    def __iter__(self) -> Iterator[BestPasses]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> BestPasses:
        return self.rows[index]

    def headline(self) -> str:
        """The size."""
        return f"best core passes at depth {self.rows[0].depth}" if self.rows else "no tokens per parameter"

    def to_dict(self) -> list[dict[str, Any]]:
        """The rows."""
        return self.to_rows()

    def table(self, caption: str = "") -> Table:
        """The rows as people read them."""
        columns = [
            Column("family", value=lambda row: "tied" if row.tied else "untied"),
            Column("TPP at K = 1", "g", value=lambda row: row.tpp),
            Column("expansion", ".3f", value=lambda row: row.expansion),
            Column("K*", ".2f", value=lambda row: row.passes),
            Column("TPP at K*", ".2f", value=lambda row: row.tpp_at_best),
            Column("tokens", ".3g", value=lambda row: row.tokens),
        ]
        return table_of(self.rows, columns, caption=caption)


def family_panel(arms: Sequence[Arm], depth: int = 8) -> Panel:
    """One row for each arm: prelude, every pass of the core, and coda; crosses are boundary operators.

    A colour stands for stored weights: passes that share a core have its colour. Growing arms show the passes
    they end with; those that growth adds are hollow.
    """
    places: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    operators: list[tuple[float, float]] = []
    for row, arm in enumerate(arms):
        blocks, x = arm.shape(depth).allocation, 0.0
        passes = range(1, arm.passes.final + 1) if blocks.core else ()
        between = arm.core_boundary != "identity"
        stages = [  # name, blocks, whether they are there from the start, whether an operator comes before
            ("prelude", blocks.prelude, True, False),
            *((f"core {1 if arm.tied else number}", blocks.core, number <= arm.passes.initial,
               between and number > 1) for number in passes),
            ("coda", blocks.coda, True, arm.coda_boundary != "identity"),
        ]  # fmt: skip
        for stage, count, solid, operator in stages:
            if operator:
                operators.append((x + 0.5, float(row)))
            if count:
                places.setdefault((stage, solid), []).extend((x + i + 1, float(row)) for i in range(count))
            x += count
    series: list[Series] = []
    order = {"prelude": 0, "coda": 2}
    for stage, solid in sorted(places, key=lambda one: (order.get(one[0], 1), one[0], not one[1])):
        xs, ys = zip(*places[stage, solid], strict=True)
        note = "" if solid else "added by growth"
        series.append(Series(stage, "points", xs, ys, marker="block", filled=solid, note=note))
    if operators:
        xs, ys = zip(*operators, strict=True)
        series.append(Series("boundary operator", "points", xs, ys, marker="cross"))
    return Panel(
        f"Blocks executed at d{depth}",
        Axis("executed block"),
        Axis("", names=tuple(arm.title for arm in arms), reverse=True),
        tuple(series),
        caption="Left to right: prelude, core passes, coda. Passes of one colour share their weights.",
    )
