"""Which holders are there to be asked about?

Keeps the list of a `DirectStore` fresh. This file reads no blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from router.feeds.patience import Patience
from router.stores.direct import DirectStore
from router.stores.registry import Registry
from router.types import Generation

INTERVAL_S = 0.5


class RegistryFeed:
    """`wanted`: are holders of this generation of any use here?"""

    def __init__(self, registry: Registry, store: DirectStore, wanted: Callable[[Generation], bool]) -> None:
        self._registry = registry
        self._store = store
        self._wanted = wanted
        self.loaded = asyncio.Event()
        """Set once the list was read for the first time."""

    async def run(self) -> None:
        """Read until cancelled."""
        patience = Patience("holders")
        while True:
            if await patience.ask(self._read):
                self._store.found()
                self.loaded.set()
                await asyncio.sleep(INTERVAL_S)
            else:
                self._store.lost()

    async def _read(self) -> None:
        for generation in await self._registry.generations():
            if self._wanted(generation):
                rows = await self._registry.rows(generation)
                self._store.list_holders(generation, rows, time.monotonic())
