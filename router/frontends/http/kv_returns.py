"""Gives back KV that a pod holds for a request that will not come.

A prefill pod holds the KV of a handoff until a decode pod has read it, and a decode pod with vLLM's
`bidirectional_kv_xfer` that of each answer until the next turn has read it. Both end with a lease, of half a minute and
of eight minutes. Until then no other request can have that memory. Source:
docs/handoff.md#a-leg-that-hangs-and-kv-that-nobody-fetches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from router.engines.engine_catalog import DIALECTS
from router.engines.handoff.addresses import foreign_address
from router.errors import UpstreamError
from router.frontends.http.connection import Connection
from router.frontends.http.relay import WholeReply
from router.frontends.http.upstream import UpstreamSender
from router.types import Endpoint, Pod

MAX_RETURNS = 1024
"""Returns at once, with the requests that end. The lease of what is not returned ends by itself."""
RETURN_TIMEOUT_S = 30.0
"""As long as a lease: a decode pod may be busy."""
LATE_S = 2.0
"""How long a response is waited for that its pod had sent before the request was ended; most come at once."""


class KvReturns:
    """Sends returns, one task each, without anybody who waits for them."""

    def __init__(self, sender: UpstreamSender) -> None:
        self._sender = sender
        self._running: set[asyncio.Task[None]] = set()

    def give_back(self, holder: Pod, peer: Pod, params: Mapping[str, Any]) -> None:
        """Let `peer` release the KV that `holder` described with these parameters, which may name no other host."""
        body = DIALECTS[holder.handoff].return_body(peer.base_model, params)
        if body is None or len(self._running) >= MAX_RETURNS or foreign_address(params, holder):
            return
        self._run(self._post(peer, msgspec.json.encode(body)))

    def end(
        self, leg: asyncio.Task[WholeReply], connection: Connection | None, found: Callable[[WholeReply], None]
    ) -> None:
        """End a request that was sent on `connection`, and call `found` with the response that its pod had already
        sent."""
        has_room = len(self._running) < MAX_RETURNS
        if has_room and (leg.done() or (connection is not None and connection.half_close())):
            self._run(self._late(leg, found))
        else:
            leg.cancel()

    async def _late(self, leg: asyncio.Task[WholeReply], found: Callable[[WholeReply], None]) -> None:
        await asyncio.wait((leg,), timeout=LATE_S)
        if not leg.cancel() and not leg.cancelled() and leg.exception() is None:
            found(leg.result())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def drained(self) -> None:
        """Wait until all have ended, each within `RETURN_TIMEOUT_S`."""
        while self._running:
            await asyncio.wait(self._running)

    async def _post(self, peer: Pod, body: bytes) -> None:
        pool = self._sender.pool(peer)
        with suppress(UpstreamError):
            await pool.fetch(Endpoint.COMPLETIONS, RETURN_TIMEOUT_S, body, pool.rank_headers)
