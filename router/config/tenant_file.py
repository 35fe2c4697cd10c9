"""Reads the file of tenants, and the files of keys that it names.

    tenants:
    - name: acme
      models: [qwen3-32b]
      keys:
      - 9f86d081...0f00a08                          # `warmroute tenants key acme` prints this line
      - 60303ae2...4bc7a19 until 2027-03-01
    key_files: [keys.txt]                           # for thousands of keys: lines `TENANT DIGEST [until DATE]`
    oidc:                                           # tokens of an identity provider, in place of keys
    - issuer: https://login.example.com/
      audiences: [warmroute]

Mistakes are reported all together, with file, line and key. What stands in place of a digest is never shown: it may be
the key itself.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import structlog
from pydantic import AfterValidator, Field, PositiveInt, field_validator

from router.addresses import is_loopback, split_url, url_host
from router.admission.jwt_verifier import Issuer
from router.admission.quotas import Quota
from router.admission.tenant import MAX_WEIGHT, KeyGrant, SloKey, Tenant, Tenants, allowed_names, salt_of
from router.config.load import Document, FilePath, Strict, read_document, read_text, validate
from router.config.mistakes import UNSHOWN, is_file_name, nearest
from router.config.watched_file import Sleep, WatchedFile, stamp_of, stamps_of
from router.errors import ConfigError

log = structlog.get_logger()

MAX_KEYS = 1_000_000
LINES_AT_ONCE = 1000
"""Lines that are read before other threads run."""
MAX_MISTAKES = 20
_LINE = re.compile(r"(?P<digest>[0-9a-fA-F]{64})(?:\s+until\s+(?P<until>\S+))?")
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_FORM = "must be the SHA-256 of a key (64 hex digits), then optionally `until DATE`; `warmroute tenants key` prints it"

_Name = Annotated[str, Field(pattern=_NAME, max_length=64)]
_Text = Annotated[str, Field(min_length=1, max_length=1024)]


def provider_url(value: str) -> str:
    """The URL of an identity provider, unchanged. Raises `ValueError`."""
    parts, host = split_url(value), url_host(value)
    is_secure = host and (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host)))
    if not is_secure or not value.isprintable() or " " in value or parts.fragment or "@" in parts.netloc:
        raise ValueError("must look like https://host/path, without user name and password (http on this machine only)")
    return value


ProviderUrl = Annotated[str, Field(max_length=1024), AfterValidator(provider_url), UNSHOWN]


class OidcEntry(Strict):
    """An identity provider. Tokens that it signs are accepted as keys."""

    issuer: ProviderUrl
    """Its URL, exactly as in the claim `iss` of its tokens."""
    audiences: Annotated[tuple[_Text, ...], Field(min_length=1)]
    """One of them must be in the claim `aud`. Choose one that means this router alone: each token for it is a key."""
    jwks_url: ProviderUrl | None = None
    """Where its public keys are; null: where `ISSUER/.well-known/openid-configuration` says."""
    claim: _Text = "tenant"
    """The claim that names the tenant: a text, or a list of which exactly one value names a tenant."""
    tenants: Annotated[dict[_Text, str], Field(min_length=1)] | None = None
    """Tenants by the value of the claim; null: the value is the tenant's name."""

    def build(self, tenants: Mapping[str, Tenant], wrong: Callable[[Sequence[str], str], None]) -> Issuer:
        """The issuer. Calls `wrong` with keys and mistake for each tenant that does not exist."""
        by_value = dict(tenants)
        if self.tenants is not None:
            by_value = {value: tenants[name] for value, name in self.tenants.items() if name in tenants}
            for value, name in self.tenants.items():
                if name not in tenants:
                    wrong(("tenants", value), f"unknown tenant {name!r}{nearest(name, tenants)}")
        return Issuer(self.issuer, self.audiences, self.claim, by_value, self.jwks_url or "")


