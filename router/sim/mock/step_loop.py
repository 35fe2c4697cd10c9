"""When does each token come out?

Drives a pod against the clock of the event loop: starts a step, lets its time pass, ends it, wakes whoever waits for
the tokens. One engine, one loop, no lock. This file never speaks HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.sim.mock.mock_config import MockEngineConfig
from router.sim.mock.mock_metrics import TTFT_BUCKETS_S, EngineHistogram
from router.sim.pod import RequestId, SimPod, SimRequest, Step
from router.types import KvEvent


class StreamLost(Exception):
    """The rest of this reply will not come: it was cancelled, or the engine restarted."""


class TokenStream:
    """The tokens of one answer as they come out. One reader."""

    __slots__ = (
        *("_loop", "_lost", "_waiter", "_wanted"),
        *("cached_tokens", "garbled", "id", "ready_tokens", "submitted_at_s"),
    )

    def __init__(self, request_id: RequestId, loop: asyncio.AbstractEventLoop) -> None:
        self.id = request_id
        self.ready_tokens = 0
        self.cached_tokens = 0
        self.garbled = False
        self.submitted_at_s = loop.time()
        self._loop = loop
        self._lost = False
        self._wanted = 0
        self._waiter: asyncio.Future[None] | None = None

    async def wait_for(self, tokens: int) -> int:
        """Wait until at least `tokens` are ready; how many there are. `StreamLost` if they will never be."""
        while self.ready_tokens < tokens:
            if self._lost:
                raise StreamLost
            self._wanted = tokens
            self._waiter = self._loop.create_future()
            await self._waiter
        return self.ready_tokens

    def advance(self) -> None:
        """One more token is ready. The reader wakes only for what it waits for."""
        self.ready_tokens += 1
        if self.ready_tokens >= self._wanted:
            self._wake()

    def lose(self) -> None:
        """No further token will come."""
        self._lost = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StepLoop:
    """One engine's steps. `publish` gets the KV events of each step when the step ends."""

    def __init__(self, config: MockEngineConfig, publish: Callable[[tuple[KvEvent, ...]], None]) -> None:
        self._config = config
        self._publish = publish
        self._scale_s_per_ms = config.time_scale / 1000
        self._replies: dict[RequestId, TokenStream] = {}
        self._timer: asyncio.Handle | None = None
        self._due_s = 0.0
        self.pod = SimPod(config.pod)
        self.ttft_s = EngineHistogram(TTFT_BUCKETS_S)

    def submit(self, request: SimRequest) -> TokenStream:
        """Queue a request and, if the engine idles, start a step. `ValueError` as `SimPod.submit`."""
        loop = asyncio.get_running_loop()
        self.pod.submit(request)
        reply = self._replies[request.id] = TokenStream(request.id, loop)
        if self._timer is None:
            self._due_s = loop.time()
            self._begin(loop)
        return reply

    def cancel(self, reply: TokenStream) -> None:
        """Drop a request, its blocks at once, also those that it left pinned. Nothing else happens if it ended."""
        if self._replies.get(reply.id, reply) is reply:
            self._replies.pop(reply.id, None)
            self.pod.cancel(reply.id)
            reply.lose()

    def restart(self) -> None:
        """A new life: an empty pod, and nobody's reply goes on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lost, self._replies = self._replies, {}
        self.pod = SimPod(self._config.pod)
        self.ttft_s = EngineHistogram(TTFT_BUCKETS_S)
        for reply in lost.values():
            reply.lose()

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Steps are due one after the other, not each from when the loop came round: lateness does not add up."""
        duration_ms = self.pod.start_step()
        if duration_ms is None:
            self._timer = None
            return
        self._due_s += duration_ms * self._scale_s_per_ms
        late = self._due_s <= loop.time()
        self._timer = loop.call_soon(self._end, loop) if late else loop.call_at(self._due_s, self._end, loop)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        step = self.pod.end_step()
        if step.events:
            self._publish(step.events)
        self._deliver(step, loop.time())
        self._begin(loop)

    def _deliver(self, step: Step, now_s: float) -> None:
        for request_id, cached_tokens in step.started.items():
            reply = self._replies[request_id]
            reply.cached_tokens = cached_tokens
            reply.garbled = request_id in step.garbled
            self.ttft_s.observe(now_s - reply.submitted_at_s)
        for request_id in step.emitted:
            self._replies[request_id].advance()
        for request_id in step.finished:
            del self._replies[request_id]
