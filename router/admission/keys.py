"""Finds the tenant of an API key by the key's digest.

Only SHA-256 digests are kept. A key has 256 random bits, so its digest needs no salt and no slow hash; and as the table
is searched by digest, the time of a search says nothing about the keys in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from router.admission.tenant import Tenant

if TYPE_CHECKING:
    from router.admission.jwt_verifier import Issuer

MAX_KEY_BYTES = 512
"""A longer key is unknown: its digest is not computed."""


class KeyGrant(NamedTuple):
    """What a key gives. Many keys share one."""

    tenant: Tenant
    until_s: float
    """Unix time from which the key is refused."""


@dataclass(frozen=True, slots=True)
class Tenants:
    """All tenants by name, their keys by digest, and identity providers by name. Replaced as a whole."""

    by_name: Mapping[str, Tenant]
    grants: Mapping[bytes, KeyGrant]
    issuers: Mapping[str, Issuer] = field(default_factory=dict)

    def find(self, key: bytes, now_s: float) -> Tenant | None:
        """The tenant of a key; None if the key is unknown or has expired. `now_s`: Unix time."""
        found = self.grants.get(sha256(key).digest()) if len(key) <= MAX_KEY_BYTES else None
        return found.tenant if found is not None and now_s < found.until_s else None


def key_of(headers: Mapping[bytes, bytes]) -> bytes:
    """The API key of a request: the bearer token, else the header of Anthropic's clients; empty without one."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if token and scheme.lower() == b"bearer":
        return token.strip()
    return headers.get(b"x-api-key", b"")
