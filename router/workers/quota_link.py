"""The book of shares of one router's workers, for quotas without Redis: worker 0 has it, the others ask it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec

from router.admission.shares import Grants, ShareBook, ShareReport
from router.workers.bus import WorkerBus

KEEPER = 0
"""Number of the worker that has the book."""
_encode = msgspec.msgpack.Encoder().encode


class _Reports(msgspec.Struct, frozen=True, array_like=True):
    member: str
    reports: list[ShareReport]


_decode_reports = msgspec.msgpack.Decoder(_Reports).decode
_decode_grants = msgspec.msgpack.Decoder(Grants).decode


class QuotaLink:
    """The book as one worker sees it. `prefix`: of queries with reports."""

    def __init__(self, bus: WorkerBus, prefix: bytes) -> None:
        self._bus = bus
        self._prefix = prefix
        self._book = ShareBook()
        self._member = f"{bus.number}:{os.getpid()}"

    async def exchange(self, reports: Sequence[ShareReport]) -> Grants:
        """Record these reports. Raises `ConnectionError` if the worker that has the book does not answer."""
        if self._bus.number == KEEPER:
            return self._book.exchange(self._member, reports, time.monotonic())
        query = self._prefix + _encode(_Reports(self._member, list(reports)))
        answers = await self._bus.query(query, only=KEEPER)
        if not answers:
            raise ConnectionError(f"worker {KEEPER} does not answer")
        return _decode_grants(answers[0])

    def answer(self, query: bytes) -> bytes:
        """The answer to another worker's reports. Raises `ValueError` if they are malformed."""
        found = _decode_reports(query.removeprefix(self._prefix))
        return _encode(self._book.exchange(found.member, found.reports, time.monotonic()))
