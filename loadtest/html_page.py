"""One self-contained HTML page with SVG plots, for the results of load tests and simulations.

Text is escaped; HTML blocks come from this module only. A plot is a `<figure>` with an inline SVG in the page's text
colour, and the same input gives the same bytes. matplotlib is imported when the first plot is drawn.
"""

from __future__ import annotations

import hashlib
import html
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from loadtest.tables import GLOSSARY
from router.cli.options import writable


def writable_report(path: Path | None) -> Path | None:
    """Callback of an option that names a page with plots, which need matplotlib."""
    if path is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("plots need matplotlib: pip install matplotlib")
    return writable(path)


OutOption = Annotated[
    Path | None, typer.Option(help="Write results as JSON, with one row per request.", callback=writable)
]
ReportOption = Annotated[Path | None, typer.Option(help="Write an HTML page with plots.", callback=writable_report)]

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Drawing
    from matplotlib.axis import Axis

T = TypeVar("T")

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --ground: #ffffff; --faint: #d5dae0; --warn: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --ground: #14171a; --faint: #3a4149; --warn: #ff8a80; }
}
body { color: var(--ink); background: var(--ground); font: 15px/1.5 system-ui, sans-serif;
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--faint); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--ground); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem .9rem; max-width: 46rem; }
dt { font-weight: 600; } dd { margin: 0; }
figure { margin: 1.6rem 0; } figure svg { width: 100%; min-width: 34rem; max-width: 44rem; height: auto; }
figcaption { max-width: 46rem; }
.warning { border-left: 4px solid var(--warn); padding: .1rem .9rem; }
"""
_COLOURS = ("#0a84d6", "#e8710a", "#1a9c5b", "#c2379e", "#8a7a00", "#7a5cd6", "#d43d3d", "#0f9aa8")
"""Distinguishable for most readers, legible on white and on near-black."""
_INK = "#010203"
"""Replaced by the page's text colour when the SVG is written."""
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
_SIZE_INCHES = (7.2, 3.6)
_MAX_VECTOR_DOTS = 1000
"""More dots than this are drawn as one picture inside the SVG."""
_WIDE_RATIO = 1000.0
"""A logarithmic axis over more than this labels powers of ten only."""


class PlotsUnavailable(Exception):
    """matplotlib is not installed; the message says how to install it."""


# --- the page ---


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the HTML blocks below it."""

    heading: str
    blocks: Sequence[str]


def page(title: str, sections: Sequence[Section]) -> str:
    """The whole document. It follows the reader's light or dark mode."""
    title = html.escape(title)
    body = "\n".join(f"<h2>{html.escape(s.heading)}</h2>\n" + "\n".join(s.blocks) for s in sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}\n</body>\n</html>\n"
    )


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def warning(text: str) -> str:
    """A highlighted paragraph."""
    return f'<div class="warning">{paragraph(text)}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells of plain text; the first column names the row."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'


def definitions(columns: Sequence[str]) -> str:
    """What the columns of a table after the first mean."""
    rows = "\n".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(GLOSSARY[name])}</dd>" for name in columns[1:])
    return f"<dl>\n{rows}\n</dl>"


# --- plots ---


@dataclass(frozen=True, slots=True)
class Series:
    """A named line or cloud: `y` over `x`, of equal length; NaN leaves a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotAxes:
    """The title, axis labels and marks of a plot. `across` are named horizontal lines, `upright` vertical ones."""

    title: str
    x: str
    y: str
    caption: str = ""
    log_x: bool = False
    log_y: bool = False
    across: Mapping[str, float] = field(default_factory=dict)
    upright: Mapping[str, float] = field(default_factory=dict)


def lines(axes: PlotAxes, series: Sequence[Series]) -> str:
    """Points joined in the given order, each marked."""

    def paint(drawing: Drawing) -> None:
        for colour, one in _coloured(series):
            drawing.plot(one.x, one.y, color=colour, marker="o", markersize=4, label=one.name)

    return _figure(axes, paint)


def dots(axes: PlotAxes, series: Sequence[Series]) -> str:
    """Single points, such as one a request."""
    many = sum(len(one.x) for one in series) > _MAX_VECTOR_DOTS

    def paint(drawing: Drawing) -> None:
        for colour, one in _coloured(series):
            drawing.plot(one.x, one.y, ".", color=colour, alpha=0.55, label=one.name, rasterized=many)

    return _figure(axes, paint)


def cdf(axes: PlotAxes, samples: Mapping[str, Sequence[float]]) -> str:
    """For each name, the share of its samples that are at most x."""

    def paint(drawing: Drawing) -> None:
        for colour, (name, values) in _coloured(samples.items()):
            if values:
                drawing.ecdf(values, color=colour, label=name)

    return _figure(axes, paint)


def bars(axes: PlotAxes, groups: Sequence[str], heights: Mapping[str, Sequence[float]]) -> str:
    """A cluster of bars for each group: for each name, one height a group."""
    width = 0.8 / max(len(heights), 1)

    def paint(drawing: Drawing) -> None:
        for at, (colour, (name, values)) in enumerate(_coloured(heights.items())):
            middles = [group - 0.4 + (at + 0.5) * width for group in range(len(groups))]
            drawing.bar(middles, values, width=width * 0.92, color=colour, label=name)
        drawing.set_xticks(range(len(groups)), groups)
        drawing.grid(visible=False, axis="x")

    return _figure(axes, paint)


def _coloured(values: Iterable[T]) -> Iterator[tuple[str, T]]:
    return zip(cycle(_COLOURS), values, strict=False)


def _figure(axes: PlotAxes, paint: Callable[[Drawing], None]) -> str:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotsUnavailable("plots need matplotlib: pip install matplotlib") from error
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        drawing = figure.subplots()
        paint(drawing)
        _label(drawing, axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _as_html(text.getvalue(), axes)


def _label(drawing: Drawing, axes: PlotAxes) -> None:
    """Add labels, scales, marks, and a legend if anything has a name."""
    drawing.set_xlabel(axes.x)
    drawing.set_ylabel(axes.y)
    # an axis without a positive value cannot be logarithmic
    if axes.log_x and math.isfinite(drawing.dataLim.minposx):
        drawing.set_xscale("log")
        _label_decades(drawing.xaxis)
    if axes.log_y and math.isfinite(drawing.dataLim.minposy):
        drawing.set_yscale("log")
        _label_decades(drawing.yaxis)
    for marks, draw in ((axes.across, drawing.axhline), (axes.upright, drawing.axvline)):
        for style, (name, at) in zip(cycle(("--", ":", "-.")), marks.items(), strict=False):
            draw(at, color=_INK, alpha=0.6, linewidth=1, linestyle=style, label=name)
    if drawing.get_legend_handles_labels()[1]:
        drawing.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=9)  # above the plot: hides no data


def _label_decades(axis: Axis) -> None:
    """Label in plain numbers, at 1, 2 and 5 where there is room. Formulas would not be rendered."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < _WIDE_RATIO else (1.0,)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())


def _as_html(document: str, axes: PlotAxes) -> str:
    """The SVG element in the page's text colour, with ids that are unique on the page."""
    svg = document[document.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(_INK, "currentColor")
    prefix = "p" + hashlib.sha256((axes.title + svg).encode()).hexdigest()[:8]
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    title, caption = html.escape(axes.title), html.escape(axes.caption)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    return (
        f"<figure>\n<figcaption><strong>{title}</strong> {caption}</figcaption>\n"
        f'<div class="scroll">{svg}</div>\n</figure>'
    )
