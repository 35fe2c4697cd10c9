"""Who sends a request, what it may use, and its place in the queue.

A tenant's prefixes are its own, because a shared prefix shows in the time to the first token. Every block hash and the
engine's cache therefore depend on the tenant's salt; tenants of one `share` group have the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple, TypeAlias

import msgspec
from pydantic import AfterValidator, ConfigDict, Field, NonNegativeFloat

from router.admission.quotas import Hold, Quota

if TYPE_CHECKING:
    from router.admission.jwt_verifier import Issuer

MAX_WEIGHT = 1e6


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a good request meets. What is left out is not limited."""

    ttft_ms: NonNegativeFloat = math.inf
    """Time to the first token."""
    tpot_ms: NonNegativeFloat = math.inf
    """Mean time per token after it."""
    idle_prefills: NonNegativeFloat = 0.0
    """The first token of a long prompt may take that many times its prefill on an idle pod without a cache."""
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    def ttft_limit_ms(self, idle_prefill_ms: float) -> float:
        """The limit of a prompt whose prefill takes so long on an idle pod."""
        return max(self.ttft_ms, self.idle_prefills * idle_prefill_ms)


NO_SLO = Slo()
SloKey: TypeAlias = Annotated[Slo | None, AfterValidator(lambda slo: slo if slo != NO_SLO else None)]
"""One in a file: without any limit, it is none."""


@dataclass(frozen=True, slots=True)
class AllowedNames:
    """Names of models or adapters. One that ends with `*` allows every name with that beginning."""

    exact: frozenset[str]
    beginnings: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        return name in self.exact or name.startswith(self.beginnings)


def allowed_names(patterns: Iterable[str]) -> AllowedNames:
    listed = tuple(patterns)
    exact = frozenset(name for name in listed if not name.endswith("*"))
    return AllowedNames(exact, tuple(name[:-1] for name in listed if name.endswith("*")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Each tenant of a priority band gets its `weight` of the prefill time. A higher `band` goes first."""

    name: str = ""
    weight: Annotated[float, Field(gt=0, le=MAX_WEIGHT)] = 1.0
    band: int = 0
    slo: Slo | None = None
    """In place of that of the model."""
    models: AllowedNames | None = None
    """Base models that it may use; None: all."""
    adapters: AllowedNames | None = None
    """Adapters of these models that it may use; None: all."""
    salt: str = ""
    """What its prefixes are hashed with, here and in engines; empty: they are shared with all without a salt."""
    quotas: tuple[Quota, ...] = ()
    """How much it may use in a minute, and at once; all of them apply."""
    data_stays: bool = False
    """Whether none of its requests may be served by a provider."""
    is_suspended: bool = False
    controls_engines: bool = False
    """Whether it may use the paths of `edge.control_paths`, which change engines for all."""
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def may_use(self, model: str, adapter: str) -> bool:
        """Whether it may use this base model, and the adapter if there is one."""
        return (self.models is None or model in self.models) and (
            not adapter or self.adapters is None or adapter in self.adapters
        )

    def salted(self, given: str) -> str:
        """The salt of a request whose client gave one, which may be empty. A client cannot choose another tenant's."""
        if not self.salt or not given:
            return self.salt or given
        return _digest("client", self.salt, given)


OPEN_TENANT = Tenant()
"""Every request's tenant where no tenants are configured."""


class Admitted(msgspec.Struct, frozen=True):
    """For whom a request came in."""

    owner: str = ""
    """Whose share of the router's limits it uses: the tenant's, or its network's; empty if only a proxy is known."""
    tenant: Tenant = OPEN_TENANT
    hold: Hold | None = None
    """Its place among its tenant's concurrent requests, until its body is complete."""


def salt_of(tenant: str, share: str) -> str:
    """The salt of a tenant, or of its `share` group if it has one: 32 hex digits, which every engine accepts. Equal in
    all routers."""
    return _digest("share", share) if share else _digest("tenant", tenant)


def _digest(*parts: str) -> str:
    return sha256("\0".join(("warmroute", *parts)).encode("utf-8", "surrogatepass")).hexdigest()[:32]


# --- keys ---

# Only SHA-256 digests are kept. A key has 256 random bits, so its digest needs no salt and no slow hash; and as the
# table is searched by digest, the time of a search says nothing about the keys in it.

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
