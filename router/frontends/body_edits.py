"""Edits the bodies of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from router.admission.tenant import Tenant
from router.frontends.fair_turns import FairTurns
from router.prompt.pictures.uuids import SEARCHED_BYTES, may_have_uuid, without_uuids

EDITED_INLINE_BYTES = 1024 * 1024
"""Larger bodies are edited in a thread."""
CLEANED_INLINE_BYTES = 16 * 1024
"""Bodies with more are rid of a `uuid` in a thread: 3 ms, where a client has filled them with small parts."""
_KEY_BYTES = 26
"""Size of the longest name that is searched for."""
_Edited = TypeVar("_Edited", bytes, bytes | None)


class BodyEdits:
    """Edits large bodies in a thread, one at a time: 32 MiB hold the interpreter for 15 ms."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run(self, body: bytes, edit: Callable[[], _Edited]) -> _Edited:
        if len(body) <= EDITED_INLINE_BYTES:
            return edit()
        async with self._turn:
            return await asyncio.to_thread(edit)


class UuidRemoval:
    """Removes the `uuid` of pictures, sounds and videos from bodies. Many small parts take a tenth of a second, so
    tenants take turns."""

    def __init__(self) -> None:
        self._turns = FairTurns()

    async def removed(self, body: bytes, tenant: Tenant) -> bytes:
        """The body without them. Raises `MalformedRequest`."""
        if not await _search(body):
            return body
        if len(body) <= CLEANED_INLINE_BYTES:
            return without_uuids(body)
        async with self._turns.turn(tenant, 0, len(body)):
            return await asyncio.to_thread(without_uuids, body)


async def _search(body: bytes) -> bool:
    """Whether a body may have the field."""
    if len(body) <= SEARCHED_BYTES:
        return may_have_uuid(body)
    view = memoryview(body)
    for start in range(0, len(body), SEARCHED_BYTES):
        if may_have_uuid(view[start : start + SEARCHED_BYTES + _KEY_BYTES]):
            return True
        await asyncio.sleep(0)
    return False
