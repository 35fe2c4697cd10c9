"""The base class of engine adapters, with the defaults of OpenAI-compatible engines, and the values they return.

An adapter is pure: it names paths, builds bodies and reads answers, and never sends anything. An answer may be garbage:
an adapter returns None and never raises.
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
"""Response bodies of a pod by path; only those with status 200."""

Call: TypeAlias = tuple[str, dict[str, Any]]
"""A POST: path, and body to encode as JSON."""


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """The ZMQ addresses of one pod's KV events, as a subscriber connects to them."""

    endpoint: str
    replay_endpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """What a pod reports about itself."""

    models: tuple[str, ...]
    adapters: tuple[str, ...] = ()
    version: str = ""
    """Of the engine; empty where it is not reported."""
    max_model_len_tokens: int | None = None
    block_size_tokens: int | None = None
    """Block size of its prefix cache and its KV events."""
    capacity_tokens: int | None = None
    kv_events: KvEventSource | None = None
    """None where it publishes none, or where the pod's rank is ambiguous."""


class EngineAdapter:
    """One engine's paths, metrics and bodies. An engine overrides what differs from these defaults."""

    health_path: str = "/health"
    """Cheap enough for one request a second; 200 means healthy."""
    metrics_path: str = "/metrics"
    gauges: LoadGauges
    describe_paths: tuple[str, ...] = (MODELS_PATH,)
    """Paths that `describe` reads; only the first is required."""
    returns_token_ids: bool = False
    """The engine accepts `return_token_ids` and answers with the prompt's tokens. Where False, the field must not be
    sent: some engines refuse unknown fields."""

    def describe(self, answers: Answers, pod: Pod) -> PodFacts | None:
        """The pod's facts, for the rank of `pod`; None while it reports no models."""
        served = parse_models(answers.get(MODELS_PATH, b""))
        if served is None:
            return None
        return PodFacts(
            models=served.models, adapters=served.adapters, max_model_len_tokens=served.max_model_len_tokens
        )

    def parse_load(self, metrics: bytes, dp_rank: int | None, now_s: float) -> PodLoad | None:
        """Running, waiting and KV usage of one rank; for None, requests summed and usage averaged over all ranks."""
        return read_load(metrics, self.gauges, dp_rank, now_s)

    def tokenize_request(self, model: str, prompt: Mapping[str, Any]) -> Call | None:
        """The call that tokenizes a prompt, given as the request's prompt fields. None where its result might differ
        from the tokens of the real request."""
        return None

    def parse_tokens(self, answer: bytes) -> list[int] | None:
        """Token ids from the answer to `tokenize_request`."""
        return parse_tokens(answer)

    def extra_headers(self, pod: Pod) -> Mapping[str, str]:
        """Request headers that select this pod's rank behind a shared port."""
        return {} if pod.dp_rank is None else {"x-data-parallel-rank": str(pod.dp_rank)}


def on_pod(endpoint: str, pod: Pod) -> str:
    """A ZMQ address in which a wildcard host is replaced by the pod's. Any other address stays as it is."""
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or host not in ("*", "[::]", "::", "0.0.0.0"):
        return endpoint
    name = urlsplit(pod.url).hostname or ""
    return f"tcp://{f'[{name}]' if ':' in name else name}:{port}"
