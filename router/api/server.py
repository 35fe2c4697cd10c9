"""How does the router stop?

On SIGTERM it first says that it is not ready and goes on serving for a while, so that load balancers stop sending;
each answer then ends its connection, so that its client asks elsewhere. After that no connection is taken any more,
running answers may finish, and kept connections end when nothing was asked on them for a moment. On SIGINT somebody is
waiting at a terminal: at once. This file never ends an answer.
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
    """Serves an `App`; `delay_s` is how long connections are still taken after SIGTERM."""

    def __init__(self, config: uvicorn.Config, *, delay_s: float) -> None:
        super().__init__(config)
        self._delay_s = delay_s
        self._drains = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's name for: this signal came."""
        if sig == signal.SIGTERM and not self.should_exit:
            self._drains = True
            cast(App, self.config.app).begin_stopping()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let load balancers notice, then stop."""
        if self._drains:
            await asyncio.sleep(self._delay_s)
        cast(App, self.config.app).begin_stopping()
        await self._take_who_waits()
        await super().shutdown(sockets)

    async def _take_who_waits(self) -> None:
        """Whoever has connected and was not taken yet would be reset. To take them costs the event loop two turns."""
        listening, quiet_looks = [sock for server in self.servers for sock in server.sockets], 0
        for _ in range(MAX_POLLS):
            quiet_looks = 0 if has_unread(*listening) else quiet_looks + 1
            if quiet_looks == 2:
                return
            await asyncio.sleep(0)
