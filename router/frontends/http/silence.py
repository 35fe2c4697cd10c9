"""Closes the connections to pods that have fallen silent within a stream, so that another pod continues it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from router.frontends.http.relay import AnyReply
from router.request.continuation.continuing_tracker import ContinuingTracker

CHECK_S = 0.5


class SilenceWatch:
    """Looks at all streams that may be continued, by one timer."""

    def __init__(self) -> None:
        self._streams: dict[ContinuingTracker, AnyReply] = {}
        self._is_running = False

    @contextmanager
    def watched(self, tracker: ContinuingTracker, reply: AnyReply) -> Iterator[None]:
        self._streams[tracker] = reply
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_later(CHECK_S, self._check)
        try:
            yield
        finally:
            del self._streams[tracker]

    def _check(self) -> None:
        now_s = monotonic()
        for tracker, reply in list(self._streams.items()):
            if tracker.is_silent(now_s):
                reply.close()
        self._is_running = bool(self._streams)
        if self._is_running:
            asyncio.get_running_loop().call_later(CHECK_S, self._check)
