"""Pods that answer by scripts, in virtual time: each script reports the events of one attempt to the core."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from router.decision import Direct
from router.errors import UpstreamError
from router.request.context import RequestContext
from router.request.fleet_state import Clock
from tests.kit.cores import CoreOfPods, pods_at
from tests.kit.memory_front import MemoryExchange

Script: TypeAlias = Callable[[MemoryExchange], None]

USAGE = {"prompt_tokens": 50, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 48}}
WHOLE = json.dumps({"choices": [{"index": 0, "message": {"content": "hello"}}], "usage": USAGE}).encode()
TOKEN = b'data: {"choices":[{"delta":{"content":"hello"}}]}\n\n'
LAST = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\ndata: [DONE]\n\n"


def responding(status: int, *pieces: bytes, is_stream: bool = False) -> Script:
    """A whole response."""

    def respond(exchange: MemoryExchange) -> None:
        if exchange.head(status, is_stream=is_stream) and all(map(exchange.piece, pieces)):
            exchange.end()

    return respond


def failing(error: type[UpstreamError], after: bytes = b"", **facts: Any) -> Script:
    """A failure, of a stream after its first piece where there is one."""

    def fail(exchange: MemoryExchange) -> None:
        if after:
            exchange.head()
            exchange.piece(after)
        exchange.fail(error("gone", pod=exchange.asked[-1], **facts))

    return fail


def serving(exchange: MemoryExchange) -> None:
    """The response that the client wants."""
    assert exchange.context is not None
    is_stream = exchange.context.request.stream
    responding(200, *((TOKEN, LAST) if is_stream else (WHOLE,)), is_stream=is_stream)(exchange)


class ScriptedPods(CoreOfPods):
    """A core whose pods answer by `scripts`, which may be changed at any time, and a clock that tests move."""

    def __init__(self, retries: int = 2, **scripts: Script) -> None:
        self.now_s, self.scripts = 100.0, scripts
        clock = Clock(lambda: self.now_s, lambda: self.now_s)
        super().__init__(pods_at({name: f"http://{name}" for name in scripts}), retries=retries, clock=clock)

    def plans(self) -> list[Direct]:
        """Each pod alone."""
        return [Direct(self.pod(name)) for name in self.scripts]

    def serve(self, context: RequestContext) -> MemoryExchange:
        """One request through all its attempts."""
        exchange = MemoryExchange(self.core, context)
        self.core.counters.requests_began(1)
        exchange.attempt_decided()
        while not exchange.is_over:
            self.scripts[exchange.asked[-1]](exchange)
        return exchange

    def chat(self, **fields: Any) -> MemoryExchange:
        """Serve a chat that may go to each pod, in their order."""
        return self.serve(self.context(*self.plans(), **fields))

    def held_against(self, pods: Iterable[str]) -> list[tuple[int, int]]:
        """Failures and doubts of each pod."""
        return [(self.failures(pod), self.doubts(pod)) for pod in pods]
