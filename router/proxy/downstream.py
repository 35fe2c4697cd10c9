"""What does the proxy need of the client's side?

The protocol that `api` implements over ASGI and that tests implement over lists, and of a request what only the
transport knows. Nothing here reads or writes.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from router.proxy.headers import HeaderList


class Inbound(msgspec.Struct, frozen=True, gc=False):
    """One downstream request in its form for forwarding: all but its body."""

    id: str
    method: str
    target: bytes
    """Path and query, raw."""
    headers: HeaderList
    peer: str = ""


class Downstream(Protocol):
    """Where an answer goes. `started` is the point of no return for retries."""

    @property
    def started(self) -> bool:
        """Has the client got anything?"""

    @property
    def disconnected(self) -> bool:
        """Has the client left?"""

    def start(self, status: int, headers: HeaderList) -> None:
        """Send status and headers."""

    def put(self, piece: bytes) -> bool:
        """Send a piece of body. False: do not send more before `ready` has returned."""

    async def ready(self) -> None:
        """Wait until the client may take more."""

    def finish(self) -> None:
        """End the answer."""
