"""Draws predicted against measured times: prefills of each model, and times to first token behind a router."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

from loadtest.gpu.fit import expected_ms, launched
from loadtest.gpu.fleet_record import MeasuredFleet
from loadtest.gpu.simulated import MeasuredPod, simulate

if TYPE_CHECKING:
    from loadtest.gpu.report import MeasuredModel

matplotlib.use("svg")
from matplotlib import pyplot as plt

SIZE_INCHES = (13.0, 4.2)
INK, BLUE, ORANGE, GREY = "#222222", "#1f6fb4", "#d9730d", "#9a9a9a"


def draw(models: Sequence[MeasuredModel], fleets: Sequence[tuple[MeasuredFleet, MeasuredPod]], file: Path) -> None:
    """Write one SVG: a panel for each model and one for each fleet."""
    plt.rcParams |= {"font.size": 9, "svg.hashsalt": "warmroute", "axes.spines.top": False, "axes.spines.right": False}
    figure, axes = plt.subplots(1, len(models) + len(fleets), figsize=SIZE_INCHES, layout="constrained", squeeze=False)
    panels = list(axes[0])
    for panel, model in zip(panels, models, strict=False):
        _prefills(panel, model)
    for panel, (fleet, pod) in zip(panels[len(models) :], fleets, strict=True):
        _times_to_first_token(panel, fleet, pod)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def _prefills(panel: Any, model: MeasuredModel) -> None:
    """Each point is a prompt; on the diagonal, the expected time is the measured one."""
    points, with_launch, speed = model.prefills, model.launched, model.fitted
    measured = [one.ms for one in points]
    limits = (min(measured) / 2, max(measured) * 2)
    panel.plot(limits, limits, color=GREY, linewidth=1)
    formula = [speed.prefill_ms(one.n, one.p) for one in points]
    panel.scatter(measured, formula, s=22, facecolors="none", edgecolors=ORANGE, label="c0 + c1 (n-p) + c2 (n²-p²)")
    launches = launched(points)
    least = f"... at least {with_launch.launch_ms:.0f} ms, without CUDA graphs"
    expected = [expected_ms(with_launch, one) for one in launches]
    panel.scatter([one.ms for one in launches], expected, s=14, color=BLUE, label=least)
    panel.set(xscale="log", yscale="log", xlim=limits, ylim=limits)
    panel.set(
        xlabel="measured prefill, ms", ylabel="expected, ms", title=f"{model.name}, prompts of 256 to 32,768 tokens"
    )
    panel.legend(loc="upper left", frameon=False, fontsize=8)


def _times_to_first_token(panel: Any, fleet: MeasuredFleet, pod: MeasuredPod) -> None:
    """Shares of requests whose first token came within a time."""
    curves = {
        "measured": (INK, [one.ttft_ms for one in fleet.requests]),
        "simulated": (BLUE, [one.ttft_ms for one in simulate(fleet, pod)]),
    }
    shares = [number / len(fleet.requests) for number in range(1, len(fleet.requests) + 1)]
    for name, (colour, times) in curves.items():
        panel.plot(sorted(times), shares, color=colour, label=name)
    title = f"{len(fleet.requests)} requests through the router, {fleet.pods} pod{'s' * (fleet.pods > 1)}"
    panel.set(xlabel="time to first token, ms", ylabel="share of requests", xlim=(0, None), title=title)
    panel.legend(loc="lower right", frameon=False)
