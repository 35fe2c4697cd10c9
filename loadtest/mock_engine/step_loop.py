"""Runs a simulated pod in real time: starts a step, waits for its duration, ends it and delivers its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from loadtest.engine_model.pod import PodStep, RequestId, SimPod, SimRequest
from loadtest.mock_engine.mock_config import MockEngineConfig
from router.types import KvEvent


class StreamLost(Exception):
    """The stream ended early: the request was cancelled or the engine restarted."""


@dataclass(slots=True, eq=False)
class TokenStream:
    """The tokens of one request as they are generated, for one reader."""

    id: RequestId
    ready_tokens: int = 0
    cached_tokens: int = 0
    _lost: Exception | None = None
    _wanted: int = 0
    _waiter: asyncio.Future[None] | None = None

    async def wait_for(self, tokens: int) -> int:
        """Wait until at least `tokens` are ready and return how many are. Raises `StreamLost` or the error of
        `restart`."""
        while self.ready_tokens < tokens:
            if self._lost is not None:
                raise self._lost
            self._wanted = tokens
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.ready_tokens

    def advance(self) -> None:
        """One more token is ready. Wakes the reader when enough are."""
        self.ready_tokens += 1
        if self.ready_tokens >= self._wanted:
            self._wake()

    def lose(self, error: Exception) -> None:
        """End the stream early: `wait_for` raises `error`."""
        self._lost = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StepLoop:
    """The steps of one engine. `publish` is called with the KV events of each step at its end."""

    def __init__(self, config: MockEngineConfig, publish: Callable[[tuple[KvEvent, ...]], None]) -> None:
        self._config = config
        self._publish = publish
        self._scale_s_per_ms = config.time_scale / 1000
        self.slowdown = 1.0
        """Factor on the time of each step that begins from now on."""
        self._streams: dict[RequestId, TokenStream] = {}
        self._timer: asyncio.Handle | None = None
        self._step_end_s = 0.0
        self.pod = SimPod(config)

    def submit(self, request: SimRequest) -> TokenStream:
        """Queue a request and start a step if the engine is idle. Raises `ValueError` as `SimPod.submit`."""
        loop = asyncio.get_running_loop()
        self.pod.submit(request)
        stream = self._streams[request.id] = TokenStream(request.id)
        if self._timer is None:
            self._step_end_s = loop.time()
            self._begin(loop)
        return stream

    def cancel(self, stream: TokenStream) -> None:
        """Drop a request and release its blocks. A finished request may still have pinned blocks."""
        if self._streams.get(stream.id, stream) is stream:
            self._streams.pop(stream.id, None)
            self.pod.cancel(stream.id)
            stream.lose(StreamLost())

    def halt(self) -> None:
        """End no more steps, until `restart`."""
        if self._timer is not None:
            self._timer.cancel()

    def restart(self, error: Exception | None = None) -> None:
        """Replace the pod with an empty one and end all streams, with `error` or as lost."""
        self.halt()
        self._timer = None
        lost, self._streams = self._streams, {}
        self.pod = SimPod(self._config)
        for stream in lost.values():
            stream.lose(error or StreamLost())

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Each step is due relative to the previous due time, so that delays of the event loop do not accumulate."""
        duration_ms = self.pod.start_step()
        if duration_ms is None:
            self._timer = None
            return
        self._step_end_s += duration_ms * self._scale_s_per_ms * self.slowdown
        self._timer = loop.call_at(self._step_end_s, self._end, loop)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        step = self.pod.end_step()
        if step.events:
            self._publish(step.events)
        self._deliver(step)
        self._begin(loop)

    def _deliver(self, step: PodStep) -> None:
        for request_id, cached_tokens in step.started.items():
            self._streams[request_id].cached_tokens = cached_tokens
        for request_id in step.emitted:
            self._streams[request_id].advance()
        for request_id in step.finished:
            del self._streams[request_id]
