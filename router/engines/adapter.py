"""What must be known of an engine to speak with it?

The class that each engine's file derives from, with what OpenAI-compatible engines have in common, and the values that
come out of it. An adapter is pure: it names paths, builds bodies and reads answers. It never sends anything, and what
it reads may be garbage: it returns None, never raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from router.engines.openai import MODELS_PATH, parse_models, parse_tokens
from router.engines.prometheus import LoadGauges, read_load
from router.types import Pod, PodLoad

Answers: TypeAlias = Mapping[str, bytes]
"""Bodies of a pod's answers by path; a path that did not answer with 200 is missing."""

Call: TypeAlias = tuple[str, dict[str, Any]]
"""A POST: the path and the body to encode as JSON."""


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """The ZMQ addresses of one pod's KV events, as a subscriber connects to them."""

    endpoint: str
    replay_endpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """What a pod says of itself when asked."""

    models: tuple[str, ...]
    adapters: tuple[str, ...] = ()
    version: str = ""
    """Of the engine; empty where it does not say."""
    max_model_len_tokens: int | None = None
    block_size_tokens: int | None = None
    """The granule of its prefix cache, and of its KV events."""
    capacity_tokens: int | None = None
    kv_events: KvEventSource | None = None
    """None where it publishes none, or none that could be told apart by rank."""


class EngineAdapter:
    """How one engine speaks; what stands here holds for every engine that does not say otherwise."""

    health_path: str = "/health"
    """Cheap enough to be asked every second; 200 means healthy."""
    metrics_path: str = "/metrics"
    gauges: LoadGauges
    describe_paths: tuple[str, ...] = (MODELS_PATH,)
    """Everything that `describe` can use; the first must answer."""
    returns_token_ids: bool = False
    """Takes `return_token_ids` and answers with the prompt's tokens. Where False the field must not be sent: some
    engines refuse a body with a field that they do not know."""

    def describe(self, answers: Answers, pod: Pod) -> PodFacts | None:
        """What the pod is; None while it does not name its models. `pod` says which rank is meant."""
        served = parse_models(answers.get(MODELS_PATH, b""))
        if served is None:
            return None
        return PodFacts(
            models=served.models, adapters=served.adapters, max_model_len_tokens=served.max_model_len_tokens
        )

    def parse_load(self, metrics: bytes, dp_rank: int | None, now_s: float) -> PodLoad | None:
        """Running, waiting and KV usage: of one rank, or (None) requests summed and usage averaged over all."""
        return read_load(metrics, self.gauges, dp_rank, now_s)

    def tokenize_request(self, model: str, prompt: Mapping[str, Any]) -> Call | None:
        """Ask for the tokens of a prompt, given as the fields of the request that decide them. None where the answer
        would not, or might not, be what the engine makes of the real request."""
        return None

    def parse_tokens(self, answer: bytes) -> list[int] | None:
        """Token ids from the answer to `tokenize_request`."""
        return parse_tokens(answer)

    def extra_headers(self, pod: Pod) -> Mapping[str, str]:
        """What must stand in a request's headers so that it reaches this pod's rank behind a shared port."""
        return {} if pod.dp_rank is None else {"x-data-parallel-rank": str(pod.dp_rank)}


def on_pod(endpoint: str, pod: Pod) -> str:
    """A ZMQ address with a wildcard host replaced by the pod's. Any other address is taken as bound by the engine."""
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or host not in ("*", "[::]", "::", "0.0.0.0"):
        return endpoint
    known = urlsplit(pod.url).hostname or ""
    return f"tcp://{f'[{known}]' if ':' in known else known}:{port}"
