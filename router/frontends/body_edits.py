"""Removes from the bodies of requests what names pictures without showing them."""

from __future__ import annotations

import asyncio

from router.admission.tenant import Tenant
from router.frontends.fair_turns import FairTurns
from router.prompt.pictures.uuids import SEARCHED_BYTES, may_have_uuid, without_uuids

CLEANED_INLINE_BYTES = 16 * 1024
"""Bodies with more are rid of a `uuid` in a thread: 3 ms, where a client has filled them with small parts."""
_KEY_BYTES = 26
"""Size of the longest name that is searched for."""


class UuidRemoval:
    """Removes the `uuid` of pictures, sounds and videos from bodies. Many small parts take a tenth of a second, so
    tenants take turns."""

    def __init__(self) -> None:
        self._turns = FairTurns()

    async def removed(self, body: bytes, tenant: Tenant) -> bytes:
        """The body without them. Raises `MalformedRequest`."""
        if not await _search(body):
            return body
        return await self._turns.run(tenant, body, without_uuids, body, inline_bytes=CLEANED_INLINE_BYTES)


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
