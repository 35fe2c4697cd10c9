"""Tokens of identity providers: who is admitted, and what forged ones cost."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import hashes, hmac, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from router.admission import jwt_verifier
from router.admission.gate import AdmissionGate
from router.admission.jwt_verifier import LEEWAY_S, MAX_TOKEN_BYTES, Issuer, JwtVerifier, read_signing_keys
from router.admission.tenant import KeyGrant, Tenant, Tenants
from router.errors import AccessDenied, InvalidKey, RouterError, UnknownSigningKey
from tests.admission.oidc_tokens import CLAIMS, ISSUER, NOW_S, jwk, key_set, private_key, token

ACME, OTHER = Tenant(name="acme"), Tenant(name="other")
BY_NAME = {"acme": ACME, "other": OTHER}


def tenants_of(by_value: Mapping[str, Tenant] = BY_NAME, claim: str = "tenant") -> Tenants:
    """Two tenants, an opaque key of `acme`, and one issuer."""
    issuer = Issuer(ISSUER, ("warmroute", "other-audience"), claim, by_value)
    return Tenants(BY_NAME, {sha256(b"opaque").digest(): KeyGrant(ACME, NOW_S)}, {ISSUER: issuer})


TENANTS = tenants_of()


def verifier(*keys: dict[str, Any]) -> JwtVerifier:
    """With these keys of the issuer, or with the key `one`."""
    made = JwtVerifier()
    made.set_keys(ISSUER, read_signing_keys(key_set(*(keys or [jwk("one")]))))
    return made


def part(value: object) -> bytes:
    """A part of a token."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(text).rstrip(b"=")


def signed_by_hmac(secret: bytes) -> bytes:
    """A token with a correct HMAC; the library refuses to make it with a public key."""
    signed = part({"alg": "HS256", "kid": "one"}) + b"." + part(CLAIMS)
    mac = hmac.HMAC(secret, hashes.SHA256())
    mac.update(signed)
    return signed + b"." + part(mac.finalize())


@pytest.mark.parametrize("algorithm", ["RS256", "PS384", "ES256", "EdDSA"])
def test_a_signed_token_is_admitted_as_the_tenant_that_its_claim_names(algorithm: str) -> None:
    """With every kind of key; the second time without a verification, whose key is lost by then."""
    found, signed = verifier(jwk("k", algorithm)), token("k", algorithm)
    for _ in range(2):
        assert found.find(signed, TENANTS, NOW_S) is ACME
        found._keys.clear()


def test_a_provider_that_gives_its_keys_no_names_may_have_another_key() -> None:
    """A token without `kid` that the known key has not signed may be signed by a new one, which is fetched then."""
    found = verifier(jwk("one", kid=None))
    named, unnamed = (jwt.encode(CLAIMS, private_key("two"), "RS256", headers=kid) for kid in ({"kid": "x"}, {}))
    assert isinstance(found.find(unnamed.encode(), TENANTS, NOW_S), UnknownSigningKey) and found.wanted == {ISSUER}
    found.set_keys(ISSUER, read_signing_keys(key_set(jwk("two", kid=None))))
    assert found.find(unnamed.encode(), TENANTS, NOW_S) is ACME and not found.wanted
    assert isinstance(found.find(named.encode(), TENANTS, NOW_S), UnknownSigningKey)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("other", OTHER),
        (["x", "acme"], ACME),
        *((value, None) for value in (["acme", "other"], "x", [], 7, {"acme": 1}, None, [["acme"]])),
    ],
)
def test_a_claim_names_exactly_one_tenant(value: Any, expected: Tenant | None) -> None:
    """A list may have other values, such as a user's groups. A valid token without a tenant is 403."""
    found = verifier().find(token(tenant=value), TENANTS, NOW_S)
    assert found is expected if expected else isinstance(found, AccessDenied)


