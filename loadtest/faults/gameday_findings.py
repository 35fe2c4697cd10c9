"""What the game day finds: when each incident was shown, and when the clients' TTFT p99 had doubled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.traffic.figures import percentile
from loadtest.traffic.load_driver import RequestResult

WATCHED_S = 50.0
WINDOW_S, MIN_REQUESTS = 10.0, 30
PAGE_AIM_S = 10.0
COLUMNS = ("incident", "on the page", "alert", "expression true", "fires", "`for` of the chart", "TTFT p99 doubled")


@dataclass(frozen=True, slots=True)
class Finding:
    """One incident's result. Times in seconds from its begin; None: not within the time watched."""

    incident: str
    title: str
    page_s: float | None
    line: str
    on_screen: bool | None
    """Whether the browser showed the line; None without one."""
    alert: str
    true_s: float | None
    fires_s: float | None
    lasts_s: float
    """The `for` of the chart, not divided."""
    doubled_s: float | None
    p99_before_ms: float
    p99_after_ms: float
    requests: int
    failed: int
    """Answers without a token."""
    cut: int
    """Answers that ended after their first token."""
    error_texts: Sequence[str]
    """What went wrong for the first of them."""
    others: Sequence[str]
    """Other alerts that fired."""
    before: Sequence[str]
    """Lines and alerts while all was well."""

    def alerted_first(self, extra_s: float = 0.0) -> bool:
        """Whether the alert, this much later, is known to fire before the p99 doubles."""
        known_s = WATCHED_S if self.doubled_s is None else self.doubled_s
        return self.fires_s is not None and self.fires_s + extra_s < known_s


def p99_doubled_s(served: Sequence[RequestResult], begin_s: float, end_s: float, limit_s: float) -> float | None:
    """When the p99 of the last `WINDOW_S` exceeded `limit_s`, after `begin_s`, both on the driver's clock."""
    exceeded_s = sorted(
        one.due_s + limit_s for one in served if (one.ttft_s is None and not one.error) or (one.ttft_s or 0.0) > limit_s
    )
    for at_s in exceeded_s:
        if begin_s < at_s <= end_s:
            due = sum(at_s - WINDOW_S < one.due_s <= at_s for one in served)
            slow = sum(at_s - WINDOW_S < slow_s - limit_s and slow_s <= at_s for slow_s in exceeded_s)
            if due >= MIN_REQUESTS and slow > 0.01 * due:
                return at_s - begin_s
    return None


def ttft_p99_s(served: Sequence[RequestResult], begin_s: float, end_s: float) -> float:
    """Counts requests that were due in this time and have a first token."""
    return percentile([one.ttft_s for one in served if one.ttft_s is not None and begin_s <= one.due_s < end_s], 0.99)


def table(found: Sequence[Finding], factor: float) -> list[str]:
    """The findings as Markdown, and how many of them meet the aims."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for one in found:
        times = (_seconds(one.true_s), _seconds(one.fires_s), f"{one.lasts_s:g} s", _seconds(one.doubled_s))
        lines.append(f"| {' | '.join((one.title, _seconds(one.page_s), one.alert, *times))} |")
    visible = sum(one.page_s is not None and one.page_s < PAGE_AIM_S for one in found)
    scaled = sum(one.alerted_first() for one in found)
    whole = sum(one.alerted_first(one.lasts_s * (1 - 1 / factor)) for one in found)
    requests, failed, cut = (sum(getattr(one, name) for one in found) for name in ("requests", "failed", "cut"))
    return [
        *lines,
        "",
        f"{visible} of {len(found)} on the page within {PAGE_AIM_S:g} s. Alerted before the p99 had doubled:"
        f" {scaled} with `for` divided by {factor:g}, {whole} with the whole `for`.",
        f"Of {requests} requests {failed} failed and {cut} were cut.",
    ]


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"