class TenantEntry(Strict):
    """One tenant."""

    name: _Name
    """Its name, a label of metrics and a value of `match.tenant` in policies."""
    keys: tuple[Annotated[str, UNSHOWN], ...] = ()
    """SHA-256 digests of its keys, each optionally with `until DATE`. Several keys are valid at the same time: add a
    new one, then let the old one expire."""
    models: tuple[str, ...] | None = None
    """Models that it may use; null: all. A name may end with `*`. To a tenant, other models do not exist."""
    adapters: tuple[str, ...] | None = None
    """Adapters of these models that it may use; null: all."""
    share: _Name | None = None
    """A group of tenants that share cached prefixes. Without one, a tenant's prefixes are its own: a shared prefix
    shows in the time to the first token, so that tenants could find out each other's prompts."""
    weight: Annotated[float, Field(gt=0, le=MAX_WEIGHT)] = 1.0
    """Its share of the prefill time, relative to others of the same band."""
    band: int = 0
    """Its priority: requests of a higher band go first."""
    slo: SloKey = None
    """Times that a good request meets, in place of `slo` of the model."""
    quotas: tuple[Quota, ...] = ()
    """Limits of requests, uncached prompt tokens and output tokens in any minute, of requests at once, and of money for
    providers in any hour; each for one `model` (or adapter, or provider) or, without it, for all together. What a
    request really cost counts: cached prompt tokens of pods cost nothing. With `index.redis`, all routers keep them
    together."""
    data: Literal["stay", "may_leave"] = "may_leave"
    """`stay`: no provider serves its requests; where no pod can, they get 503 with that reason."""
    suspended: bool = False
    """Refuse all its requests with 403."""
    controls_engines: bool = False
    """Let it use the paths of `edge.control_paths`, which change engines for all tenants."""

    def build(self) -> Tenant:
        return Tenant(
            name=self.name,
            weight=self.weight,
            band=self.band,
            slo=self.slo,
            models=None if self.models is None else allowed_names(self.models),
            adapters=None if self.adapters is None else allowed_names(self.adapters),
            salt=salt_of(self.name, self.share or ""),
            quotas=self.quotas,
            data_stays=self.data == "stay",
            is_suspended=self.suspended,
            controls_engines=self.controls_engines,
        )


class TenantList(Strict):
    """The file of tenants."""

    version: PositiveInt = 1
    """Version of this format."""
    tenants: tuple[TenantEntry, ...] = ()
    """Who may send requests."""
    key_files: tuple[FilePath, ...] = ()
    """Files with more keys: lines `TENANT DIGEST [until DATE]`, where `#` begins a comment. 100,000 keys are read in
    less than a second, in YAML they would take minutes."""
    oidc: tuple[OidcEntry, ...] = ()
    """Identity providers (OpenID Connect) whose tokens are accepted as keys. Needs the extra `oidc`."""

    @field_validator("version")
    @classmethod
    def _is_known(cls, version: int) -> int:
        if version != 1:
            raise ValueError("must be 1, the only version that this release reads")
        return version


class TenantFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._key_files: tuple[Path, ...] = ()
        self.read_stamp: object = None
        """The stamp of the files that `read` read last, also if they were invalid."""

    def read(self) -> Tenants:
        """All tenants and keys. Raises `ConfigError`."""
        own_stamp, self.read_stamp = stamp_of(self.path), self.stamp()
        document = read_document(self.path, is_watched=True)
        parsed = validate(document, TenantList)
        self._key_files = tuple(map(Path, parsed.key_files))
        self.read_stamp = (own_stamp, *stamps_of(*self._key_files))
        found = _KeyReader(document, parsed)
        for path in self._key_files:
            found.read_lines(path)
        return found.tenants()

    def stamp(self) -> object:
        """A value that changes with any of these files. A missing one has a value, too."""
        return stamps_of(self.path, *self._key_files)


TENANTS_INTERVAL_S, TENANTS_STEADY_S = 0.25, 0.1
"""Time between checks of the files, so that a revoked key stops within a second, and how long they must be steady."""


def watched_tenants(path: Path, sleep: Sleep = asyncio.sleep) -> WatchedFile[Tenants]:
    """The tenants in this file, which is valid now. If anything in it becomes wrong, the last valid ones stay. Raises
    `ConfigError`."""
    file = TenantFile(path)
    found = WatchedFile(
        file.read,
        file.stamp,
        read_stamp=lambda: file.read_stamp,
        event="invalid tenants; the last valid ones stay current",
        on_read=lambda read: log.info("tenants reloaded", tenants=len(read.by_name), keys=len(read.grants)),
        steady_s=TENANTS_STEADY_S,
        sleep=sleep,
    )
    found.current()
    return found


