"""Colours of arms and curves, distinguishable under every common colour blindness.

Each colour has a light form (for print and light pages) and a dark form (for dark pages). The colours of the
eight main arms maximize the minimum distance over all pairs in normal and simulated protan, deutan and tritan
vision, within nameable hues (red, blue, …), with a contrast of at least 3 to the background (tested).
"""

from __future__ import annotations

import colorsys
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from steepen.errors import UsageError
from steepen.model.arms import ARMS

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
ARM_TITLES = {name: arm.title for name, arm in ARMS.items()}
NEUTRAL = Colour("#5b6168", "#9aa3ad")
# For curves beside the main arms: none of these is near an arm's colour.
EXTRA: tuple[Colour, ...] = (
    Colour("#00998f", "#2fc7bb"),
    Colour("#8b66d9", "#b79cf2"),
    Colour("#7a5130", "#c39a76"),
    Colour("#d4538d", "#f08bb7"),
    Colour("#4f9a12", "#8ccf4e"),
    Colour("#8b8400", "#cfc73a"),
)
# The arms of the paper's ablations: those of one figure differ.
ABLATION_COLOURS: dict[str, Colour] = {
    **dict.fromkeys(("untied-2-norm-only", "loop-2-norm-only", "random-loop-grow"), EXTRA[0]),
    **dict.fromkeys(("untied-2-inject-only", "loop-2-inject-only", "deeper-vanilla"), EXTRA[1]),
    **dict.fromkeys(("untied-2-no-coda-injection", "deeper-operator-1"), EXTRA[3]),
    "loop-2-no-coda-injection": EXTRA[2],
    **dict.fromkeys(("loop-2-nci-2-c-3", "loop-2-2-c-3"), EXTRA[5]),
    "operator-1-1-c-2": EXTRA[4],
}
# In this order for curves that are no arms and no levels; deep-vanilla's grey is left to reference lines.
_ORDER = ("vanilla", "loop-2", "operator-1", "untied-2", "deep-vanilla-grow", "loop-grow", "untied-grow")
PALETTE: tuple[Colour, ...] = tuple(ARM_COLOURS[arm] for arm in _ORDER)
# From dark to bright, without the palest ends, which are invisible on white: for light and for dark pages,
# one pair for each family of curves in a figure (as viridis, as inferno, and blues).
_RAMPS = (
    (
        ("#440154", "#443983", "#31688e", "#21918c", "#35b779", "#8fbc2b"),
        ("#7d5bbe", "#5f7fd0", "#3fa0c0", "#35b79a", "#7ad151", "#fde725"),
    ),
    (
        ("#3b0f70", "#80197f", "#b7337a", "#de4968", "#e8692c", "#d99000"),
        ("#a06fd6", "#c45bc4", "#e26a9f", "#f58a78", "#fbab5e", "#fcd35e"),
    ),
    (("#0b1f4b", "#2346a0", "#3f74d6", "#5a97cf", "#4fa3b5"), ("#4f73c9", "#6f9be8", "#93bdf2", "#b9dcf5")),
)