def test_values_of_a_claim_are_mapped_to_tenants() -> None:
    """Names of tenants mean nothing then. Two values of one tenant are no conflict."""
    mapped = tenants_of({"eng": ACME, "ops": ACME, "sales": OTHER}, "groups")
    for value, tenant in ((["eng", "ops"], ACME), ("sales", OTHER)):
        assert verifier().find(token(groups=value), mapped, NOW_S) is tenant
    assert isinstance(verifier().find(token(groups="acme"), mapped, NOW_S), AccessDenied)


PUBLIC = private_key("one").public_key()
FORGED = {
    "signed by another key": jwt.encode(
        CLAIMS, private_key("other"), "RS256", headers={"kid": "one"}
    ).encode(),
    "signed by another algorithm": jwt.encode(CLAIMS, private_key("one"), "RS512", headers={"kid": "one"}).encode(),
    "unsigned": part({"alg": "none", "kid": "one"}) + b"." + part(CLAIMS) + b".",
    "no signature": token().rpartition(b".")[0] + b".",
    "HMAC with the public key in PEM": signed_by_hmac(
        PUBLIC.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    ),
    "HMAC with the JWK": signed_by_hmac(json.dumps(jwk("one")).encode()),
    "HMAC without a key": signed_by_hmac(b"\0"),
    "other claims": b".".join((token().split(b".")[0], part({**CLAIMS, "tenant": "other"}), token().split(b".")[2])),
    "of another issuer": token(iss="https://login.example.com"),
    "issuer of another type": part({"alg": "RS256", "kid": "one"}) + b"." + part({**CLAIMS, "iss": [ISSUER]}) + b".x",
    "of no issuer": token(iss=None),
    "for another audience": token(aud="warmroute-2"),
    "for no audience": token(aud=None),
    "without an end": token(exp=None),
    "with an end of another type": token(exp=True),
    "with an endless end": token(exp=10**400),
    "expired": token(exp=NOW_S - LEEWAY_S),
    "not valid yet": token(nbf=NOW_S + LEEWAY_S + 1),
    "with a critical header": jwt.encode(
        CLAIMS, private_key("one"), "RS256", headers={"kid": "one", "crit": ["x"], "x": 1}
    ).encode(),
    "with its own key": jwt.encode(
        CLAIMS, private_key("other"), "RS256", headers={"kid": "one", "jwk": jwk("other"), "jku": "https://evil"}
    ).encode(),
    "kid of another type": part({"alg": "RS256", "kid": ["one"]}) + b"." + part(CLAIMS) + b".x",
    "deep header": part(b"[" * 5000) + b".a.b",
    "deep claims": part({"alg": "RS256", "kid": "one"}) + b"." + part(b'{"iss":' + b"[" * 5000) + b".b",
    "huge": token(pad="x" * MAX_TOKEN_BYTES),
    "no UTF-8": b"\xff.\xff.\xff",
    "empty": b"..",
}  # fmt: skip


MALFORMED = ("issuer of another type", "of no issuer", "kid of another type", "deep header", "deep claims", "no UTF-8")
REASONS = {
    **dict.fromkeys((*MALFORMED, "empty", "with a critical header"), "malformed"),
    "of another issuer": "issuer",
    "for another audience": "audience",
    "for no audience": "required",
    "without an end": "required",
    "expired": "expired",
    "not valid yet": "yet",
    "huge": "longer",
}
"""All others have a wrong signature or claim."""


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_token_is_refused_without_being_repeated(name: str) -> None:
    """With 401, as often as it is sent."""
    found = verifier(jwk("one"), jwk("third"))
    for _ in range(2):
        refusal = found.find(FORGED[name], TENANTS, NOW_S)
        assert type(refusal) is InvalidKey and REASONS.get(name, "signature") in str(refusal)
        assert not any(piece in str(refusal) for piece in ("acme", ISSUER, "evil", "one'"))
    assert found.find(token(), TENANTS, NOW_S) is ACME


