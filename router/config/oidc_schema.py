"""Identity providers in the file of tenants (OpenID Connect)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from router.admission.jwt_verifier import Issuer
from router.admission.tenant import Tenant
from router.config.load import Strict
from router.config.mistakes import UNSHOWN, nearest

_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_Text = Annotated[str, Field(min_length=1, max_length=1024)]


def provider_url(value: str) -> str:
    """The URL of an identity provider, unchanged. Raises `ValueError`."""
    try:
        parts = urlsplit(value)
        host, _ = parts.hostname, parts.port
    except ValueError:  # its message contains the value
        host = None
    is_secure = host and (parts.scheme == "https" or (parts.scheme == "http" and host in _LOCAL_HOSTS))
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
