"""The style of every matplotlib figure: fonts, line widths, colours and markers, and how files are saved."""

from __future__ import annotations

import io
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Format = Literal["pdf", "svg", "png"]
FORMATS: tuple[Format, ...] = ("pdf", "svg", "png")

# Only fonts that come with matplotlib: the same figure on every machine. STIX suits Times; DejaVu fills gaps.
RC_PARAMS: dict[str, Any] = {
    "font.family": ["STIXGeneral", "DejaVu Sans"],
    "mathtext.fontset": "stix",
    "text.usetex": False,
    "font.size": 7.5,
    "figure.titlesize": "medium",
    "axes.titlesize": "medium",
    "axes.labelsize": "medium",
    "xtick.labelsize": "medium",
    "ytick.labelsize": "medium",
    "legend.fontsize": "medium",
    "legend.frameon": False,
    "axes.linewidth": 0.5,
    "axes.edgecolor": "#333333",
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "xtick.minor.width": 0.35,
    "ytick.minor.width": 0.35,
    "xtick.major.size": 2.8,
    "ytick.major.size": 2.8,
    "xtick.minor.size": 1.6,
    "ytick.minor.size": 1.6,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.5,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "steepen",  # ids that do not change from one drawing to the next
    "savefig.dpi": 300,
    "figure.facecolor": "white",
}
# Without these, matplotlib writes the time of drawing into the file.
_METADATA: dict[Format, dict[str, Any]] = {
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
}


@contextmanager
def figure_style(changes: dict[str, Any] | None = None) -> Generator[None]:
    """Apply the style inside a `with` block or a decorated function; ignores the user's matplotlibrc."""
    import matplotlib as mpl

    style: dict[Any, Any] = {**mpl.rcParamsDefault, **RC_PARAMS, **(changes or {}), "backend": "agg"}
    with mpl.rc_context(style):
        yield


def new_figure(width: float, height: float, **pads: Any) -> Figure:
    """An empty figure of a size in inches, without pyplot's global state; `pads` are of its layout."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(**pads))


def figure_bytes(figure: Figure, kind: Format) -> bytes:
    """The file of a figure; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata=_METADATA[kind])
    return buffer.getvalue()
