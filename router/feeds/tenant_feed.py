"""Owns the current tenants and reads them again when their files change.

Checks the files four times a second, so that a revoked key stops within a second. Tenants become current after all
files were read and checked; if anything in them is wrong, the last valid ones stay, and log and /readyz name file and
line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from router.admission.tenant import Tenants
from router.config.reloaded import is_steady
from router.config.tenant_file import TenantFile
from router.errors import ConfigError

INTERVAL_S, STEADY_S = 0.25, 0.1
"""Time between checks, and how long files must be unchanged before they are read: a program may still be writing."""

log = structlog.get_logger()


class TenantFeed:
    """Owns the tenants. The constructor raises `ConfigError`: a router does not start with invalid tenants."""

    def __init__(self, file: TenantFile, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._file = file
        self._sleep = sleep
        self.error = ""
        """Why the current files are not used; empty if they are."""
        self._tenants = file.read()

    def current(self) -> Tenants:
        return self._tenants

    async def run(self) -> None:
        while True:
            await self._sleep(INTERVAL_S)
            await self.check_files()

    async def check_files(self) -> None:
        """Read the files if they have changed and are unchanged for `STEADY_S`."""
        seen = await asyncio.to_thread(self._file.stamp)
        if seen == self._file.read_stamp or not await is_steady(self._file.stamp, seen, STEADY_S, self._sleep):
            return
        try:
            self._tenants, self.error = await asyncio.to_thread(self._file.read), ""
        except ConfigError as error:
            self._refuse(str(error))
        except Exception as error:  # a bug in the router must not stop the feed
            log.exception("reading tenants failed")
            self._refuse(type(error).__name__)
        else:
            log.info("tenants reloaded", tenants=len(self._tenants.by_name), keys=len(self._tenants.grants))

    def _refuse(self, error: str) -> None:
        self.error = error
        log.error("invalid tenants; the last valid ones stay current", error=error)
