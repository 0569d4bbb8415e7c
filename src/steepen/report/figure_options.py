"""How a result's figure is drawn: which panels, its size, and the names, colours and order of its arms."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias

from steepen.errors import UsageError, nearest
from steepen.results.panel import Panel, Series
from steepen.utils.codec import option
from steepen.utils.values import Pairs, Text, Words, from_text


def parse_size(text: str) -> tuple[float, float]:
    """Width and height in inches of a text such as 7x2.5."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*[x×]\s*(\d+(?:\.\d+)?)", text.strip())
    if match is None or not all(0.5 <= float(side) <= 100 for side in match.groups()):
        raise ValueError
    return float(match[1]), float(match[2])


Size: TypeAlias = Annotated[tuple[float, float], Text(parse_size, "inches like 7x2.5", "<size>")]


@dataclass(frozen=True)
class FigureOptions:
    """Choices for a figure; each is an option of the command (`--figure-size`) and of `save_figure`."""

    panels: Words = option("Panels to draw, by number or by a word of their title: 1,multiplier.", ())
    size: Size | None = option("Width and height in inches: 7x2.5.")
    labels: Pairs | None = option(
        "Names to show: base=Transformer,moe_8x=MoE. Default: as the table has them."
    )
    colours: Pairs | None = option("Colours of arms: base=#000000,moe_8x=#d55e00.")
    order: Words = option("Order of the arms in the legend; others follow.", ())

    @property
    def titles(self) -> dict[str, str]:
        """The labels, by the names of arms as they are and as they are compared."""
        from steepen.report.colours import arm_key

        labels = self.labels or {}
        return labels | {arm_key(name): label for name, label in labels.items()}

    def apply(self, panels: Sequence[Panel]) -> list[Panel]:
        """The chosen panels; every arm has one colour and one marker in all of them."""
        from steepen.report.colours import arm_key, arm_styles, own_colour
        from steepen.report.curves import styled_panel

        arms = list(dict.fromkeys(one.arm for panel in panels for one in panel.series if one.arm))
        self._require_known(arms)
        ordered = [*self.order, *(arm for arm in arms if arm not in self.order)]
        chosen = {arm: own_colour(text) for arm, text in (self.colours or {}).items()}
        styles = {arm_key(arm): style for arm, style in arm_styles(ordered, chosen).items()}

        def place(series: Series) -> int:
            return ordered.index(series.arm) if series.arm else len(ordered)

        return [
            styled_panel(replace(panel, series=tuple(sorted(panel.series, key=place))), styles)
            for panel in self.chosen(panels)
        ]

    def _require_known(self, arms: Sequence[str]) -> None:
        for name, given in (("labels", self.labels), ("colours", self.colours), ("order", self.order)):
            unknown = next((arm for arm in given or () if arm not in arms), None)
            if unknown is not None:
                raise UsageError(
                    f"the figure's {name} name {unknown!r}, which is no arm; did you mean "
                    f"{nearest(unknown, arms)}?"
                )

    def chosen(self, panels: Sequence[Panel]) -> list[Panel]:
        """The panels by number or by a word of their title; all of them where none is named."""
        if not self.panels:
            return list(panels)
        found: list[Panel] = []
        for word in self.panels:
            place = int(word) - 1 if word.isdecimal() else -1
            own = [p for i, p in enumerate(panels) if i == place or word.casefold() in p.title.casefold()]
            if not own:
                titles = "; ".join(f"{i}: {panel.title}" for i, panel in enumerate(panels, start=1))
                raise UsageError(f"the figure has no panel {word!r}; its panels are {titles}.")
            found.append(own[0])
        return found


def figure_options(given: Mapping[str, object]) -> FigureOptions:
    """Options from keywords of `save_figure`, or from the text of a command."""
    hints = typing.get_type_hints(FigureOptions, include_extras=True)
    unknown = next((name for name in given if name not in hints), None)
    if unknown is not None:
        raise UsageError(f"a figure has no option {unknown!r}; the nearest are {nearest(unknown, hints)}.")
    values: dict[str, object] = {}
    for name, value in given.items():
        try:
            values[name] = from_text(hints[name], value) if isinstance(value, str) else value
        except ValueError as error:
            raise UsageError(f"the figure's {name} {value!r} is not valid: it must be {error}.") from None
    return FigureOptions(**values)  # pyright: ignore[reportArgumentType]
