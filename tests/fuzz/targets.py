"""The table of fuzz targets with their seeds and words.

A target accepts any bytes and raises only failed assertions: it suppresses the documented errors of its parser.
`found/NAME` keeps the inputs that broke the target NAME.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import bodies, documents, edge, engines, evil_pod, evil_tenant, pods, prompts, stored

FOUND = Path(__file__).parent / "found"


@dataclass(frozen=True, slots=True)
class Target:
    """`seeds` are small real examples; `words` are tokens of the format for the fuzzer to insert. Inputs have at most
    `max_bytes`."""

    run: Callable[[bytes], None]
    seeds: Sequence[bytes]
    words: Sequence[bytes] = ()
    max_bytes: int = 1024
    uses_network: bool = False
    """Whether it runs a whole router, over sockets."""


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
    "pod": Target(evil_pod.pods, evil_pod.PODS, evil_pod.POD_WORDS, 8192, uses_network=True),
    "tenant": Target(evil_tenant.tenants, evil_tenant.TENANTS, evil_tenant.TENANT_WORDS, 8192, uses_network=True),
    "config": Target(documents.config, documents.CONFIGS, documents.YAML_WORDS),
    "policies": Target(documents.policies, documents.POLICIES, documents.YAML_WORDS),
}


def found(name: str) -> Iterator[Path]:
    """Files whose bytes broke that target."""
    return (path for path in sorted((FOUND / name).glob("*")) if path.is_file())
