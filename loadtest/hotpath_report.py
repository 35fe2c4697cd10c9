"""How do the routers' own costs compare, in Markdown and to the eye?

    python loadtest/hotpath.py --bench BENCH --routers warmroute,nginx,sglang-router --out hotpath.json
    python loadtest/hotpath_report.py hotpath.json --plot hotpath.svg

A file of `hotpath.py` in; a table of medians out, and an SVG with a cluster of bars for each load, a bar a router. This
file never measures anything.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from router.report.plots import Axes, PlotsUnavailable, bars


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One load through one router in one round."""

    round: int
    router: str
    load: str
    cpu_us: float
    per_s: float
    p50_us: float
    p99_us: float


def main(
    results: Annotated[Path, typer.Argument(exists=True, help="What hotpath.py --out has written.")],
    plot: Annotated[Path | None, typer.Option(help="Write the bars here, as SVG.")] = None,
) -> None:
    """Print the table; draw the plot."""
    try:
        rows = msgspec.json.decode(results.read_bytes(), type=list[Row])
        if plot is not None:
            plot.write_text(bars_of(rows))
    except (msgspec.MsgspecError, PlotsUnavailable) as error:
        raise SystemExit(f"{results}: {error}") from error
    print(markdown(rows))


def markdown(rows: Sequence[Row]) -> str:
    """CPU us of each load, a row a router, medians over the rounds; requests a second in brackets."""
    loads = _loads(rows)
    lines = [["CPU us (requests/s)", *loads], ["---"] * (len(loads) + 1)]
    for router in _routers(rows):
        cells = [
            f"{_median(rows, router, load, 'cpu_us'):.1f} ({_median(rows, router, load, 'per_s'):,.0f})"
            for load in loads
        ]
        lines.append([router, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bars_of(rows: Sequence[Row]) -> str:
    """A whole SVG file, black on white."""
    loads = _loads(rows)
    heights = {router: [_median(rows, router, load, "cpu_us") for load in loads] for router in _routers(rows)}
    axes = Axes(title="CPU of the router", x="load", y="us a request, or a chunk", log_y=True)
    figure = bars(axes, loads, heights)
    begin, end = figure.index("<svg"), figure.index("</svg>") + len("</svg>")
    return figure[begin:end].replace("<svg", '<svg style="color: black; background: white"', 1)


def _loads(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.load for row in rows))


def _routers(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.router for row in rows))


def _median(rows: Sequence[Row], router: str, load: str, figure: str) -> float:
    """NaN for a load that the router never had."""
    found = [getattr(row, figure) for row in rows if (row.router, row.load) == (router, load)]
    return statistics.median(found) if found else float("nan")


if __name__ == "__main__":
    typer.run(main)
