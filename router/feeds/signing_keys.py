"""Fetches the public keys of identity providers, in the background.

At the start, every few minutes, and when a token names an unknown key. The last good keys stay in use while a provider
does not answer, so that no valid token is refused for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import structlog

from router.admission.jwt_verifier import Issuer, JwtVerifier, SigningKeys, read_signing_keys
from router.admission.tenant import Tenants
from router.config.tenant_file import provider_url
from router.feeds.supervise import raise_if_cancelled
from router.fleet.retry_pause import retry_pause_s

CHECK_S = 0.25
INTERVAL_S = 300.0
MIN_INTERVAL_S = 10.0
"""Between two fetches because of unknown keys: clients choose the names of keys."""
FIRST_RETRY_S, MAX_RETRY_S = 1.0, 60.0
TIMEOUT_S = 5.0
MAX_DOCUMENT_BYTES = 256 * 1024
DISCOVERY = "/.well-known/openid-configuration"

GetUrl: TypeAlias = Callable[[str, float], Awaitable[bytes]]
"""The body of a GET within a timeout in seconds. Raises `RouterError`."""

log = structlog.get_logger()


class _Discovery(msgspec.Struct):
    issuer: str
    jwks_uri: str


@dataclass(slots=True)
class _Attempts:
    """Fetches from one place. Times are of the feed's clock."""

    tried_s: float = float("-inf")
    next_s: float = float("-inf")
    failures: int = 0
    """Since the last success."""


@dataclass(slots=True, eq=False)
class SigningKeyFeed:
    """Gives `verifier` the keys of the issuers of the tenants. `on_fetched`: called with the number of failing ones."""

    tenants: Callable[[], Tenants]
    verifier: JwtVerifier
    get_url: GetUrl
    on_fetched: Callable[[float], None] = lambda _failing: None
    clock: Callable[[], float] = time.monotonic
    _attempts: dict[tuple[str, str], _Attempts] = field(default_factory=dict)

    @property
    def is_tried(self) -> bool:
        """Whether the keys of all current issuers were fetched once, with or without success."""
        return all((issuer.name, issuer.keys_url) in self._attempts for issuer in self.tenants().issuers.values())

    async def run(self) -> None:
        while True:
            await self.fetch_due()
            await asyncio.sleep(CHECK_S)

    async def fetch_due(self) -> None:
        """Fetch the keys of all issuers whose time has come. Does not raise for their failures."""
        issuers = self.tenants().issuers.values()
        await asyncio.gather(*map(self._try, issuers))
        self.on_fetched(sum(self._attempts[issuer.name, issuer.keys_url].failures > 0 for issuer in issuers))

    async def _try(self, issuer: Issuer) -> None:
        place = issuer.name, issuer.keys_url
        done, now_s = self._attempts.get(place, _Attempts()), self.clock()
        is_wanted = issuer.name in self.verifier.wanted and now_s >= done.tried_s + MIN_INTERVAL_S
        if not is_wanted and now_s < done.next_s:
            return
        try:
            keys = await self._fetched_keys(issuer)
        except Exception as error:  # of any kind: one provider must not stop the keys of the others
            raise_if_cancelled()
            if not done.failures:
                log.warning(
                    "keys of identity provider not available", issuer=issuer.name, error=str(error).removeprefix("pod ")
                )
            done.failures += 1
            wait_s = retry_pause_s(done.failures, FIRST_RETRY_S, MAX_RETRY_S)
        else:
            if done.failures or done.tried_s < 0:
                log.info("keys of identity provider fetched", issuer=issuer.name, keys=len(keys))
            self.verifier.set_keys(issuer.name, keys)
            done.failures, wait_s = 0, INTERVAL_S
        done.tried_s, done.next_s = now_s, self.clock() + wait_s
        self._attempts[place] = done

    async def _fetched_keys(self, issuer: Issuer) -> SigningKeys:
        """Raises `RouterError`, `ValueError`."""
        url = issuer.keys_url
        if not url:
            document = await self._document(issuer.name.rstrip("/") + DISCOVERY)
            try:
                found = msgspec.json.decode(document, type=_Discovery)
            except (msgspec.MsgspecError, RecursionError):
                raise ValueError("not a discovery document with `issuer` and `jwks_uri`") from None
            if found.issuer != issuer.name:
                raise ValueError("the discovery document is of another issuer")
            url = provider_url(found.jwks_uri)
        return await asyncio.to_thread(read_signing_keys, await self._document(url))

    async def _document(self, url: str) -> bytes:
        document = await self.get_url(url, TIMEOUT_S)
        if len(document) > MAX_DOCUMENT_BYTES:
            raise ValueError(f"larger than {MAX_DOCUMENT_BYTES} bytes")
        return document
