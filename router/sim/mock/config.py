"""What does one mock engine pretend to be?

Frozen values, checked at birth. This file never opens anything.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from router.errors import ConfigError
from router.sim.pod import SimPodConfig
from router.types import PodSpeed


class Tokenizer(Protocol):
    """What the mock needs of a tokenizer; the router's own is one."""

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """Token ids of `text`."""


Render: TypeAlias = Callable[[Mapping[str, Any]], str]
"""A chat request's decoded body to the text of its prompt, as `ChatTemplate.render` does, with its errors."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MockEngineConfig:
    """One engine. `time_scale` multiplies every step's time: 0.1 is ten times faster, 0 never waits."""

    models: tuple[str, ...]
    """Served names; the first is the base model."""
    tokenizer: Tokenizer
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
