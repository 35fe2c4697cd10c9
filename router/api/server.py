"""A uvicorn server that stops without losing requests.

On SIGTERM, `/readyz` fails and each response closes its connection, so that load balancers stop sending. After a delay
the server stops accepting connections, lets running responses finish and closes idle connections. SIGINT skips the
delay.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from types import FrameType
from typing import cast

import uvicorn

from router.api.app import App
from router.api.client_deadlines import has_unread

MAX_POLLS = 100


class DrainingServer(uvicorn.Server):
    """Serves an `App`. After SIGTERM it accepts connections for another `delay_s`."""

    def __init__(self, config: uvicorn.Config, *, delay_s: float) -> None:
        super().__init__(config)
        self._delay_s = delay_s
        self._drains = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn on a signal."""
        if sig == signal.SIGTERM and not self.should_exit:
            self._drains = True
            cast(App, self.config.app).begin_stopping()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn when it stops."""
        if self._drains:
            await asyncio.sleep(self._delay_s)
        cast(App, self.config.app).begin_stopping()
        await self._accept_pending()
        await super().shutdown(sockets)

    async def _accept_pending(self) -> None:
        """Accept the connections in the listening queues, which would otherwise be reset. Accepting one takes two turns
        of the event loop."""
        listening, quiet_polls = [sock.fileno() for server in self.servers for sock in server.sockets], 0
        for _ in range(MAX_POLLS):
            quiet_polls = 0 if has_unread(*listening) else quiet_polls + 1
            if quiet_polls == 2:
                return
            await asyncio.sleep(0)
