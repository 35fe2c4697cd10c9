"""An identity provider for tests: keys, the JWK set of them, and tokens."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

ISSUER = "https://login.example.com/"
NOW_S = 1_800_000_000.0
CLAIMS: dict[str, Any] = {"iss": ISSUER, "aud": "warmroute", "exp": NOW_S + 600, "tenant": "acme"}


def private_key(kid: str, algorithm: str = "RS256") -> Any:
    """The key of this name and kind, always the same one."""
    return _made(kid, "RSA" if algorithm[:2] in ("RS", "PS") else algorithm)


@cache
def _made(kid: str, kind: str) -> Any:
    if kind == "ES256":
        return ec.generate_private_key(ec.SECP256R1())
    if kind == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    return rsa.generate_private_key(65537, 2048)


def jwk(kid: str, algorithm: str = "RS256", /, **members: Any) -> dict[str, Any]:
    """The public key of this name. None as a member: without it."""
    public = private_key(kid, algorithm).public_key()
    found: dict[str, Any] = jwt.get_algorithm_by_name(algorithm).to_jwk(public, as_dict=True)
    merged = {**found, "kid": kid, "alg": algorithm, "use": "sig", **members}
    return {name: value for name, value in merged.items() if value is not None}


def key_set(*keys: dict[str, Any]) -> bytes:
    """A JWK set."""
    return json.dumps({"keys": keys}).encode()


def token(kid: str = "one", algorithm: str = "RS256", **claims: Any) -> bytes:
    """A signed token. None as a claim: without it."""
    merged = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not None}
    return jwt.encode(merged, private_key(kid, algorithm), algorithm, headers={"kid": kid}).encode()
