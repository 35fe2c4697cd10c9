"""How does an engine speak?

What the router must know of an engine kind, as values and pure functions: paths, names of metrics, shapes of answers.
One file an engine derives from this; a table in `catalog.py` names them. This file opens no connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from router.engines.exposition import labels_of, sums
from router.types import Pod


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine's metrics say of its load now. `kv_usage` is 0..1."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Size of an engine's KV cache, as far as it says."""

    block_size_tokens: int | None = None
    num_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class ServedModels:
    """What an engine serves."""

    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    max_model_len_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """Where one pod publishes its KV events."""

    endpoint: str
    replay_endpoint: str | None = None


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None
    meta: dict[str, Any] | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class EngineAdapter:
    """Defaults that most OpenAI-compatible engines share. Every parser returns nothing rather than raise."""

    name: ClassVar[str]
    health_path: ClassVar[str] = "/health"
    metrics_path: ClassVar[str] = "/metrics"
    kv_event_sources_path: ClassVar[str | None] = None
    running_names: ClassVar[tuple[str, ...]] = ()
    waiting_names: ClassVar[tuple[str, ...]] = ()
    kv_usage_names: ClassVar[tuple[str, ...]] = ()
    cache_config_name: ClassVar[str | None] = None

    def parse_load(self, text: str, dp_rank: int | None = None) -> EngineLoad:
        """Load of the whole engine, or of one data-parallel rank."""
        found = sums(text, (*self.running_names, *self.waiting_names, *self.kv_usage_names), dp_rank)
        return EngineLoad(
            running=int(_first(found, self.running_names)),
            waiting=int(_first(found, self.waiting_names)),
            kv_usage=min(max(_first(found, self.kv_usage_names), 0.0), 1.0),
        )

    def parse_cache_config(self, text: str) -> CacheConfig:
        """Block size and number of blocks."""
        if self.cache_config_name is None:
            return CacheConfig()
        labels = labels_of(text, self.cache_config_name)
        block_size = _positive(labels.get("hash_block_size")) or _positive(labels.get("block_size"))
        return CacheConfig(block_size, _positive(labels.get("num_gpu_blocks")))

    def parse_models(self, content: bytes) -> ServedModels:
        """The answer of /v1/models; cards with a parent are adapters."""
        try:
            cards = msgspec.json.decode(content, type=_Cards).data
        except (msgspec.DecodeError, msgspec.ValidationError):
            return ServedModels()
        base = [card for card in cards if card.parent is None]
        lengths = [length for card in base if (length := card.max_model_len)]
        return ServedModels(
            models=tuple(card.id for card in base),
            adapters=tuple(card.id for card in cards if card.parent is not None),
            max_model_len_tokens=min(lengths, default=None),
        )

    def parse_kv_event_sources(self, content: bytes, host: str, dp_rank: int) -> KvEventSource | None:
        """Where rank `dp_rank` publishes, reached over `host`; None where it does not."""
        return None

    def tokenize_request(self, model: str, prompt: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """(path, body) that asks the engine for the tokens of a chat or a text; None where it cannot be asked."""
        return None

    def parse_tokens(self, content: bytes) -> list[int] | None:
        """The answer to that."""
        try:
            return msgspec.json.decode(content, type=_Tokens).tokens
        except (msgspec.DecodeError, msgspec.ValidationError):
            return None

    def extra_headers(self, pod: Pod) -> Mapping[str, str]:
        """Headers that pin a request to the pod's rank."""
        return {}


def on_host(endpoint: str, host: str) -> str:
    """A ZMQ endpoint as others reach it: a wildcard becomes the host that the pod was reached on."""
    shown = f"[{host}]" if ":" in host else host
    for wildcard in ("*", "0.0.0.0", "[::]", "::"):
        if endpoint.startswith(f"tcp://{wildcard}:"):
            return f"tcp://{shown}:" + endpoint.rpartition(":")[2]
    return endpoint


def _first(found: Mapping[str, float], names: tuple[str, ...]) -> float:
    return next((found[name] for name in names if name in found), 0.0)


def _positive(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() and int(text) > 0 else None
