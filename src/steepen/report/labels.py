"""Label placement: at the ends of curves without overlap, or beside points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from steepen.report.colours import Colour
from steepen.report.groups import Curve

Box = tuple[float, float, float, float]
TextAnchor = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Label:
    """A text, its middle height, and the thin line that leads to what it names."""

    text: str
    colour: Colour
    x: float
    y: float
    anchor: TextAnchor = "start"
    leader: tuple[tuple[float, float], tuple[float, float]] | None = None


def spread_apart(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Positions nearest to the wanted ones (in rising order) that keep their distance, inside low to high.

    Subtracting i·gap reduces it to isotonic regression, solved by pooling adjacent violators.
    """
    pools: list[tuple[float, int]] = []
    for i, value in enumerate(wanted):
        pools.append((value - i * gap, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [((a * n + b * m) / (n + m), n + m)]
    level = [mean for mean, count in pools for _ in range(count)]
    ceiling = max(low, high - (len(wanted) - 1) * gap)
    return [min(max(value, low), ceiling) + i * gap for i, value in enumerate(level)]


def labels_at_curve_ends(
    ends: list[tuple[Curve, tuple[float, float]]], box: Box, font: float, width: float, character_width: float
) -> list[Label]:
    """Labels right of the box, each with a leader line to the end of its curve."""
    _, top, right, bottom = box
    ends = sorted(ends, key=lambda end: (end[1][1], end[0].label))
    heights = spread_apart([y for _, (_, y) in ends], 1.2 * font, top + 0.4 * font, bottom - 0.2 * font)
    x = right + 1.3 * font
    labels: list[Label] = []
    for (curve, (from_x, from_y)), y in zip(ends, heights, strict=True):
        start = (min(from_x + 0.45 * font, right), from_y)
        text = truncate(curve.label, width, character_width * font)
        labels.append(Label(text, curve.colour, x, y, leader=(start, (x - 0.3 * font, y))))
    return labels


def labels_beside_points(
    points: list[tuple[Curve, tuple[float, float]]],
    taken: list[tuple[float, float]],
    box: Box,
    font: float,
    character_width: float,
) -> list[Label]:
    """Labels beside single points, on the side where they cover least."""
    left, top, right, bottom = box
    away = 0.8 * font
    near = 0.35 * font
    boxes = [(x - near, y - near, x + near, y + near) for x, y in taken]
    labels: list[Label] = []
    for curve, (x, y) in points:
        wide = character_width * font * len(curve.label)
        places: list[tuple[float, float, TextAnchor, float]] = [
            (x + away, y, "start", x + away),
            (x - away, y, "end", x - away - wide),
            (x + away, y - away, "start", x + away),
            (x + away, y + away, "start", x + away),
            (x, y - 1.3 * away, "middle", x - wide / 2),
            (x, y + 1.5 * away, "middle", x - wide / 2),
            (x - away, y - away, "end", x - away - wide),
            (x - away, y + away, "end", x - away - wide),
            (x + 2 * away, y, "start", x + 2 * away),
            (x - 2 * away, y, "end", x - 2 * away - wide),
            (x + 0.6 * away, y - 1.2 * away, "start", x + 0.6 * away),
            (x - 0.6 * away, y - 1.2 * away, "end", x - 0.6 * away - wide),
            (x + 0.6 * away, y + 1.2 * away, "start", x + 0.6 * away),
            (x - 0.6 * away, y + 1.2 * away, "end", x - 0.6 * away - wide),
            (x + 3 * away, y, "start", x + 3 * away),
            (x - 3 * away, y, "end", x - 3 * away - wide),
        ]

        def cost(place: tuple[float, float, TextAnchor, float], wide: float = wide) -> float:
            _, py, _, start = place
            own = (start, py - 0.55 * font, start + wide, py + 0.55 * font)
            outside = (
                max(0, left - own[0])
                + max(0, own[2] - right)
                + max(0, top - own[1])
                + max(0, own[3] - bottom)
            )
            return sum(_overlap(own, other) for other in boxes) + 2 * font * outside

        px, py, anchor, start = min(places, key=cost)
        boxes.append((start, py - 0.55 * font, start + wide, py + 0.55 * font))
        labels.append(Label(curve.label, curve.colour, px, py, anchor))
    return labels


def _overlap(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def truncate(text: str, width: float, character_width: float) -> str:
    """The text, cut with an ellipsis where it is wider than its space."""
    count = max(4, int(width / character_width))
    return text if len(text) <= count + 1 else text[: count - 1].rstrip() + "…"
