"""Colours of arms and curves, distinguishable under every common colour blindness.

Each colour has a light form (for print and light pages) and a dark form (for dark pages). The colours of the
eight main arms maximise the minimum distance over all pairs in normal and simulated protan, deutan and tritan
vision, within hues that have names, with a contrast of at least 3 to the background; tests measure it.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

LIGHT_BACKGROUND, DARK_BACKGROUND = "#ffffff", "#15181c"


@dataclass(frozen=True)
class Colour:
    """A colour for light and dark backgrounds; its `text` forms have the contrast of 4.5 that text needs."""

    light: str
    dark: str

    @property
    def light_text(self) -> str:
        """For text on a light background."""
        return _readable(self.light, LIGHT_BACKGROUND)

    @property
    def dark_text(self) -> str:
        """For text on a dark background."""
        return _readable(self.dark, DARK_BACKGROUND)


ARM_COLOURS: dict[str, Colour] = {
    "vanilla": Colour("#111111", "#f4f4f4"),
    "deep-vanilla": Colour("#8d8d8d", "#6e6e6e"),
    "operator-1": Colour("#da7a00", "#e7bd62"),
    "loop-2": Colour("#3193ce", "#67d6fc"),
    "untied-2": Colour("#a11482", "#b15aab"),
    "loop-grow": Colour("#29159f", "#0363db"),
    "untied-grow": Colour("#af2b00", "#e32a1a"),
    "deep-vanilla-grow": Colour("#055a3e", "#83bc8f"),
}
ARM_TITLES: dict[str, str] = {
    "vanilla": "Vanilla",
    "deep-vanilla": "Deep Vanilla",
    "operator-1": "Operator-1",
    "loop-2": "Loop-2",
    "untied-2": "Untied-2",
    "loop-grow": "Loop-Grow",
    "untied-grow": "Untied-Grow",
    "deep-vanilla-grow": "Deep Vanilla Grow",
}
NEUTRAL = Colour("#5b6168", "#9aa3ad")
_ANONYMOUS = ("vanilla", "loop-2", "operator-1", "untied-2", "deep-vanilla-grow", "loop-grow", "untied-grow")
# From dark to bright as in viridis, without its palest end, which is invisible on white.
_RAMP = ("#440154", "#443983", "#31688e", "#21918c", "#35b779", "#8fbc2b")
_DARK_RAMP = ("#7d5bbe", "#5f7fd0", "#3fa0c0", "#35b79a", "#7ad151", "#fde725")


def arm_key(name: str) -> str:
    """An arm's name in the one spelling colours go by: "Deep Vanilla" and deep_vanilla are deep-vanilla."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def arm_colour(name: str) -> Colour:
    """An arm's colour: fixed for the eight main arms, drawn from the name for any other."""
    key = arm_key(name)
    if key in ARM_COLOURS:
        return ARM_COLOURS[key]
    digest = hashlib.sha256(key.encode()).digest()
    hue = 360 * int.from_bytes(digest[:2]) / 65536
    shade = digest[2] % 3
    return Colour(_oklch((0.42, 0.53, 0.64)[shade], 0.11, hue), _oklch((0.62, 0.72, 0.82)[shade], 0.11, hue))


def level_colour(fraction: float, arm: str | None = None) -> Colour:
    """A shade within a family of curves, from its first (0) to its last (1); of the arm's colour if given."""
    if arm is None:
        return Colour(_along(_RAMP, fraction), _along(_DARK_RAMP, fraction))
    colour, faint = arm_colour(arm), 0.55 * (1 - fraction)
    return Colour(_mix(colour.light, LIGHT_BACKGROUND, faint), _mix(colour.dark, DARK_BACKGROUND, faint))


def anonymous_colour(index: int) -> Colour:
    """For series that belong to no arm and no level, by their place in the panel."""
    return ARM_COLOURS[_ANONYMOUS[index % len(_ANONYMOUS)]]


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours."""
    first, second = sorted((_luminance(one) + 0.05, _luminance(other) + 0.05))
    return second / first


def _readable(colour: str, background: str, minimum: float = 4.5) -> str:
    towards = "#000000" if _luminance(background) > 0.5 else "#ffffff"
    steps = (_mix(colour, towards, step / 50) for step in range(51))
    return next(shade for shade in steps if contrast(shade, background) >= minimum)


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _hex(channels: tuple[float, ...]) -> str:
    return "#" + "".join(f"{round(min(max(c, 0), 255)):02x}" for c in channels)


def _mix(one: str, other: str, fraction: float) -> str:
    pairs = zip(_channels(one), _channels(other), strict=True)
    return _hex(tuple(a + fraction * (b - a) for a, b in pairs))


def _along(ramp: tuple[str, ...], fraction: float) -> str:
    place = min(max(fraction, 0.0), 1.0) * (len(ramp) - 1)
    start = min(int(place), len(ramp) - 2)
    return _mix(ramp[start], ramp[start + 1], place - start)


def _luminance(colour: str) -> float:
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in _channels(colour))
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _oklch(lightness: float, chroma: float, hue: float) -> str:
    """Ottosson's OKLab, in which equal steps look equal; its matrices, and sRGB's transfer curve."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    clipped = (min(max(c, 0.0), 1.0) for c in linear)
    return _hex(
        tuple(255 * (12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055) for c in clipped)
    )
