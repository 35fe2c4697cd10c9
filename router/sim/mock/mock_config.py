"""What does one mock engine pretend to be?

Frozen values, checked at birth. This file never opens anything.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from router.errors import ConfigError
from router.sim.mock.shared_block_store import SharedBlockStore
from router.sim.pod import SimPodConfig
from router.types import Link, PodSpeed, Role


class TextEncoder(Protocol):
    """What the mock needs of a tokenizer; the router's own is one."""

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """Token ids of `text`."""


Render: TypeAlias = Callable[[Mapping[str, Any]], str]
"""A chat request's decoded body to the text of its prompt, as `ChatTemplate.render` does, with its errors."""

HandoffDialect: TypeAlias = Literal["", "nixl", "mooncake", "bootstrap", "trtllm", "shared_store", "p2p"]
"""How KV gets from one engine to another; empty: not at all."""

EventEncoding: TypeAlias = Literal["map", "array"]

_RELEASES: Mapping[EventEncoding, str] = {"map": "0.32.0", "array": "0.23.0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventConfig:
    """How KV events leave the engine. Port 0 lets the system choose.

    `encoding` decides for the whole wire of that time: `array` is vLLM 0.23, whose replay answers have no topic frame.
    """

    port: int = 0
    replay: bool = True
    replay_port: int = 0
    encoding: EventEncoding = "map"
    topic: str = ""
    buffer_steps: int = 10_000
    delay_s: float = 0.0


RDMA = Link(t0_ms=0.37, bytes_per_ms=137e6)
"""Mooncake between two vLLM pods over 8 RoCE ports, as measured (reference/cost-model.md 4.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """How this engine hands KV to others and takes it from them.

    Leases and waits are in real seconds, whatever the time scale: engines hold KV 30 s (nixl) to 480 s (mooncake) for a
    decode leg, which waits 30 s (p2p), 300 s (SGLang) or 480 s (mooncake) for it.
    """

    dialect: HandoffDialect = ""
    role: Role = Role.BOTH
    """Only SGLang's dialect asks for it: there both legs get the same body."""
    lease_s: float = 30.0
    wait_s: float = 30.0
    link: Link = RDMA
    """Every way that KV takes into this engine or out of it; its times are scaled as the steps' are."""
    kv_bytes_per_token: int = 131_072
    side_port: int | None = None
    """Where peers reach this engine (nixl 5600, mooncake and SGLang 8998, p2p 5710); None: on its HTTP port, 0: on any
    free one."""
    store: SharedBlockStore = field(default_factory=SharedBlockStore)
    """For shared_store: engines that are given one and the same share their blocks."""

    def __post_init__(self) -> None:
        if self.dialect == "bootstrap" and self.role is Role.BOTH:
            raise ConfigError("mock engine: with the bootstrap dialect, an engine is either prefill or decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class MockEngineConfig:
    """One engine. `time_scale` multiplies every step's time: 0.1 is ten times faster, 0 never waits."""

    models: tuple[str, ...]
    """Served names; the first is the base model."""
    tokenizer: TextEncoder
    render: Render
    speed: PodSpeed
    adapters: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    time_scale: float = 1.0
    block_size_tokens: int = 16
    num_blocks: int = 4096
    step_budget_tokens: int = 8192
    max_num_seqs: int = 256
    max_model_len: int = 32_768
    kv_events: KvEventConfig | None = KvEventConfig()
    handoff: HandoffConfig = HandoffConfig()

    def __post_init__(self) -> None:
        capacity_tokens = self.num_blocks * self.block_size_tokens
        if self.max_model_len > capacity_tokens:
            raise ConfigError(
                f"mock engine: max_model_len {self.max_model_len} exceeds a cache of {capacity_tokens} tokens"
            )
        if not self.models:
            raise ConfigError("mock engine: models is empty")
        if self.time_scale < 0:
            raise ConfigError(f"mock engine: time_scale {self.time_scale} is negative")

    @property
    def pod(self) -> SimPodConfig:
        """The part that the scheduler knows."""
        return SimPodConfig(
            speed=self.speed,
            num_blocks=self.num_blocks,
            block_size_tokens=self.block_size_tokens,
            step_budget_tokens=self.step_budget_tokens,
            max_num_seqs=self.max_num_seqs,
        )

    @property
    def release(self) -> str:
        """The vLLM release whose wire this engine speaks."""
        return _RELEASES[self.kv_events.encoding if self.kv_events else "map"]

    @property
    def reuses_tokens(self) -> bool:
        """Does a chat with `prompt_token_ids` among its `kv_transfer_params` skip the template? vLLM does from 0.27."""
        return self.kv_events is None or self.kv_events.encoding == "map"
