"""Group a panel's series into curves, each with one colour and one label, and list the legend's entries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from steepen.report.colours import (
    EXTRA,
    NEUTRAL,
    PALETTE,
    ArmStyles,
    Colour,
    arm_colour,
    arm_key,
    level_colour,
)
from steepen.studies.answer import Panel, Role, Series
from steepen.utils.formatting import format_value, pretty_exponents
from steepen.utils.rows import grouped

T = TypeVar("T")
MAX_LEVELS = 9  # curves of one family in a legend; of more, evenly spaced ones
# The legend explains measurements and fits only where a series' note does.
ROLE_WORDS: dict[Role, str] = {
    "measured": "",
    "fit": "",
    "extrapolated": "extrapolated",
    "optimum": "optimum",
    "censored": "optimum (censored)",
    "held_out": "held out",
    "control": "control",
}
# A curve of one of these alone belongs to the curve before it, and has its colour.
DEPENDENT: tuple[Role, ...] = ("fit", "extrapolated", "censored")


class Key(NamedTuple):
    """What the series of one curve have in common."""

    arm: str | None
    variant: str
    family: str
    level: float | None
    label: str


@dataclass(frozen=True)
class Curve:
    """Series that share a colour and a label; `family` and `level` as theirs."""

    label: str
    colour: Colour
    series: tuple[Series, ...]
    family: str = ""
    level: float | None = None
    arm: str | None = None


@dataclass(frozen=True)
class LegendEntry:
    """What one kind of line or marker means."""

    text: str
    series: Series  # its kind, style, marker and filling are shown
    colour: Colour = NEUTRAL


def curves_of(panel: Panel, titles: dict[str, str]) -> list[Curve]:
    """The curves of a panel in order of first appearance. `titles` maps arm keys to display names."""
    buckets: dict[Key, list[Series]] = {}
    for series in panel.series:
        arm = None if series.arm is None else arm_key(series.arm)
        own_label = arm is None and series.level is None
        family = series.family if series.level is not None else ""
        key = Key(arm, series.variant, family, series.level, series.label if own_label else "")
        buckets.setdefault(key, []).append(series)
    labels = _labels(buckets, titles)
    colours = _colours(buckets)
    return [
        Curve(labels[key], colours[key], tuple(bucket), key.family, key.level, key.arm)
        for key, bucket in buckets.items()
    ]


def _labels(buckets: dict[Key, list[Series]], titles: dict[str, str]) -> dict[Key, str]:
    """A label for every curve; of equal ones the arm or the level is added."""
    found: dict[Key, str] = {}
    given = [text_with_titles(pretty_exponents(bucket[0].label), titles) for bucket in buckets.values()]
    for (key, bucket), label in zip(buckets.items(), given, strict=True):
        name = bucket[0].arm
        title = "" if name is None else ladder_title(name, key.variant, titles)
        found[key] = label
        if title and key.level is None:
            found[key] = title
        elif key.level is not None and given.count(label) > 1:
            found[key] = f"{title}, {label}" if title else f"{label} ({format_value(key.level)})"
    return found


def _colours(buckets: dict[Key, list[Series]]) -> dict[Key, Colour]:
    """Colours by arm, by place in a family, or in the order of the palette."""
    arms: dict[str, Colour] = {}
    for key, bucket in buckets.items():
        if key.arm is not None:
            chosen = bucket[0].colour
            arms[key.arm] = Colour(*chosen) if chosen else arms.get(key.arm) or arm_colour(key.arm)
    families = grouped((key for key in buckets if key.level is not None), lambda key: key.family)
    levels = {name: sorted({key.level or 0.0 for key in own}) for name, own in families.items()}
    ladders = grouped((key for key in buckets if key.level is None), lambda key: key.arm)
    variants = {
        arm: list(dict.fromkeys(key.variant for key in own))
        for arm, own in ladders.items()
        if arm is not None
    }
    # Colours that no arm of the figure has, for curves that are no arms and third ladders of an arm.
    taken = {arms[arm] for arm in variants}
    free = iter(colour for colour in (EXTRA if variants else PALETTE) if colour not in taken)
    by_variant: dict[tuple[str | None, str], Colour] = {}
    for arm, own in variants.items():
        others = [level_colour(0.45, arms[arm])] if len(own) == 2 else [next(free, NEUTRAL) for _ in own[1:]]
        by_variant |= {(arm, one): colour for one, colour in zip(own, (arms[arm], *others), strict=True)}
    found: dict[Key, Colour] = {}
    latest: Colour | None = None
    for key, bucket in buckets.items():
        chosen = bucket[0].colour
        if key.arm is None and chosen is not None:
            found[key] = Colour(*chosen)
        elif key.level is not None:
            place = _place(key.level, levels[key.family], alone=key.arm is not None)
            found[key] = level_colour(place, arms.get(key.arm or ""), list(levels).index(key.family))
        elif key.arm is not None:
            found[key] = by_variant[key.arm, key.variant]
        elif latest is not None and all(series.role in DEPENDENT for series in bucket):
            found[key] = latest
        else:
            found[key] = latest = next(free, NEUTRAL)
    return found


def _place(level: float, levels: list[float], *, alone: bool) -> float:
    """The place of a level among those of its family, from 0 to 1.

    The only level of an arm is 1: it has the arm's own colour, not the faintest shade of it.
    """
    return levels.index(level) / (len(levels) - 1) if len(levels) > 1 else float(alone)


def ladder_title(arm: str, variant: str, titles: dict[str, str]) -> str:
    """An arm's display name, with the variant of its ladder in brackets."""
    title = titles.get(arm_key(arm), arm)
    return f"{title} ({variant})" if variant else title


