"""What belongs together in a panel: series of one arm, or of one level, share a colour and one label."""

from __future__ import annotations

import re
from dataclasses import dataclass

from steepen.report.colours import NEUTRAL, Colour, anonymous_colour, arm_colour, arm_key, level_colour
from steepen.studies.answer import Panel, Series
from steepen.utils.formatting import format_value, pretty_exponents


@dataclass(frozen=True)
class Curve:
    """Series that share a colour; `named` where the label must stand in the picture."""

    label: str
    colour: Colour
    series: tuple[Series, ...]
    named: bool = True


@dataclass(frozen=True)
class LegendEntry:
    """A line of the key: what a kind of line or marker means, in any colour."""

    text: str
    series: Series  # whose kind, style, marker and filling the glyph shows
    colour: Colour = NEUTRAL


def curves_of(panel: Panel, titles: dict[str, str]) -> list[Curve]:
    """The groups of a panel, in the order of first appearance; levels in the order of their values."""
    rivals = _rivals(panel)
    buckets: dict[tuple[str | None, float | None, str], list[Series]] = {}
    for series in panel.series:
        arm = None if series.arm is None else arm_key(series.arm)
        own = series.label if arm is None and series.level is None else ""
        if arm in rivals and series.level is None:
            own = _head(series.label, rivals[arm])
        buckets.setdefault((arm, series.level, own), []).append(series)
    levels = sorted({level for _, level, _ in buckets if level is not None})
    # Points, the line through them and its band share a colour; a second line takes the next.
    anonymous_kinds: dict[str, int] = {}
    short = {
        key: pretty_exponents(min((s.label for s in bucket), key=len)) for key, bucket in buckets.items()
    }
    groups: list[Curve] = []
    for key, bucket in buckets.items():
        arm, level, own = key
        if level is not None:
            share = levels.index(level) / max(1, len(levels) - 1)
            colour = level_colour(share, arm)
            ambiguous = list(short.values()).count(short[key]) > 1
            label = format_value(level) if ambiguous else short[key]
            if ambiguous and arm is not None:
                label = f"{title_of(arm, titles)}, {label}"
        elif arm is not None and own:
            heads = rivals[arm]
            share = 1 - heads.index(own) / len(heads)
            title = title_of(arm, titles)
            colour, label = level_colour(share, arm), pretty_exponents(_without(arm, own, title))
        elif arm is not None:
            colour, label = arm_colour(arm), title_of(arm, titles)
        else:
            kind = bucket[0].kind
            colour, label = anonymous_colour(anonymous_kinds.get(kind, 0)), own
            anonymous_kinds[kind] = anonymous_kinds.get(kind, 0) + 1
        groups.append(Curve(label, colour, tuple(bucket), named=level is not None or arm is not None))
    return groups


def _rivals(panel: Panel) -> dict[str, list[str]]:
    """Arms with several ladders in one panel (two recipes, two optimizers), and those ladders' labels.

    Points of one arm that look alike but are labelled differently can only be different ladders.
    """
    heads: dict[tuple[str, str, bool], list[str]] = {}
    for series in panel.series:
        if series.arm is not None and series.level is None and series.kind == "points":
            look = (arm_key(series.arm), series.marker, series.filled)
            if series.label not in heads.setdefault(look, []):
                heads[look].append(series.label)
    return {arm: labels for (arm, _, _), labels in heads.items() if len(labels) > 1}


def _head(label: str, heads: list[str]) -> str:
    """The ladder a series belongs to: the longest whose label it contains, or the first."""
    return max((head for head in heads if head in label), key=len, default=heads[0])


def title_of(arm: str, titles: dict[str, str]) -> str:
    """An arm's name as people read it."""
    return titles.get(arm_key(arm), arm)


def remainder(series: Series, group: Curve) -> str:
    """What a series' label says beyond its group's: "fit" of "Vanilla fit"."""
    names = [group.label, *([series.arm] if series.arm else [])]
    text = pretty_exponents(series.label)
    for name in names:
        text = _without(name, text)
    text = text.strip(" ,:;·–-")
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return text or ("extrapolated" if series.kind == "line" and series.style == "dashed" else "")


def _without(name: str, text: str, instead: str = "") -> str:
    """The text with a name in it replaced, however it is capitalised."""
    return re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", lambda _: instead, text, flags=re.IGNORECASE)


def legend_entries(groups: list[Curve]) -> list[LegendEntry]:
    """What the kinds of lines and markers mean. Words only one of many groups has are left to the hover."""
    found: dict[tuple[object, ...], list[tuple[Series, Curve, str]]] = {}
    for group in groups:
        for series in group.series:
            text = remainder(series, group) if group.named else pretty_exponents(series.label)
            if text:
                glyph = (text, series.kind, series.style, series.filled, series.marker)
                owner = "" if group.named else group.label
                found.setdefault((*glyph, owner), []).append((series, group, text))
    # "γ = 0.1559" belongs to one curve, even where two happen to agree.
    lonely = [
        key
        for key, uses in found.items()
        if uses[0][1].named and (len(uses) == 1 or re.search(r"=.*\d", uses[0][2]))
    ]
    if len(lonely) > 3 and sum(group.named for group in groups) > 2:
        found = {key: uses for key, uses in found.items() if key not in lonely}
    entries: list[LegendEntry] = []
    for uses in found.values():
        series, group, text = uses[0]
        if not series.filled and any(other is not uses and other[0][2] == text for other in found.values()):
            text += " (censored)"  # a hollow twin of a filled marker: an optimum that is only a bound
        one_colour = len({use[1].label for use in uses}) == 1
        entries.append(LegendEntry(text, series, group.colour if one_colour else NEUTRAL))
    return entries[:8]
