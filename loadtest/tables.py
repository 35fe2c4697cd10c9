"""Tables of simulations, the demo and load tests, for the terminal.

`GLOSSARY` defines the columns of all reports, so that a name has one meaning in each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

GLOSSARY: Mapping[str, str] = {
    "load": "multiple of the traffic's own request rate",
    "pods": "number of pods",
    "GPUs": "number of GPUs",
    "GPU-hours": "GPUs times the duration of the traffic",
    "rate/s": "sessions started per second",
    "sent": "requests sent",
    "errors": "requests that failed",
    "unsent": "later turns of sessions that failed",
    "cached": "cached share (hit rate): share of the prompt tokens of answered requests that were found in a cache or "
    "pulled from one, and so not computed",
    "of ideal": "cached tokens relative to one cache that never evicts",
    "mean ms": "mean time to first token",
    "behind": "how far that mean is above the lowest of the table",
    "p50 ms": "median time to first token",
    "p90 ms": "90th percentile of the time to first token",
    "p99 ms": "99th percentile of the time to first token",
    "TPOT p50 ms": "median time per output token after the first",
    "TPOT p99 ms": "99th percentile of the time per output token after the first",
    "prefill s": "seconds in which pods computed prompts",
    "refused": "requests that were refused",
    "SLO": "share of requests that meet it; refused ones, and those that would have followed them, do not",
    "goodput": "requests a second that meet the SLO",
    "good": "share of requests within the objective; a failed request is not",
    "good/s": "good requests per second",
    "work": "computed prompt and output tokens of each pod",
    "peak": "work of the busiest pod relative to the mean",
    "regret": "how many ms earlier the best pod would have sent the first token, on average",
    "exact": "share of requests whose cached tokens were predicted exactly",
    "computed": "computed prompt tokens, in millions",
    "saved": "cached prompt tokens, in millions",
    "late ms": "how late the client sent, 99th percentile; times count from when a request was due",
}
"""What the columns of reports mean. Shares are weighted by tokens where they are of tokens."""


def legend(columns: Sequence[str], more: str = "") -> str:
    """What the columns after the first mean, then `more`. For a terminal."""
    return "; ".join(f"{name}: {GLOSSARY[name]}" for name in columns[1:]) + f". {more}".rstrip()


def text_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str, caption: str = "") -> Table:
    """For a terminal. The first column names the row and is folded where the terminal is too narrow, never cut."""
    shown = Table(
        title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, padding=0
    )
    for at, name in enumerate(columns):
        shown.add_column(name, justify="right" if at else "left", no_wrap=at > 0, overflow="fold")
    for row in rows:
        shown.add_row(*row)
    return shown
