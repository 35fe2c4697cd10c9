"""Elects one of several routers by a Lease of the Kubernetes API.

As Kubernetes' own components do it: a router takes a Lease that nobody has renewed for `LEASE_S` of its own clock, and
each write names the version that it read, so that of two routers one is refused. Clocks are not compared.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from http import HTTPStatus

import msgspec

from router.feeds.discovery.kube_api import KubeApi, Permission
from router.feeds.discovery.kube_objects import KubeApiError

GROUP, RESOURCE = "coordination.k8s.io", "leases"
LEASE_S = 60
"""A Lease that was not renewed for this long is free."""
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"


class _LeaseSpec(msgspec.Struct, rename="camel"):
    holder_identity: str | None = None
    renew_time: str | None = None


class _LeaseMeta(msgspec.Struct, rename="camel"):
    resource_version: str


class _StoredLease(msgspec.Struct):
    metadata: _LeaseMeta
    spec: _LeaseSpec | None = None


_decode = msgspec.json.Decoder(_StoredLease).decode


class KubeLease:
    """One Lease. `identity`: unique among the routers that want it."""

    def __init__(self, api: KubeApi, namespace: str, name: str, identity: str) -> None:
        self._api = api
        self._name = name
        self._identity = identity
        self._folder = f"/apis/{GROUP}/v1/namespaces/{namespace}/{RESOURCE}"
        self._permission = Permission(GROUP, RESOURCE, ("get", "create", "patch"), namespace)
        self._seen: _LeaseSpec | None = None
        self._seen_s = 0.0
        """When the Lease was last seen to change."""

    async def hold(self) -> bool:
        """Take the Lease if it is free, or renew it. Whether this router has it for the next `LEASE_S`. Raises
        `KubeApiError`, whose message says what to do."""
        try:
            return await self._take_or_renew()
        except KubeApiError as error:
            if error.status == HTTPStatus.CONFLICT:
                return False
            raise KubeApiError(error.status, self._permission.refusal(self._folder, error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise KubeApiError(0, f"{self._folder}: response is not what Kubernetes sends: {error!s:.200}") from error

    async def _take_or_renew(self) -> bool:
        try:
            found = _decode(await self._api.get(f"{self._folder}/{self._name}", {}))
        except KubeApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            await self._create()
            return True
        spec, now_s = found.spec or _LeaseSpec(), asyncio.get_running_loop().time()
        if spec != self._seen:
            self._seen, self._seen_s = spec, now_s
        if spec.holder_identity not in (None, "", self._identity) and now_s < self._seen_s + LEASE_S:
            return False
        changes = {"metadata": {"resourceVersion": found.metadata.resource_version}, "spec": self._spec()}
        await self._api.patch(f"{self._folder}/{self._name}", msgspec.json.encode(changes))
        return True

    async def _create(self) -> None:
        lease = {
            "apiVersion": f"{GROUP}/v1",
            "kind": "Lease",
            "metadata": {"name": self._name},
            "spec": self._spec(),
        }
        await self._api.create(self._folder, msgspec.json.encode(lease))

    def _spec(self) -> dict[str, object]:
        now = datetime.now(UTC).strftime(TIME_FORMAT)
        return {"holderIdentity": self._identity, "leaseDurationSeconds": LEASE_S, "renewTime": now}
