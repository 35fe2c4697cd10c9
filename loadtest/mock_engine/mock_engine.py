"""Mock engines: vLLM's HTTP and ZMQ interfaces over a simulated pod.

A mock engine has real block accounting and the timing of a model on given hardware, but computes nothing. The demo, the
tests and the load tests use fleets of them. Their parts are in `loadtest/mock_engine`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Self

import uvicorn
from uvicorn.server import ServerState

from loadtest.mock_engine.event_publisher import KvPublisher
from loadtest.mock_engine.faults import ENGINE_FAULTS, Fault, FaultBoard, FaultKind
from loadtest.mock_engine.handoff_service import HandoffService
from loadtest.mock_engine.http_exchange import EngineProtocol
from loadtest.mock_engine.mock_app import EngineApp
from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_requests import core_died
from loadtest.mock_engine.step_loop import StepLoop
from router.addresses import join_address, url_address
from router.types import KvEvent, PodLoad

LISTEN_BACKLOG = 2048
TURNS_TO_ACCEPT = 3
"""Turns of the event loop from the `accept` of a connection until its protocol knows it."""


class MockEngine:
    """One engine, also as an async context manager. A restart keeps the ports of the first start."""

    def __init__(self, config: MockEngineConfig) -> None:
        self.config = config
        self.faults = FaultBoard()
        self._kv_events = config.kv_events
        self._publisher: KvPublisher | None = None
        self._steps = StepLoop(config, self._publish)
        self._handoffs = HandoffService(config, self._steps, self.faults, lambda: (config.host, self.port))
        app = EngineApp(config, self._steps, self.faults, self._handoffs, self._event_sources, self.inject)
        self._http = uvicorn.Config(
            app, lifespan="off", ws="none", proxy_headers=False, access_log=False, log_config=None
        )
        self._http_state = ServerState()
        self.port = config.port
        """0 until the first start, if the configuration has no port."""
        self._server: asyncio.Server | None = None
        self._healing: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://{join_address(self.config.host, self.port)}"

    @property
    def pinned_requests(self) -> tuple[str, ...]:
        return self._handoffs.pins.keys

    @property
    def kv_endpoint(self) -> str:
        """ZMQ address of the PUB socket; valid after `start` of an engine with events."""
        assert self._publisher is not None
        return self._publisher.endpoint

    @property
    def kv_replay_endpoint(self) -> str:
        """ZMQ address of the ROUTER socket for replay; valid after `start` of an engine with events."""
        assert self._publisher is not None
        return self._publisher.replay_endpoint

    @property
    def published_event_count(self) -> int:
        return self._publisher.event_count if self._publisher else 0

    @property
    def load(self) -> PodLoad:
        return self._steps.pod.load

    async def start(self) -> None:
        """Bind all ports or none. Raises `OSError` or `zmq.ZMQError` if a port is in use."""
        self._open_publisher()
        try:
            await self._listen()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Close everything, including running responses. The ports are free on return."""
        self._stop_listening()
        self._handoffs.restart()
        self._steps.restart()
        self._close_publisher()
        for _ in range(TURNS_TO_ACCEPT):
            await asyncio.sleep(0)
        self._drop_connections(flush=False)
        while self._http_state.tasks:
            await asyncio.wait(self._http_state.tasks)

    async def drain(self, timeout_s: float | None) -> None:
        """Refuse new connections, and return when the running responses are complete or time is up."""
        self._close_idle()
        if tasks := self._http_state.tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def terminate(self, drain_timeout_s: float) -> None:
        """Stop as vLLM on SIGTERM: drain, then let the streams that are left fall silent. Return when their clients
        have closed them."""
        await self.drain(drain_timeout_s)
        self.inject(Fault(kind=FaultKind.TERMINATE))
        await self.drain(None)

    def inject(self, fault: Fault) -> None:
        """Arm a fault, or apply it now if its kind is immediate."""
        if fault.kind in ENGINE_FAULTS and fault.after_chunks is not None:
            self.faults.arm(fault)
        elif fault.kind is FaultKind.RESTART:
            self._restart()
        elif fault.kind is FaultKind.REFUSE:
            self._refuse(fault.for_s)
        elif fault.kind is FaultKind.DIE:
            self._restart()
            self._refuse(fault.for_s)
        elif fault.kind is FaultKind.TERMINATE:
            self._close_idle()
            self._steps.halt()
        elif fault.kind is FaultKind.CORE_DIES:
            self.faults.arm(Fault(kind=FaultKind.UNHEALTHY, count=None))
            error = core_died()
            self.faults.arm(Fault(kind=FaultKind.STATUS, count=None, message=str(error)))
            self._steps.restart(error)
        elif fault.kind is FaultKind.THROTTLE:
            self._steps.slowdown = fault.factor
        elif fault.kind is FaultKind.SLOW_LINK:
            self._handoffs.slowdown = fault.factor
        else:
            self.faults.arm(fault)

    async def heal(self) -> None:
        """Remove all faults and accept connections again."""
        self.faults.clear()
        if self._server is None:
            await self._listen()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # --- HTTP ---

    async def _listen(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(
            lambda: EngineProtocol(self._http, self._http_state, lambda: self._server is not None),
            self.config.host,
            self.port,
            backlog=LISTEN_BACKLOG,
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def _stop_listening(self) -> None:
        if self._healing is not None:
            self._healing.cancel()
            self._healing = None
        if self._server is not None:
            self._server.close()
            self._server = None

    def _close_idle(self) -> None:
        self._stop_listening()
        for connection in list(self._http_state.connections):
            connection.shutdown()  # at once where it is idle, else after its response

    def _drop_connections(self, *, flush: bool) -> None:
        """Close all connections. With `flush`, data that is already written is sent first."""
        for connection in list(self._http_state.connections):
            if flush:
                connection.transport.close()
            else:
                connection.transport.abort()

    def _refuse(self, for_s: float | None) -> None:
        self._stop_listening()
        self._drop_connections(flush=True)
        if for_s is not None:
            self._healing = asyncio.get_running_loop().create_task(self._listen_after(for_s))

    async def _listen_after(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        self._healing = None
        await self._listen()

    def _restart(self) -> None:
        self._handoffs.restart()
        self._steps.restart()
        self._drop_connections(flush=True)
        self._close_publisher()
        self._open_publisher()

    # --- KV events ---

    def _open_publisher(self) -> None:
        """The first epoch may select free ports; later epochs bind the same ports."""
        if self._kv_events is None:
            return
        self._publisher = KvPublisher(self._kv_events, self.config.host, self.faults)
        self._kv_events = replace(
            self._kv_events,
            port=url_address(self._publisher.endpoint)[1],
            replay_port=url_address(self._publisher.replay_endpoint)[1],
        )

    def _close_publisher(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _event_sources(self) -> dict[str, Any]:
        """Event sockets by rank, as `GET /kv_event_sources` lists them."""
        return {"0": self._publisher.source} if self._publisher else {}

    def _publish(self, events: tuple[KvEvent, ...]) -> None:
        if self._publisher is not None:
            self._publisher.publish(events)


@asynccontextmanager
async def running_engines(configs: Sequence[MockEngineConfig]) -> AsyncIterator[list[MockEngine]]:
    """Run several engines in one event loop: all of them, or none."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(MockEngine(config)) for config in configs]


async def serve(
    configs: Sequence[MockEngineConfig], ready: Callable[[Sequence[MockEngine]], None], drain_timeout_s: float
) -> None:
    """Run engines until SIGINT, or until they have ended on SIGTERM. `ready` is called once all engines listen."""
    loop = asyncio.get_running_loop()
    interrupted, terminated = asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    loop.add_signal_handler(signal.SIGTERM, terminated.set)
    async with running_engines(configs) as engines:

        async def terminate() -> None:
            await terminated.wait()
            await asyncio.gather(*(engine.terminate(drain_timeout_s) for engine in engines))

        ready(engines)
        ends: list[asyncio.Task[Any]] = [loop.create_task(terminate()), loop.create_task(interrupted.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
