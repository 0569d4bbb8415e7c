"""Group a panel's series into curves, each with one colour and one label, and list the legend's entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steepen.report.colours import NEUTRAL, PALETTE, Colour, arm_colour, arm_key, level_colour
from steepen.studies.answer import Panel, Role, Series
from steepen.utils.formatting import format_value, pretty_exponents

MAX_LEGEND_ENTRIES = 8
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


@dataclass(frozen=True)
class Curve:
    """Series that share a colour. `named` curves are labelled in the picture, others in the legend."""

    label: str
    colour: Colour
    series: tuple[Series, ...]
    named: bool = True


@dataclass(frozen=True)
class LegendEntry:
    """What one kind of line or marker means."""

    text: str
    series: Series  # its kind, style, marker and filling are shown
    colour: Colour = NEUTRAL


def curves_of(panel: Panel, titles: dict[str, str]) -> list[Curve]:
    """The curves of a panel in order of first appearance. `titles` maps arm keys to display names."""
    buckets: dict[tuple[str | None, str, float | None, str], list[Series]] = {}
    variants: dict[str, list[str]] = {}  # the ladders of each arm
    for series in panel.series:
        arm = None if series.arm is None else arm_key(series.arm)
        name = series.label if arm is None or series.level is not None else ""
        key = (arm, series.variant, series.level, "" if series.level is not None else name)
        buckets.setdefault(key, []).append(series)
        if arm is not None and series.level is None and series.variant not in variants.setdefault(arm, []):
            variants[arm].append(series.variant)
    levels = sorted({level for _, _, level, _ in buckets if level is not None})
    labels = {key: pretty_exponents(bucket[0].label) for key, bucket in buckets.items()}
    # Points, the line through them and its band share a colour; a second line takes the next one.
    unnamed_by_kind: dict[str, int] = {}
    curves: list[Curve] = []
    for key, bucket in buckets.items():
        arm, variant, level, _ = key
        label = labels[key]
        if level is not None:
            # The only level of an arm has the arm's own colour, not the faintest shade of it.
            first = 1.0 if arm is not None and len(levels) == 1 else 0.0
            colour = level_colour(levels.index(level) / (len(levels) - 1) if len(levels) > 1 else first, arm)
            if list(labels.values()).count(label) > 1:
                prefix = "" if arm is None else f"{ladder_title(arm, variant, titles)}, "
                label = prefix + format_value(level)
        elif arm is not None:
            # The first ladder of an arm has the arm's own colour, further ones lighter shades of it.
            place, count = variants[arm].index(variant), len(variants[arm])
            colour = arm_colour(arm) if place == 0 else level_colour(1 - place / count, arm)
            label = ladder_title(arm, variant, titles)
        else:
            kind = bucket[0].kind
            colour = PALETTE[unnamed_by_kind.get(kind, 0) % len(PALETTE)]
            unnamed_by_kind[kind] = unnamed_by_kind.get(kind, 0) + 1
        curves.append(Curve(label, colour, tuple(bucket), named=level is not None or arm is not None))
    return curves


def ladder_title(arm: str, variant: str, titles: dict[str, str]) -> str:
    """An arm's display name, with the variant of its ladder in brackets."""
    title = titles.get(arm_key(arm), arm)
    return f"{title} ({variant})" if variant else title


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


def legend_entries(curves: Sequence[Curve]) -> list[LegendEntry]:
    """What the kinds of lines and markers mean; grey where several curves share a kind."""
    uses: dict[tuple[object, ...], list[tuple[Series, Curve]]] = {}
    for curve in curves:
        for series in curve.series:
            text = role_text(series)
            if not curve.named:
                text = ", ".join(filter(None, (curve_label(curve), series.note)))
            if text:
                owner = "" if curve.named else curve.label
                glyph = (series.kind, series.style, series.filled, series.marker)
                uses.setdefault((text, *glyph, owner), []).append((series, curve))
    entries: list[LegendEntry] = []
    for (text, *_), found in uses.items():
        series, curve = found[0]
        one_curve = len({other.label for _, other in found}) == 1
        entries.append(LegendEntry(str(text), series, curve.colour if one_curve else NEUTRAL))
    return entries[:MAX_LEGEND_ENTRIES]
