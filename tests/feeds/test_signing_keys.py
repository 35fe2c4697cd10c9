"""Fetching the keys of identity providers, without a socket."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from structlog.testing import capture_logs

from router.admission.jwt_verifier import Issuer, JwtVerifier
from router.admission.tenant import Tenant, Tenants
from router.errors import ConnectFailed, UpstreamBroken
from router.feeds.signing_keys import DISCOVERY, INTERVAL_S, MAX_DOCUMENT_BYTES, MIN_INTERVAL_S, SigningKeyFeed
from tests.admission.oidc_tokens import ISSUER, NOW_S, jwk, key_set, token

pytestmark = pytest.mark.anyio
KEYS_URL = "https://login.example.com/keys"
ACME = Tenant(name="acme")
BY_URL = Issuer(ISSUER, ("warmroute",), "tenant", {"acme": ACME}, KEYS_URL)
BY_DISCOVERY = replace(BY_URL, keys_url="")
DISCOVERY_URL = ISSUER.rstrip("/") + DISCOVERY


def discovery(**fields: str) -> bytes:
    return json.dumps({"issuer": ISSUER, "jwks_uri": KEYS_URL, "other": 1, **fields}).encode()


@dataclass
class Provider:
    """Documents by URL; without one, nothing answers. Records what was fetched."""

    documents: dict[str, bytes]
    fetched: list[str] = field(default_factory=list)

    async def get_url(self, url: str, _timeout_s: float) -> bytes:
        self.fetched.append(url)
        if url not in self.documents:
            raise ConnectFailed("nothing answers", pod="", refused=True)
        return self.documents[url]


class Router:
    """A feed with its own clock, and what it accepts."""

    def __init__(self, provider: Provider, *issuers: Issuer) -> None:
        self.tenants = Tenants({}, {}, {issuer.name: issuer for issuer in issuers or (BY_URL,)})
        self.provider, self.verifier, self.now_s = provider, JwtVerifier(), 1000.0
        self.failing: list[float] = []
        self.feed = SigningKeyFeed(
            lambda: self.tenants, self.verifier, provider.get_url, self.failing.append, clock=lambda: self.now_s
        )

    async def after(self, for_s: float = 0.0) -> int:
        """Number of fetches that are made this much later."""
        before = len(self.provider.fetched)
        self.now_s += for_s
        await self.feed.fetch_due()
        return len(self.provider.fetched) - before

    def is_tried(self) -> bool:
        return self.feed.is_tried

    def accepts(self, kid: str = "one") -> bool:
        return self.verifier.find(token(kid), self.tenants, NOW_S) is ACME


async def test_keys_are_fetched_at_the_start_and_every_few_minutes() -> None:
    """A withdrawn key is refused from then on."""
    router = Router(Provider({KEYS_URL: key_set(jwk("one"))}))
    assert not router.is_tried()
    assert await router.after() == 1
    assert router.is_tried() and router.accepts()
    assert await router.after(INTERVAL_S - 1) == 0
    router.provider.documents[KEYS_URL] = key_set(jwk("two"))
    assert await router.after(1) == 1
    assert router.accepts("two") and not router.accepts("one")


async def test_the_discovery_document_says_where_the_keys_are() -> None:
    """If it is of the same issuer."""
    provider = Provider({DISCOVERY_URL: discovery(), KEYS_URL: key_set(jwk("one"))})
    router = Router(provider, BY_DISCOVERY)
    await router.after()
    assert router.accepts() and provider.fetched == [DISCOVERY_URL, KEYS_URL]


async def test_providers_that_fail_are_counted_until_they_answer() -> None:
    """Only those of the current tenants count."""
    other = replace(BY_URL, name="https://other.example", keys_url="https://other.example/keys")
    router = Router(Provider({KEYS_URL: key_set(jwk("one"))}), BY_URL, other)
    await router.after()
    await router.after()
    router.provider.documents[other.keys_url] = key_set(jwk("two"))
    await router.after(MIN_INTERVAL_S)
    router.provider.documents.clear()
    await router.after(INTERVAL_S)
    router.tenants = Tenants({}, {}, {})
    await router.after()
    assert router.failing == [1, 1, 0, 2, 0]


GOOD = {DISCOVERY_URL: discovery(), KEYS_URL: key_set(jwk("one"))}
FAILURES: Mapping[str, dict[str, bytes]] = {
    "nothing answers": {},
    "no discovery document": {**GOOD, DISCOVERY_URL: b"<html>"},
    "of another issuer": {**GOOD, DISCOVERY_URL: discovery(issuer="https://evil")},
    "keys elsewhere in clear text": {**GOOD, DISCOVERY_URL: discovery(jwks_uri="http://evil/keys")},
    "keys in a file": {**GOOD, DISCOVERY_URL: discovery(jwks_uri="file:///etc/passwd")},
    "no keys": {**GOOD, KEYS_URL: b'{"keys": []}'},
    "deep": {**GOOD, KEYS_URL: b"[" * 100_000},
    "large": {**GOOD, KEYS_URL: key_set(jwk("two"), {"x": "x" * MAX_DOCUMENT_BYTES})},
    "large discovery document": {**GOOD, DISCOVERY_URL: discovery(x="x" * MAX_DOCUMENT_BYTES)},
}


@pytest.mark.parametrize("documents", FAILURES.values(), ids=FAILURES.keys())
async def test_the_last_good_keys_stay(documents: dict[str, bytes]) -> None:
    """The provider is asked again after a second, then less often. The log has two lines: when it fails, and when
    it answers."""
    router = Router(Provider(dict(GOOD)), BY_DISCOVERY)
    await router.after()
    router.provider.documents = documents
    with capture_logs() as logs:
        assert await router.after(INTERVAL_S) > 0
        assert await router.after(0.9) == 0
        assert await router.after(0.1) > 0
        assert await router.after(1.9) == 0
        assert await router.after(60.0) > 0
        assert router.accepts()
        router.provider.documents = GOOD
        await router.after(60.0)
    assert [line["log_level"] for line in logs] == ["warning", "info"]
    assert logs[0]["issuer"] == ISSUER
    assert await router.after(INTERVAL_S - 1) == 0


async def test_an_unknown_key_is_fetched_at_once_but_not_often() -> None:
    """Clients may name any key."""
    router = Router(Provider(dict(GOOD)))
    await router.after()
    router.provider.documents[KEYS_URL] = key_set(jwk("one"), jwk("two"))
    assert not router.accepts("two")
    assert await router.after(MIN_INTERVAL_S - 1) == 0
    assert await router.after(1) == 1
    assert router.accepts("two")
    fetches = 0
    for _ in range(100):
        router.accepts("made up")
        fetches += await router.after(0.25)
    assert fetches == 2


async def test_an_unknown_key_does_not_hurry_a_provider_that_fails() -> None:
    """More than one that answers."""
    router = Router(Provider({}))
    fetches = 0
    for _ in range(400):
        router.accepts("made up")
        fetches += await router.after(0.25)
    assert fetches <= 100 / MIN_INTERVAL_S + 5


async def test_a_new_issuer_of_the_file_is_asked_at_once() -> None:
    """Also if only the place of its keys is new; one that fails does not stop the others."""
    provider = Provider({"https://login.example.com/new": key_set(jwk("one"))})
    router = Router(provider)
    await router.after()
    assert not router.accepts()
    other = replace(BY_URL, name="https://other", keys_url="https://other/keys")
    moved = replace(BY_URL, keys_url="https://login.example.com/new")
    router.tenants = Tenants({}, {}, {other.name: other, moved.name: moved})
    assert not router.is_tried()
    assert await router.after() == 2
    assert router.accepts() and router.is_tried()


async def test_an_error_of_the_provider_is_not_a_bug_of_the_feed() -> None:
    """Such as an HTTP status."""

    class Broken(Provider):
        async def get_url(self, url: str, _timeout_s: float) -> bytes:
            raise UpstreamBroken("503", pod="")

    router = Router(Broken({}))
    await router.after()
    assert router.is_tried() and not router.accepts()
