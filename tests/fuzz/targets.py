"""What is fuzzed, and what does each start from?

A target takes any bytes and raises nothing: what a parser may refuse it is allowed to refuse by its own error, and all
that it takes must hold what the target asserts. `found/NAME` keeps the inputs that once broke the target NAME.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import bodies, documents, edge, engines, pods, prompts, stored, workers

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
    "prompts": Target(prompts.prompts, prompts.PROMPTS, prompts.PROMPT_WORDS),
    "events": Target(engines.events, engines.EVENTS, engines.EVENT_WORDS),
    "metrics": Target(engines.metrics, engines.METRICS, engines.METRIC_WORDS, 4096),
    "facts": Target(engines.facts, engines.FACTS, engines.FACT_WORDS),
    "rows": Target(stored.rows, stored.ROWS, stored.ROW_WORDS),
    "calibrations": Target(stored.calibrations, stored.CALIBRATIONS, stored.CALIBRATION_WORDS, 2048),
    "frames": Target(workers.frames, workers.FRAMES, workers.FRAME_WORDS),
    "news": Target(workers.news, workers.NEWS_TOLD, workers.NEWS_WORDS),
    "config": Target(documents.config, documents.CONFIGS, documents.YAML_WORDS),
    "policies": Target(documents.policies, documents.POLICIES, documents.YAML_WORDS),
}


def found(name: str) -> Iterator[Path]:
    """Files whose bytes broke that target once."""
    return (path for path in sorted((FOUND / name).glob("*")) if path.is_file())
