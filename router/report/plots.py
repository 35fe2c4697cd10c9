"""How do series of numbers become plots inside one HTML file?

Each function takes axes and named series and returns a `<figure>` with an inline SVG: no script, no second file. Axes
and text take the page's text colour, so that a plot is legible on light and on dark ground; the same input gives the
same bytes. matplotlib is imported when the first plot is drawn. This file never computes a figure and never writes one
to a disk.
"""

from __future__ import annotations

import hashlib
import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Drawing
    from matplotlib.axis import Axis

COLOURS = ("#0a84d6", "#e8710a", "#1a9c5b", "#c2379e", "#8a7a00", "#7a5cd6", "#d43d3d", "#0f9aa8")
"""Told apart by most eyes, legible on white and on near-black."""
SIZE_INCHES = (7.2, 3.6)
MOST_VECTOR_DOTS = 1000
"""More dots than this become one picture inside the SVG."""
WIDE_DECADES = 1000.0
"""A logarithmic axis over more than this labels powers of ten alone."""
_INK = "#010203"
"""Stands for the page's text colour until the SVG is written."""
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "warmroute",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), _INK
    ),
}


class PlotsUnavailable(Exception):
    """matplotlib is not installed; the message says how to get it."""


@dataclass(frozen=True, slots=True)
class Series:
    """One named line or cloud: `y` over `x`, equally long; NaN leaves a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What a plot says around its data. `across` are named horizontal lines at a y, `upright` vertical ones at an x."""

    title: str
    x: str
    y: str
    caption: str = ""
    log_x: bool = False
    log_y: bool = False
    across: Mapping[str, float] = field(default_factory=dict)
    upright: Mapping[str, float] = field(default_factory=dict)


def lines(axes: Axes, series: Sequence[Series]) -> str:
    """Points joined in the order given, each marked."""

    def paint(drawing: Drawing) -> None:
        for colour, one in zip(cycle(COLOURS), series, strict=False):
            drawing.plot(one.x, one.y, color=colour, marker="o", markersize=4, label=one.name)

    return _figure(axes, paint)


def dots(axes: Axes, series: Sequence[Series]) -> str:
    """Single points: what happened to each request."""
    many = sum(len(one.x) for one in series) > MOST_VECTOR_DOTS

    def paint(drawing: Drawing) -> None:
        for colour, one in zip(cycle(COLOURS), series, strict=False):
            drawing.plot(one.x, one.y, ".", color=colour, alpha=0.55, label=one.name, rasterized=many)

    return _figure(axes, paint)


def cdf(axes: Axes, samples: Mapping[str, Sequence[float]]) -> str:
    """For each name the share of its samples that are at most x."""

    def paint(drawing: Drawing) -> None:
        for colour, (name, values) in zip(cycle(COLOURS), samples.items(), strict=False):
            if values:
                drawing.ecdf(values, color=colour, label=name)

    return _figure(axes, paint)


def bars(axes: Axes, groups: Sequence[str], heights: Mapping[str, Sequence[float]]) -> str:
    """A cluster of bars for each group: by name, one height a group."""
    width = 0.8 / max(len(heights), 1)

    def paint(drawing: Drawing) -> None:
        for at, (colour, (name, values)) in enumerate(zip(cycle(COLOURS), heights.items(), strict=False)):
            middles = [group - 0.4 + (at + 0.5) * width for group in range(len(groups))]
            drawing.bar(middles, values, width=width * 0.92, color=colour, label=name)
        drawing.set_xticks(range(len(groups)), groups)
        drawing.grid(visible=False, axis="x")

    return _figure(axes, paint)


def _figure(axes: Axes, paint: Callable[[Drawing], None]) -> str:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotsUnavailable("plots need matplotlib: pip install 'warmroute[report]'") from error
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        drawing = figure.subplots()
        paint(drawing)
        _finish(drawing, axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _as_html(text.getvalue(), axes)


def _finish(drawing: Drawing, axes: Axes) -> None:
    """Labels, scales, marks and a legend where there is something to tell apart."""
    drawing.set_xlabel(axes.x)
    drawing.set_ylabel(axes.y)
    # an axis without one positive value has no logarithm
    if axes.log_x and math.isfinite(drawing.dataLim.minposx):
        drawing.set_xscale("log")
        _label_decades(drawing.xaxis)
    if axes.log_y and math.isfinite(drawing.dataLim.minposy):
        drawing.set_yscale("log")
        _label_decades(drawing.yaxis)
    for style, (name, at) in zip(cycle(("--", ":", "-.")), axes.across.items(), strict=False):
        drawing.axhline(at, color=_INK, alpha=0.6, linewidth=1, linestyle=style, label=name)
    for style, (name, at) in zip(cycle(("--", ":", "-.")), axes.upright.items(), strict=False):
        drawing.axvline(at, color=_INK, alpha=0.6, linewidth=1, linestyle=style, label=name)
    if drawing.get_legend_handles_labels()[1]:
        drawing.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=9)  # above: it hides no data


def _label_decades(axis: Axis) -> None:
    """Plain numbers, at 1, 2 and 5 where there is room; powers as formulas would stay unrendered text."""
    from matplotlib.ticker import LogLocator, NullFormatter

    least, most = axis.get_view_interval()
    roomy = most / least < WIDE_DECADES
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if roomy else (1.0,)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())


def _as_html(document: str, axes: Axes) -> str:
    """The SVG element alone, in the page's ink, with ids that no other plot on the page has."""
    svg = document[document.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(_INK, "currentColor")
    mine = "p" + hashlib.sha256((axes.title + svg).encode()).hexdigest()[:8]
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{mine}-", svg)
    title, caption = html.escape(axes.title), html.escape(axes.caption)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    told = f"<figcaption><strong>{title}</strong> {caption}</figcaption>"
    return f"<figure>\n{told}\n{svg}\n</figure>"
