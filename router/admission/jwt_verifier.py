"""Finds the tenant of a JSON Web Token (RFC 7519) that an identity provider has signed.

Only asymmetric signatures count, by a key that the provider publishes, with the algorithm that belongs to the key. A
verified token is kept by its digest until it expires, so that only the first request with it costs a verification.
Errors contain nothing of a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from router.admission.tenant import KeyGrant, Tenant, Tenants
from router.errors import AccessDenied, InvalidKey, RouterError, UnknownSigningKey

LEEWAY_S = 60.0
"""How much the clock of an identity provider may differ."""
MAX_TOKEN_BYTES = 8 * 1024
"""A longer token is refused unread: it takes half a millisecond to parse one of this length."""
MAX_VERIFIED_TOKENS = 10_000
"""Verified tokens that are kept, about 200 bytes each. The oldest go first."""
MAX_SIGNING_KEYS = 100
"""Further keys of an issuer are ignored."""
_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_ALGORITHMS = frozenset((*_RSA, "ES256", "ES384", "ES512", "EdDSA"))
_RSA_KEY_BITS = range(2048, 8193)
_PUBLIC_MEMBERS = ("kty", "kid", "alg", "n", "e", "crv", "x", "y")


class SigningKey(NamedTuple):
    key: Any
    """As the library reads it."""
    algorithms: tuple[str, ...]
    """Those that it signs with."""


SigningKeys = Mapping[str, SigningKey]
"""By `kid`; "" is the key without one."""


class _KeySet(msgspec.Struct):
    keys: list[dict[str, Any]]


def read_signing_keys(document: bytes) -> SigningKeys:
    """The usable keys of a JWK set (RFC 7517), the first `MAX_SIGNING_KEYS` of it. Raises `ValueError` if there are
    none."""
    try:
        listed = msgspec.json.decode(document, type=_KeySet).keys
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError("not a JWK set") from error
    found = {str(one.get("kid", "")): _signing_key(one) for one in listed[:MAX_SIGNING_KEYS]}
    usable = {kid: key for kid, key in found.items() if key is not None}
    if not usable:
        raise ValueError("the JWK set has no key for asymmetric signatures")
    return usable


def _signing_key(listed: Mapping[str, Any]) -> SigningKey | None:
    """None if it is of another kind, weak, or malformed."""
    import jwt  # of the extra `oidc`

    if listed.get("use", "sig") != "sig":
        return None
    try:
        read = jwt.PyJWK({name: listed[name] for name in _PUBLIC_MEMBERS if name in listed})
    except Exception:  # the library has no common exception for hostile keys
        return None
    is_rsa = read.key_type == "RSA"
    if read.algorithm_name not in _ALGORITHMS or (is_rsa and read.key.key_size not in _RSA_KEY_BITS):
        return None
    return SigningKey(read.key, _RSA if is_rsa and "alg" not in listed else (read.algorithm_name,))


@dataclass(frozen=True, slots=True)
class Issuer:
    """An identity provider, and the tenants of its tokens."""

    name: str
    """The claim `iss` of its tokens."""
    audiences: tuple[str, ...]
    """One of them must be in `aud`."""
    claim: str
    """Its value names the tenant."""
    tenants: Mapping[str, Tenant]
    """By the value of `claim`."""
    keys_url: str = ""
    """Where its keys are; empty: the discovery document of the issuer says it."""

    def tenant_of(self, claims: Mapping[str, Any]) -> Tenant | None:
        """The tenant that the claim names; None unless it names exactly one. Of a list, such as that of a user's
        groups, other values do not count."""
        value = claims.get(self.claim)
        values = value if isinstance(value, list) else [value]
        found = {one: self.tenants[one] for one in values if isinstance(one, str) and one in self.tenants}
        names = {tenant.name: tenant for tenant in found.values()}
        return names.popitem()[1] if len(names) == 1 else None


class JwtVerifier:
    """Verifies tokens with the keys that it was given last."""

    def __init__(self) -> None:
        self._keys: dict[str, SigningKeys] = {}
        self._verified: OrderedDict[bytes, KeyGrant] = OrderedDict()
        """By digest. Of the current tenants and keys only."""
        self._tenants: Tenants | None = None
        self.wanted: set[str] = set()
        """Issuers of which a token named an unknown key."""

    def set_keys(self, issuer: str, keys: SigningKeys) -> None:
        self.wanted.discard(issuer)
        if self._keys.get(issuer) != keys:
            self._keys[issuer] = keys
            self._verified.clear()

    def find(self, token: bytes, tenants: Tenants, now_s: float) -> Tenant | RouterError:
        """The tenant of a token, or the error to answer with. `now_s`: Unix time."""
        if len(token) > MAX_TOKEN_BYTES:
            return InvalidKey(f"The token is not valid: it is longer than {MAX_TOKEN_BYTES} bytes.")
        if tenants is not self._tenants:
            self._tenants = tenants
            self._verified.clear()
        digest = sha256(token).digest()
        grant = self._verified.get(digest)
        if grant is None:
            try:
                grant = self._verify(token, tenants.issuers, now_s)
            except RouterError as error:
                return error
            if len(self._verified) >= MAX_VERIFIED_TOKENS:
                self._verified.popitem(last=False)
            self._verified[digest] = grant
        elif now_s >= grant.until_s:
            del self._verified[digest]
            return _expired()
        return grant.tenant

    def _verify(self, token: bytes, issuers: Mapping[str, Issuer], now_s: float) -> KeyGrant:
        """Raises `InvalidKey`, `AccessDenied`."""
        import jwt

        issuer, key = self._signer(token, issuers)
        # times are compared below, with the clock of the request
        options: Any = {"require": ["exp", "aud", "iss"], "verify_exp": False, "verify_nbf": False, "verify_iat": False}
        try:
            claims = jwt.decode(
                token,
                key.key,
                algorithms=list(key.algorithms),
                options=options,
                audience=issuer.audiences,
                issuer=issuer.name,
            )
            until_s = _time(claims["exp"]) + LEEWAY_S
            from_s = _time(claims.get("nbf", 0)) - LEEWAY_S
        except jwt.InvalidSignatureError:
            if jwt.get_unverified_header(token).get("kid"):
                raise InvalidKey("The token is not valid: its signature is wrong.") from None
            raise self._unknown_key(issuer) from None
        except jwt.InvalidAudienceError:
            raise InvalidKey("The token is not valid: it is for another audience.") from None
        except jwt.MissingRequiredClaimError:
            raise InvalidKey("The token is not valid: `exp`, `aud` and `iss` are required.") from None
        except Exception:  # any error of the library for a hostile token
            raise InvalidKey("The token is not valid: its signature or a claim is wrong.") from None
        if now_s >= until_s:
            raise _expired()
        if now_s < from_s:
            raise InvalidKey("The token is not valid yet.")
        tenant = issuer.tenant_of(claims)
        if tenant is None:
            raise AccessDenied("The token is valid, but its claims name no tenant, or several.")
        return KeyGrant(tenant, until_s)

    def _signer(self, token: bytes, issuers: Mapping[str, Issuer]) -> tuple[Issuer, SigningKey]:
        """The issuer and the key that a token names, unverified. Raises `InvalidKey`."""
        import jwt

        try:
            unverified = jwt.decode_complete(token, options={"verify_signature": False})
            issuer, kid = issuers.get(unverified["payload"]["iss"]), unverified["header"].get("kid", "")
        except Exception:  # any error of the library for a hostile token
            raise InvalidKey("The token is not valid: it is malformed.") from None
        if issuer is None:
            raise InvalidKey("The token is not valid: it is of another issuer.")
        keys = self._keys.get(issuer.name, {})
        key = keys.get(kid) if kid or len(keys) != 1 else next(iter(keys.values()))
        if key is None:
            raise self._unknown_key(issuer)
        return issuer, key

    def _unknown_key(self, issuer: Issuer) -> UnknownSigningKey:
        """Its keys are to be fetched. Also where a provider that gives its keys no names may have another key now."""
        self.wanted.add(issuer.name)
        return UnknownSigningKey("The router does not know the key that has signed the token yet; retry.")


def _time(claim: object) -> float:
    """Raises `ValueError`, `OverflowError`."""
    if isinstance(claim, bool) or not isinstance(claim, int | float) or not abs(claim) < 1e15:
        raise ValueError("not a time")
    return float(claim)


def _expired() -> InvalidKey:
    return InvalidKey("The token is not valid: it has expired.")
