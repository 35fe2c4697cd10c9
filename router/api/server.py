"""How does the router stop?

On SIGTERM it first says that it is not ready and goes on serving for a while, so that load balancers stop sending;
then no connection is taken any more, and running answers may finish. On SIGINT somebody is waiting at a terminal: at
once. This file never ends an answer.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from types import FrameType
from typing import cast

import uvicorn

from router.api.app import App


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
            cast(App, self.config.app).stop_being_ready()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let load balancers notice, then stop."""
        if self._drains:
            await asyncio.sleep(self._delay_s)
        await super().shutdown(sockets)