class _KeyReader:
    def __init__(self, document: Document, parsed: TenantList) -> None:
        self._mistakes: list[str] = []
        self._by_name: dict[str, Tenant] = {}
        self._grants: dict[bytes, KeyGrant] = {}
        self._kept: dict[tuple[str, str], KeyGrant] = {}
        """By tenant and end: most keys of a tenant end at the same time, or never."""
        for number, entry in enumerate(parsed.tenants):
            where = f"{document.path}:{document.line_of(('tenants', number, 'name'))}: tenants.{number}.name: "
            if entry.name in self._by_name:
                self._wrong(f"{where}duplicate tenant {entry.name!r}; each needs its own name")
            self._by_name[entry.name] = entry.build()
        for number, entry in enumerate(parsed.tenants):
            for index, text in enumerate(entry.keys):
                line = document.line_of(("tenants", number, "keys", index))
                self._add(f"{document.path}:{line}: tenants.{number}.keys.{index}: ", entry.name, text)
        self._issuers = self._read_issuers(document, parsed.oidc)

    def _read_issuers(self, document: Document, entries: Sequence[OidcEntry]) -> Mapping[str, Issuer]:
        found: dict[str, Issuer] = {}
        for number, entry in enumerate(entries):

            def wrong(keys: Sequence[str], message: str, at: int = number) -> None:
                place: list[str | int] = ["oidc", at, *keys]
                self._wrong(f"{document.path}:{document.line_of(place)}: {'.'.join(map(str, place))}: {message}")

            if entry.issuer in found:
                wrong(["issuer"], "duplicate issuer; each is listed once")
            found[entry.issuer] = entry.build(self._by_name, wrong)
        if entries and not all(map(find_spec, ("jwt", "cryptography"))):
            self._wrong(f"{document.path}: oidc needs PyJWT: run `pip install '.[oidc]'` in the clone")
        return found

    def read_lines(self, path: Path) -> None:
        for number, line in _lines(path):
            tenant, _, text = line.partition(" ")
            self._add(f"{path}:{number}: ", tenant, text.strip())
            if len(self._mistakes) > MAX_MISTAKES:
                return

    def tenants(self) -> Tenants:
        """All of them. Raises `ConfigError` with the mistakes."""
        if self._mistakes:
            raise ConfigError("\n".join(self._mistakes[:MAX_MISTAKES]))
        return Tenants(self._by_name, self._grants, self._issuers)

    def _add(self, where: str, tenant: str, text: str) -> None:
        found = _LINE.fullmatch(text)
        if found is None:
            file = "; a file of keys is named under `key_files`" if is_file_name(text) else ""
            self._wrong(f"{where}{_FORM} (the value is not shown, because it may contain a secret){file}")
            return
        digest, until = bytes.fromhex(found["digest"]), found["until"] or ""
        grant = self._kept.get((tenant, until)) or self._new_grant(where, tenant, until)
        if digest in self._grants:
            self._wrong(f"{where}duplicate key; each belongs to one tenant, and is listed once")
        elif len(self._grants) >= MAX_KEYS:
            self._wrong(f"{where}more than {MAX_KEYS} keys")
        elif grant is not None:
            self._grants[digest] = grant

    def _new_grant(self, where: str, tenant: str, until: str) -> KeyGrant | None:
        if tenant not in self._by_name:  # not shown: the parts may be in the wrong order
            near = nearest(tenant, self._by_name)
            self._wrong(f"{where}unknown tenant{near}; the line must be `TENANT DIGEST [until DATE]`")
            return None
        try:
            until_s = _unix_s(until) if until else math.inf
        except ValueError:
            self._wrong(f"{where}`until` must be followed by a date, such as 2027-03-01 or 2027-03-01T12:00:00Z")
            return None
        grant = self._kept[tenant, until] = KeyGrant(self._by_name[tenant], until_s)
        return grant

    def _wrong(self, message: str) -> None:
        self._mistakes.append(message)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers, without comments and empty lines. Raises `ConfigError`."""
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if number % LINES_AT_ONCE == 0:
            time.sleep(0)  # the event loop runs
        content = line.partition("#")[0].strip()
        if content:
            yield number, content


def _unix_s(text: str) -> float:
    """The Unix time of a date or time in ISO 8601, UTC if it names no zone. Raises `ValueError`."""
    parsed = datetime.fromisoformat(text)
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
