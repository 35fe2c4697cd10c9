"""`streams.py` holds the streams it reports, and compares with direct."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadtest.bench.streams import (
    CHUNKS_PER_S,
    PROBES_S,
    SETTLE_S,
    StreamResult,
    Timing,
    table,
)


def held(router: str, ttft_p50_us: float, rss_bytes: int) -> StreamResult:
    return StreamResult(router, 10_000, 9_000, ttft_p50_us, ttft_p50_us * 2, 100, 200, 50 * 2**20, rss_bytes)


@given(st.integers(1, 20_000))
def test_the_first_stream_outlasts_the_last_probe(streams: int) -> None:
    """Its first chunk also comes after a pause, and the chunk rate is constant."""
    timing = Timing(streams)
    lasts_s = timing.chunks * timing.pause_us / 1e6
    assert lasts_s >= timing.opening_s + SETTLE_S + PROBES_S
    assert streams / (timing.pause_us / 1e6) <= CHUNKS_PER_S * 1.01


def test_times_are_relative_to_direct_and_memory_is_per_stream() -> None:
    """Per stream that was held, not per requested stream."""
    out = io.StringIO()
    Console(file=out, width=140).print(table([held("direct", 400, 0), held("ours", 3_400, 50 * 2**20 + 9_000 * 2048)]))
    direct, ours = (line for line in out.getvalue().splitlines() if "9,000" in line)
    assert [cell.strip() for cell in ours.split("│")[3:8]] == ["3.00", "6.00", "0", "0", "2.0"]
    assert [cell.strip() for cell in direct.split("│")[3:8]] == ["0.40", "0.80", "100", "200", ""]