@given(st.lists(st.binary(max_size=40) | st.sampled_from(token().split(b".")), min_size=3, max_size=3))
def test_only_an_intact_token_is_admitted(parts: list[bytes]) -> None:
    """Any other three parts are refused."""
    found = verifier().find(b".".join(parts), TENANTS, NOW_S)
    assert found is ACME if parts == token().split(b".") else isinstance(found, RouterError)


@given(st.binary(min_size=1, max_size=12), st.integers(0, 10**6))
def test_a_changed_byte_makes_a_token_invalid(noise: bytes, place: int) -> None:
    """In whichever part. Bits that base64 ignores at the end of a part change no byte of it."""
    given_token = token()
    at = place % len(given_token)
    changed = given_token[:at] + noise + given_token[at + len(noise) :]
    if [piece[:-1] for piece in changed.split(b".")] != [piece[:-1] for piece in given_token.split(b".")]:
        assert isinstance(verifier().find(changed, TENANTS, NOW_S), RouterError)


def test_a_token_is_valid_until_its_end_and_a_minute() -> None:
    """Whether it was verified before or not; it is not kept longer."""
    end_s, found = CLAIMS["exp"] + LEEWAY_S, verifier()
    for checked in (found, found, verifier()):
        assert checked.find(token(), TENANTS, end_s - 0.1) is ACME
    assert isinstance(found.find(token(), TENANTS, end_s), InvalidKey)
    assert not found._verified
    assert isinstance(verifier().find(token(), TENANTS, end_s), InvalidKey)


def test_other_tenants_or_keys_end_what_was_verified_before() -> None:
    """A suspended tenant, an issuer that is removed, and a withdrawn key count at once; the same keys, fetched again,
    cost nothing."""
    found = verifier()
    assert found.find(token(), TENANTS, NOW_S) is ACME
    suspended = replace(ACME, is_suspended=True)
    assert found.find(token(), tenants_of({"acme": suspended}), NOW_S) is suspended
    assert isinstance(found.find(token(), replace(TENANTS, issuers={}), NOW_S), InvalidKey)
    found.find(token(), TENANTS, NOW_S)
    found.set_keys(ISSUER, read_signing_keys(key_set(jwk("one"))))
    assert len(found._verified) == 1
    found.set_keys(ISSUER, read_signing_keys(key_set(jwk("two"))))
    assert isinstance(found.find(token(), TENANTS, NOW_S), UnknownSigningKey)


def test_an_unknown_key_is_wanted_and_the_client_tries_again() -> None:
    """Until the issuer's keys were read; only a token of a known issuer makes them be read."""
    found = verifier()
    found.find(token("two", iss="https://evil"), TENANTS, NOW_S)
    assert not found.wanted
    assert isinstance(found.find(token("two"), TENANTS, NOW_S), UnknownSigningKey)
    assert found.wanted == {ISSUER}
    found.set_keys(ISSUER, read_signing_keys(key_set(jwk("one"), jwk("two"))))
    assert not found.wanted and found.find(token("two"), TENANTS, NOW_S) is ACME


def test_the_only_key_of_an_issuer_needs_no_name() -> None:
    """With several keys, a token must name one."""
    unnamed = jwt.encode(CLAIMS, private_key("one"), "RS256").encode()
    assert verifier().find(unnamed, TENANTS, NOW_S) is ACME
    assert isinstance(verifier(jwk("one"), jwk("two")).find(unnamed, TENANTS, NOW_S), UnknownSigningKey)


