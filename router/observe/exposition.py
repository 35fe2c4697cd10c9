"""Renders metric families as text, in small pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector

PIECE_SAMPLES = 200
"""Samples that are rendered at once, in a millisecond or less."""
HEADER_LINES = 2
"""HELP and TYPE of a family."""


def pieces(families: Iterable[Metric]) -> Iterator[bytes]:
    """The text in pieces of at most `PIECE_SAMPLES`, with one header for each family."""
    for family in families:
        samples, header = family.samples, b""
        for first in range(0, max(len(samples), 1), PIECE_SAMPLES):
            family.samples = samples[first : first + PIECE_SAMPLES]
            text = generate_latest(_OneFamily(family))
            yield text.removeprefix(header)
            header = b"".join(text.splitlines(keepends=True)[:HEADER_LINES])


class _OneFamily(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family
