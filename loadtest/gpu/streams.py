"""Sends prompts of tokens to one pod and records when each token of the response arrives."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import TypeAlias

import msgspec

from router.config.schema import Limits
from router.frontends.http.headers import request_message
from router.frontends.http.upstream import UpstreamPool

TIMEOUT_S = 10.0
TIMEOUTS = Limits(connect_timeout_s=5.0, first_byte_timeout_s=60.0, idle_timeout_s=60.0)
TOKENS = range(1_000, 100_000)
"""Alphabet of the prompts."""
ANSWER_TOKEN = 67
"""The only allowed output token."""
COUNTERS = {
    "prefill_ms": "vllm:request_prefill_time_seconds",
    "queue_ms": "vllm:request_queue_time_seconds",
    "itl_ms": "vllm:inter_token_latency_seconds",
}
Counters: TypeAlias = Mapping[str, tuple[float, float]]
"""Sum and number of values, by name."""
_HEADERS = [(b"content-type", b"application/json")]
_CHOICE = b'"choices":[{'
_CACHED = re.compile(rb'"cached_tokens":\s*(\d+)')


@dataclass(slots=True)
class Streamed:
    """One response. `tokens_s` has the arrival of each token on the clock of `sent_s`."""

    sent_s: float
    tokens_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        return (self.tokens_s[0] - self.sent_s) * 1000

    def gaps_ms(self, first: int = 0) -> list[float]:
        """Times between tokens, from token `first` on."""
        times = self.tokens_s[first:]
        return [(after - before) * 1000 for before, after in pairwise(times)]


@dataclass(slots=True)
class PodClient:
    """Talks to one vLLM pod."""

    url: str
    model: str
    _pool: UpstreamPool = field(init=False)

    def __post_init__(self) -> None:
        self._pool = UpstreamPool(self.url, self.url, TIMEOUTS)

    async def stream(self, prompt: Sequence[int], output_tokens: int) -> Streamed:
        """A completion of exactly that many tokens. Raises `RuntimeError` if the pod refuses it."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "allowed_token_ids": [ANSWER_TOKEN],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        message = request_message(
            "POST", b"/v1/completions", self._pool.host_header, _HEADERS, msgspec.json.encode(body)
        )
        result = Streamed(time.perf_counter())
        reply = await self._pool.exchange(message)
        tail = b""
        try:
            while data := await reply.read():
                now_s = time.perf_counter()
                result.tokens_s += [now_s] * data.count(_CHOICE)
                tail = (tail + data)[-2000:]
            if reply.status != 200:
                raise RuntimeError(f"status {reply.status}: {tail!r}")
        finally:
            reply.close()
        found = _CACHED.search(tail)
        result.cached_tokens = int(found[1]) if found else 0
        return result

    async def counters(self) -> Counters:
        """Sum and number of the pod's own measurements, in milliseconds, by the names of `COUNTERS`."""
        text = (await self._pool.fetch("/metrics", TIMEOUT_S)).decode()
        return {
            name: (_value(text, f"{metric}_sum") * 1000, _value(text, f"{metric}_count"))
            for name, metric in COUNTERS.items()
        }

    async def kv_cache(self) -> Mapping[str, str]:
        """What the pod says of its KV cache: number and size of blocks, among others."""
        text = (await self._pool.fetch("/metrics", TIMEOUT_S)).decode()
        found = re.search(r"^vllm:cache_config_info{(.*)}", text, re.MULTILINE)
        return dict(re.findall(r'(\w+)="([^"]*)"', found[1])) if found else {}

    async def forget(self) -> None:
        """Drop the blocks in GPU memory; those in a CPU tier stay."""
        await self._pool.fetch("/reset_prefix_cache", TIMEOUT_S, json=b"{}")

    def close(self) -> None:
        self._pool.close()


def mean_between(before: Counters, after: Counters, name: str) -> float | None:
    """Mean in milliseconds of what the pod measured in between; None if it measured nothing."""
    number = after[name][1] - before[name][1]
    return (after[name][0] - before[name][0]) / number if number else None


def made_up(random: Random, tokens: int) -> list[int]:
    """Tokens that no other prompt has."""
    return random.choices(TOKENS, k=tokens)


def _value(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))