def test_few_verified_tokens_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is verified again."""
    monkeypatch.setattr(jwt_verifier, "MAX_VERIFIED_TOKENS", 2)
    found = verifier()
    for number in range(3):
        assert found.find(token(jti=str(number)), TENANTS, NOW_S) is ACME
    assert len(found._verified) == 2


UNUSABLE = {
    "symmetric": {"kty": "oct", "kid": "one", "k": "c2VjcmV0", "alg": "HS256"},
    "for encryption": jwk("one", use="enc"),
    "of another algorithm": jwk("one", alg="RSA-OAEP"),
    "said to be symmetric": jwk("one", alg="HS256"),
    "said to be unsigned": jwk("one", alg="none"),
    "without a modulus": jwk("one", n=None),
    "of another curve": {
        **jwt.get_algorithm_by_name("ES256K").to_jwk(
            ec.generate_private_key(ec.SECP256K1()).public_key(), as_dict=True
        ),
        "kid": "one",
    },
    "weak": jwk("one", n=base64.urlsafe_b64encode(b"\xff" * 128).decode().rstrip("=")),
    "endless": jwk("one", n=base64.urlsafe_b64encode(b"\xff" * 4096).decode().rstrip("=")),
}


@pytest.mark.parametrize("unusable", UNUSABLE.values(), ids=UNUSABLE.keys())
def test_other_keys_of_an_issuer_are_ignored(unusable: dict[str, Any]) -> None:
    """They never verify a token; alone, they do not replace the keys that the router has."""
    assert set(read_signing_keys(key_set(unusable, jwk("two")))) == {"two"}
    with pytest.raises(ValueError, match="no key for asymmetric"):
        read_signing_keys(key_set(unusable))


@pytest.mark.parametrize(
    "document", [b"", b"[]", b'{"keys": 1}', b'{"keys": [1]}', b"[" * 9000, b"\xff", b'{"keys": []}']
)
def test_a_document_without_keys_is_an_error(document: bytes) -> None:
    with pytest.raises(ValueError, match="JWK set"):
        read_signing_keys(document)


def test_a_rsa_key_without_an_algorithm_signs_with_those_of_rsa() -> None:
    """As the keys of Microsoft's identity platform are."""
    found = verifier(jwk("one", alg=None))
    for algorithm in ("RS256", "RS512"):
        signed = jwt.encode(CLAIMS, private_key("one"), algorithm, headers={"kid": "one"}).encode()
        assert found.find(signed, TENANTS, NOW_S) is ACME


def test_the_gate_admits_keys_and_tokens() -> None:
    """The tenant of a token has the same rights as that of a key; a key with two dots is a key."""
    gate = AdmissionGate(lambda: TENANTS, ["/v1/load_lora_adapter"], verifier())
    for header in (b"Bearer " + token(), b"Bearer opaque"):
        assert gate.admit("/v1/models", {b"authorization": header}, NOW_S - 1) is ACME
    assert gate.admit("/v1/messages", {b"x-api-key": token()}, NOW_S) is ACME
    denied = gate.admit("/v1/load_lora_adapter", {b"x-api-key": token()}, NOW_S)
    assert isinstance(denied, AccessDenied)
    dotted = replace(TENANTS, grants={sha256(b"a.b.c").digest(): KeyGrant(OTHER, NOW_S)})
    assert AdmissionGate(lambda: dotted).admit("/v1/models", {b"x-api-key": b"a.b.c"}, 0.0) is OTHER
    without = replace(TENANTS, issuers={})
    assert isinstance(AdmissionGate(lambda: without).admit("/", {b"x-api-key": token()}, NOW_S), InvalidKey)


@given(st.dictionaries(st.sampled_from(["iss", "aud", "exp", "nbf", "iat", "sub", "jti"]), st.none() | st.booleans()
       | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.text(max_size=4), max_size=2)))  # fmt: skip
def test_claims_of_any_type_are_judged_without_an_error(claims: dict[str, Any]) -> None:
    """Their signature is right: the provider, too, may be wrong."""
    payload = json.dumps({**CLAIMS, **claims}).encode()
    signed = jwt.api_jws.encode(payload, private_key("one"), "RS256", headers={"kid": "one"}).encode()
    found = verifier().find(signed, TENANTS, NOW_S)
    assert found is ACME if not claims else isinstance(found, Tenant | RouterError)
