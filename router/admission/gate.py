"""Decides whose request it is, and whether it may come in.

A front calls the gate once for each request to /v1 or to a pod, when its headers are complete. The tenant that it
returns stays with the request until the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from router.admission.jwt_verifier import JwtVerifier
from router.admission.tenant import OPEN_TENANT, Tenant, Tenants, key_of
from router.errors import AccessDenied, InvalidKey, MalformedRequest, RouterError


class AdmissionGate:
    """`tenants` returns the current ones; without it, every request is admitted as `OPEN_TENANT`. `control_paths`:
    those that change engines. `jwts` verifies the tokens of identity providers."""

    def __init__(
        self,
        tenants: Callable[[], Tenants] | None = None,
        control_paths: Collection[str] = (),
        jwts: JwtVerifier | None = None,
    ) -> None:
        self._tenants = tenants
        self._control_paths = frozenset(control_paths)
        self._jwts = jwts or JwtVerifier()

    def named(self, name: str) -> Tenant:
        """The tenant of this name, for operators. Raises `MalformedRequest` for an unknown name."""
        if self._tenants is None:
            return OPEN_TENANT
        tenant = self._tenants().by_name.get(name)
        if tenant is None:
            raise MalformedRequest(
                "Name a tenant of the file `tenants`: `warmroute preview --tenant`, or the query parameter `tenant`."
            )
        return tenant

    def again(self, tenant: Tenant) -> Tenant:
        """The same tenant as it is now, for a request that has waited for minutes. Raises `AccessDenied`."""
        if self._tenants is None:
            return tenant
        current = self._tenants().by_name.get(tenant.name)
        if current is None or current.is_suspended:
            raise AccessDenied("The account of this API key is suspended.")
        return current

    def admit(self, path: str, headers: Mapping[bytes, bytes], now_s: float) -> Tenant | RouterError:
        """The tenant, or the error to answer with. `headers`: the first value of each lower-case name; `now_s`: Unix
        time."""
        if self._tenants is None:
            return OPEN_TENANT
        key = key_of(headers)
        if not key:
            return InvalidKey("Send an API key: `authorization: Bearer KEY` or `x-api-key: KEY`.")
        tenants = self._tenants()
        tenant: Tenant | RouterError | None = tenants.find(key, now_s)
        if tenant is None and tenants.issuers and key.count(b".") == 2:  # a signed token; keys have none
            tenant = self._jwts.find(key, tenants, now_s)
        if tenant is None:
            return InvalidKey("The API key is not valid: it is unknown, has expired or was revoked.")
        if isinstance(tenant, RouterError):
            return tenant
        if tenant.is_suspended:
            return AccessDenied("The account of this API key is suspended.")
        if path in self._control_paths and not tenant.controls_engines:
            return AccessDenied("This API key may not change engines.")
        return tenant
