"""Configuration of a mock engine: frozen values."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from loadtest.engine_model.pod import SimPodConfig
from router.prompt.template import ChatTemplate
from router.types import BlockHash, Link, Role


class TextEncoder(Protocol):
    """The part of a tokenizer that the mock engine uses."""

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """Token ids of `text`."""


class TextCodec(TextEncoder, Protocol):
    vocabulary_size: int

    def decode_stream(self, prompt: array[int], *, skip_special_tokens: bool) -> Callable[[int], str | None]:
        """Decodes the tokens behind `prompt` one by one, as vLLM does."""


_Render: TypeAlias = Callable[[Mapping[str, Any]], str]
"""Renders a decoded chat body to its prompt. Raises the errors of `ChatTemplate.render`."""

HandoffDialect: TypeAlias = Literal["", "nixl", "mooncake", "bootstrap", "trtllm", "shared_store", "p2p"]
"""KV handoff protocol; empty: none."""

EventEncoding: TypeAlias = Literal["map", "array"]
"""Wire format of KV events; `array` is vLLM 0.23, whose replay answers have no topic frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventConfig:
    """KV event sockets. Port 0 selects a free port."""

    port: int = 0
    replay_port: int = 0
    encoding: EventEncoding = "map"
    buffer_steps: int = 10_000


RDMA = Link(t0_ms=0.37, bytes_per_ms=137e6)
"""Mooncake between two vLLM pods over 8 RoCE ports, as measured (docs/cost-model.md#transfer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """KV handoff between engines.

    `lease_s` and `wait_s` are not scaled by `time_scale`. Real engines hold KV for a decode leg 30 s (nixl) to 480 s
    (mooncake); a decode leg waits 30 s (p2p), 300 s (SGLang) or 480 s (mooncake).
    """

    dialect: HandoffDialect = ""
    role: Role = Role.BOTH
    """Only `bootstrap` requires a role, because both of its legs have the same body."""
    bidirectional: bool = False
    """For `nixl`: vLLM's `bidirectional_kv_xfer`. A decode leg's answer offers its KV, held for `offer_ttl_s`."""
    offer_ttl_s: float = 480.0
    streams_offers: bool = False
    """Whether streams have offers, as in vLLM 0.33: null in all chunks but the finishing one."""
    lease_s: float = 30.0
    wait_s: float = 30.0
    link: Link = RDMA
    """Link for all KV transfers; `time_scale` applies to it."""
    kv_bytes_per_token: int = 131_072
    store: set[BlockHash] = field(default_factory=set)
    """For `shared_store`: the blocks in the store. Engines share a store by sharing this set."""
    keeps_answers: bool = True
    """For `shared_store` and `p2p`: whether peers find answers, as with vLLM's `save_decode_cache: true` and
    `offload_prompt_only: false`, or prompts alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MockEngineConfig(SimPodConfig):
    """One engine and its pod. `time_scale` multiplies the time of each step: 0.1 is ten times faster, 0 never waits."""

    models: tuple[str, ...]
    """Served names; the first is the base model."""
    tokenizer: TextCodec
    render: _Render
    template: ChatTemplate | None = None
    """The template that `render` uses; without it, conversions of other APIs refuse what depends on the template."""
    adapters: tuple[str, ...] = ()
    front_end: Literal["", "rust"] = ""
    """`rust`: vLLM's front end in Rust, which lacks a part of the paths (0.33)."""
    misreads: str = ""
    """A rule of `router/apis/chat_rules.py` that is broken; empty: none."""
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str = field(default="", repr=False)
    """Required as `authorization: Bearer KEY`; empty: none is required."""
    price: tuple[float, float, float] | None = None
    """Prices of a million prompt tokens, cached ones and output tokens: /metrics then has the bill of all answers."""
    time_scale: float = 1.0
    max_model_len: int = 32_768
    """At most what the cache holds."""
    stream_interval: int = 1
    """Tokens per chunk of a stream."""
    wake_s: float | None = None
    """How long it takes to wake up from sleep mode; None: it has no such mode (no `VLLM_SERVER_DEV_MODE`)."""
    forces_usage: bool = False
    """Whether each chunk has usage, as with vLLM's `--enable-force-include-usage`."""
    kv_events: KvEventConfig | None = KvEventConfig()
    """None for an engine that publishes no KV events."""
    metrics_filter: Literal["names", "ignored", "empty"] = "names"
    """What `/metrics?name[]=` returns: the samples with these names, as vLLM with one API server, the whole page, as
    SGLang, or nothing, as vLLM with several API servers."""
    handoff: HandoffConfig = HandoffConfig()