def arm_key(name: str) -> str:
    """An arm's name in lower case with hyphens: deep-vanilla for "Deep Vanilla" and deep_vanilla."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def arm_colour(name: str) -> Colour:
    """An arm's colour: fixed for the paper's arms, a hue and shade hashed from the name for any other."""
    key = arm_key(name)
    if key in ARM_COLOURS or key in ABLATION_COLOURS:
        return ARM_COLOURS.get(key) or ABLATION_COLOURS[key]
    digest = hashlib.sha256(key.encode()).digest()
    hue, shade = int.from_bytes(digest[:2]) / 65536, digest[2] % 3
    light = _hex(colorsys.hls_to_rgb(hue, (0.27, 0.37, 0.47)[shade], 0.55))
    dark = _hex(colorsys.hls_to_rgb(hue, (0.50, 0.62, 0.74)[shade], 0.55))
    return Colour(_readable(light, LIGHT_BACKGROUND, 3.0), _readable(dark, DARK_BACKGROUND, 3.0))


# In this order for arms that are not the paper's: each differs most from those before it, in grey too.
SET: tuple[Colour, ...] = (*PALETTE[:5], PALETTE[6], PALETTE[5], *EXTRA, ARM_COLOURS["deep-vanilla"])
NEAR = 0.3  # distance in RGB of colours that are easily confused
ArmMarker = Literal["circle", "square", "triangle", "diamond", "cross", "wedge"]
ArmStyles: TypeAlias = Mapping[str, tuple[Colour, ArmMarker]]  # by the arm's key
ARM_MARKERS: tuple[ArmMarker, ...] = ("circle", "square", "triangle", "diamond", "cross", "wedge")


def arm_styles(names: Sequence[str], chosen: Mapping[str, Colour]) -> dict[str, tuple[Colour, ArmMarker]]:
    """A colour and a marker for every arm of a figure, all different as far as they reach.

    The paper's arms keep their colours where there is no other arm. Colours near a `chosen` one are not used.
    """
    known = all(arm_key(name) in ARM_COLOURS for name in names)
    taken = [_rgb(own.light) for own in chosen.values()]
    free = (one for one in SET if all(math.dist(_rgb(one.light), own) > NEAR for own in taken))
    found: dict[str, tuple[Colour, ArmMarker]] = {}
    for i, name in enumerate(names):
        colour = chosen.get(name) or (arm_colour(name) if known else next(free, None) or arm_colour(name))
        found[name] = colour, ARM_MARKERS[i % len(ARM_MARKERS)]
    return found


def own_arm_styles(names: Iterable[str]) -> ArmStyles:
    """Styles of the arms that are not the paper's, apart from those of the paper's, which are circles."""
    keys = list(dict.fromkeys(map(arm_key, names)))
    paper = {key: arm_colour(key) for key in keys if key in ARM_COLOURS or key in ABLATION_COLOURS}
    colours = arm_styles([key for key in keys if key not in paper], paper)
    others = ARM_MARKERS[1:] if paper else ARM_MARKERS
    return {key: (colour, others[i % len(others)]) for i, (key, (colour, _)) in enumerate(colours.items())}


def own_colour(text: str) -> Colour:
    """A colour that a user has chosen, #rrggbb; its dark form is readable on a dark page."""
    if not re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        raise UsageError(f"{text!r} is not a colour; write #rrggbb, as #d55e00.")
    return Colour(text, _readable(text, DARK_BACKGROUND, 3.0))


def level_colour(fraction: float, colour: Colour | None = None, family: int = 0) -> Colour:
    """A shade within the `family`-th family of curves of a figure, from 0 to 1; of the colour if given."""
    if colour is None:
        light, dark = _RAMPS[family % len(_RAMPS)]
        return Colour(_along(light, fraction), _along(dark, fraction))
    faint = 0.55 * (1 - fraction)
    return Colour(_mix(colour.light, LIGHT_BACKGROUND, faint), _mix(colour.dark, DARK_BACKGROUND, faint))


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours."""
    darker, lighter = sorted((_luminance(one) + 0.05, _luminance(other) + 0.05))
    return lighter / darker


def _readable(colour: str, background: str, minimum: float = 4.5) -> str:
    """The colour, mixed with black or white until its contrast to the background is `minimum`."""
    target = "#000000" if _luminance(background) > 0.5 else "#ffffff"
    shades = (_mix(colour, target, step / 50) for step in range(51))
    return next(shade for shade in shades if contrast(shade, background) >= minimum)


def _mix(start: str, end: str, fraction: float) -> str:
    channels = zip(_rgb(start), _rgb(end), strict=True)
    return _hex(tuple(a + fraction * (b - a) for a, b in channels))


def _along(ramp: tuple[str, ...], fraction: float) -> str:
    """The colour at a fraction of the ramp, between its neighbours."""
    position = min(max(fraction, 0.0), 1.0) * (len(ramp) - 1)
    index = min(int(position), len(ramp) - 2)
    return _mix(ramp[index], ramp[index + 1], position - index)


def _luminance(colour: str) -> float:
    """WCAG's relative luminance, from sRGB."""
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in _rgb(colour))
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _rgb(colour: str) -> tuple[float, ...]:
    """#rrggbb as fractions of 1."""
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def _hex(rgb: tuple[float, ...]) -> str:
    return "#" + "".join(f"{round(255 * c):02x}" for c in rgb)