def text_with_titles(text: str, titles: dict[str, str]) -> str:
    """A text with the display names of arms in place of their names."""
    names = "|".join(re.escape(name) for name in sorted(titles, key=len, reverse=True))
    return re.sub(rf"(?<![\w-])(?:{names})(?![\w-])", lambda m: titles[m[0]], text) if names else text


def styled_panel(panel: Panel, styles: ArmStyles) -> Panel:
    """The panel with colours and markers of arms, by their keys, where a series has none of its own."""

    def styled(series: Series) -> Series:
        style = None if series.arm is None else styles.get(arm_key(series.arm))
        if style is None or series.colour is not None:
            return series
        colour, marker = style
        of_arm = series.level is None and not series.variant and series.role != "optimum"
        own = marker if of_arm and series.kind == "points" else series.marker
        return replace(series, colour=(colour.light, colour.dark), marker=own)

    return replace(panel, series=tuple(map(styled, panel.series)))


def panel_with_titles(panel: Panel, titles: dict[str, str]) -> Panel:
    """A panel whose title, axes and reference lines say the display names of arms."""
    return replace(
        panel,
        title=text_with_titles(panel.title, titles),
        group=text_with_titles(panel.group, titles),
        x=replace(panel.x, label=text_with_titles(panel.x.label, titles)),
        y=replace(panel.y, label=text_with_titles(panel.y.label, titles)),
        lines=tuple((way, value, text_with_titles(text, titles)) for way, value, text in panel.lines),
    )


def role_text(series: Series) -> str:
    """What a series is within its curve, in words: its note, or its role's word; "" where obvious."""
    if series.role == "censored" and series.note:
        return f"{series.note} (censored)"
    return series.note or ROLE_WORDS[series.role]


def series_name(series: Series, curve: Curve) -> str:
    """A series in the hover text: its curve, what it is, and its value."""
    return ", ".join(filter(None, (curve.label, role_text(series), series.detail)))


def curve_label(curve: Curve) -> str:
    """A curve in the legend: its name, and the value it has (its exponent) if there is exactly one."""
    details = list(dict.fromkeys(series.detail for series in curve.series if series.detail))
    return f"{curve.label}, {details[0]}" if len(details) == 1 else curve.label


def legend_curves(curves: Sequence[Curve]) -> list[Curve]:
    """The curves that a legend names; those of a family rise, and of many only some are named."""
    found: list[Curve] = []
    families = grouped(curves, lambda curve: (curve.arm, curve.family, curve.level is not None))
    for (_, _, levels), own in families.items():
        found += evenly(sorted(own, key=lambda curve: curve.level or 0.0), MAX_LEVELS) if levels else own
    return found


def evenly(items: Sequence[T], most: int) -> list[T]:
    """At most so many of some items, evenly spaced."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def legend_entries(curves: Sequence[Curve]) -> list[LegendEntry]:
    """What the kinds of lines and markers mean; grey where several curves share a kind."""
    uses: dict[tuple[object, ...], list[tuple[Series, Curve]]] = {}
    for curve in curves:
        labelled = curve.arm is None and curve.level is None
        for series in curve.series:
            text = role_text(series)
            # A curve with a label of its own says what it is, unless a part of it is something else.
            known = labelled and series.role == curve.series[0].role and not series.note
            if text and not known:
                marker = _kind_of_marker(series)
                glyph = (series.kind, series.style, series.filled, marker)
                uses.setdefault((text, *glyph), []).append((series, curve))
    entries: list[LegendEntry] = []
    for (text, *_), found in uses.items():
        series, curve = found[0]
        one_curve = len({id(other) for _, other in found}) == 1
        shown = series if one_curve else replace(series, marker=_kind_of_marker(series))
        entries.append(LegendEntry(str(text), shown, curve.colour if one_curve else NEUTRAL))
    return entries


def _kind_of_marker(series: Series) -> Any:
    """The marker that tells kinds of points apart: a chosen one is the arm's, but for stars (optima)."""
    return "circle" if series.colour and series.marker != "star" else series.marker


def main_series(series: Sequence[Series]) -> tuple[Series | None, Series | None]:
    """The line and the points that stand for a curve in a legend: solid and filled ones before others."""
    lines, dots = ([one for one in series if one.kind == kind] for kind in ("line", "points"))
    return (
        min(lines, key=lambda one: one.style != "solid", default=None),
        min(dots, key=lambda one: (one.marker == "star", not one.filled), default=None),
    )
