"""vLLM's sleep mode, as with `VLLM_SERVER_DEV_MODE=1`: the paths that send an engine to sleep and wake it.

At level 1 the weights are in the memory of the host. At level 2 they are gone: the engine is of use again when they
have been loaded (`/collective_rpc` with `reload_weights`). At level 0 it is only paused. From level 1 on, the cache is
gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import parse_qs

from loadtest.mock_engine.http_exchange import HttpExchange
from loadtest.mock_engine.mock_requests import EngineError, decode_body
from loadtest.mock_engine.mock_responses import encode

TAGS = frozenset({"weights", "kv_cache"})
STATES = {1: "weights_offloaded", 2: "discard_all"}


class SleepMode:
    """`wake_s`: how long it takes to get the weights back, of either level."""

    def __init__(self, wake_s: float, clear_cache: Callable[[], object]) -> None:
        self._wake_s = wake_s
        self._clear_cache = clear_cache
        self._is_paused = False
        self._level = 0
        self._asleep: frozenset[str] = frozenset()
        """Tags of memory that it does not have."""
        self._lacks_weights = False

    @property
    def is_sleeping(self) -> bool:
        return self._is_paused or bool(self._asleep)

    def check(self) -> None:
        """Refuse a request while it sleeps, as by default, and where the real one would answer nonsense."""
        if self.is_sleeping:
            raise EngineError("The engine is sleeping.", status=HTTPStatus.SERVICE_UNAVAILABLE)
        if self._lacks_weights:
            raise EngineError("The engine has no weights.", status=HTTPStatus.INTERNAL_SERVER_ERROR)

    def metrics(self, labels: str) -> bytes:
        state = STATES.get(self._level, "awake")
        lines = (
            f'vllm:engine_sleep_state{{{labels},sleep_state="{one}"}} {float(one == state)}'
            for one in ("awake", *STATES.values())
        )
        return ("# TYPE vllm:engine_sleep_state gauge\n" + "\n".join(lines) + "\n").encode()

    async def handle_is_sleeping(self, exchange: HttpExchange) -> None:
        await exchange.respond(HTTPStatus.OK, encode({"is_sleeping": self.is_sleeping}))

    async def handle_sleep(self, exchange: HttpExchange) -> None:
        level = int(parse_qs(exchange.query).get("level", ["1"])[0])
        self._is_paused, self._level = True, level
        if level:
            self._asleep, self._lacks_weights = TAGS, level == 2
            self._clear_cache()
        await exchange.respond(HTTPStatus.OK, encode({"status": "sleeping", "level": level}))

    async def handle_wake_up(self, exchange: HttpExchange) -> None:
        tags = frozenset(parse_qs(exchange.query).get("tags", TAGS))
        if self._level == 1 and "weights" in tags & self._asleep:
            await asyncio.sleep(self._wake_s)
        self._asleep -= tags
        if not self._asleep:
            self._is_paused, self._level = False, 0
        await exchange.respond(HTTPStatus.OK, encode({"status": "sleeping" if self._asleep else "awake"}))

    async def handle_rpc(self, exchange: HttpExchange) -> None:
        called = decode_body(await exchange.body(), dict[str, str])
        if called.get("method") != "reload_weights" or "weights" in self._asleep:
            raise EngineError("The call failed.", status=HTTPStatus.INTERNAL_SERVER_ERROR)
        await asyncio.sleep(self._wake_s)
        self._lacks_weights = False
        await exchange.respond(HTTPStatus.OK, encode({"results": [None]}))
