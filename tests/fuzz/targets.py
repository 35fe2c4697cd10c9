"""What is fuzzed, and what does each start from?

A target takes any bytes and raises nothing: what a parser may refuse it is allowed to refuse by its own error, and all
that it takes must hold what the target asserts. `found/NAME` keeps the inputs that once broke the target NAME.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import bodies, edge, pods

FOUND = Path(__file__).parent / "found"


@dataclass(frozen=True, slots=True)
class Target:
    """`seeds` are real examples, small ones; `words` are what else the parser knows, for the fuzzer to put in. No input
    of a run is longer than `most_bytes`."""

    run: Callable[[bytes], None]
    seeds: Sequence[bytes]
    words: Sequence[bytes] = ()
    most_bytes: int = 1024


TARGETS: Mapping[str, Target] = {
    "edge": Target(edge.requests, edge.SEEDS, edge.WORDS),
    "bodies": Target(bodies.bodies, bodies.SEEDS, bodies.WORDS),
    "answers": Target(pods.answers, pods.ANSWERS, pods.HTTP),
    "streams": Target(pods.streams, pods.STREAMS, pods.STREAM_WORDS, 2048),
    "replies": Target(pods.replies, pods.REPLIES, pods.STREAM_WORDS),
}


def found(name: str) -> Iterator[Path]:
    """Files whose bytes broke that target once."""
    return (path for path in sorted((FOUND / name).glob("*")) if path.is_file())
