"""Writes `controller.kubernetes.io/pod-deletion-cost` of discovered pods, so that a ReplicaSet that is scaled down
removes the pods with the least valued caches first.

One router writes, elected by a Lease. As Kubernetes' own components do it: a router takes a Lease that nobody has
renewed for `LEASE_S` of its own clock, and each write names the version that it read, so that of two routers one is
refused. Clocks are not compared. A pod is written at most once in `POD_INTERVAL_S`, and only if its cost has changed by
a step: each write is an event for all that watch the pod. Requests never wait for this file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TypeAlias

import msgspec
import structlog

from router.feeds.discovery.kube_api import KubeApi, Permission
from router.feeds.discovery.kube_objects import KubeApiError, ObjectKey
from router.feeds.supervise import loop_time_s, raise_if_cancelled
from router.policy.cache_value import is_new_cost

GROUP, RESOURCE = "coordination.k8s.io", "leases"
LEASE_S = 60
"""A Lease that was not renewed for this long is free."""
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"
ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
WARM_UP_S = 60.0
"""A router that has just started does not know yet which prompts come back."""
ROUND_S = 25.0
POD_INTERVAL_S = 60.0
MAX_WRITES = 100
"""In one round."""
WRITE_GAP_S = 0.1
LEASE_MARGIN_S = 35.0
"""Writes end this long before the Lease may be taken by another router: the next round still renews it."""
_GONE = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY)
"""The pod is gone, or another pod has its name."""

CostsOf: TypeAlias = Callable[[], Awaitable[Mapping[str, int] | None]]
"""The deletion costs of all pods by uid; None while they cannot be known."""

log = structlog.get_logger()


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


@dataclass(slots=True, eq=False)
class DeletionCosts:
    """Writes the annotation for one entry of `discovery.kubernetes`. `pods()`: namespace and name by uid."""

    api: KubeApi
    lease: KubeLease
    pods: Callable[[], Mapping[str, ObjectKey]]
    costs: CostsOf
    _written: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Cost and time by uid, while this router has the Lease."""
    _error: str = ""

    async def run(self) -> None:
        await asyncio.sleep(WARM_UP_S)
        while True:
            try:
                await self.write()
                self._log("")
            except KubeApiError as error:
                self._log(str(error))
            raise_if_cancelled()
            await asyncio.sleep(ROUND_S)

    async def write(self) -> None:
        """Write the costs that have changed, if this router has the Lease. Raises `KubeApiError`."""
        asked_s = loop_time_s()
        if not await self.lease.hold():
            self._written.clear()
            return
        costs = await self.costs()
        if costs is None:
            return
        pods = self.pods()
        self._written = {uid: written for uid, written in self._written.items() if uid in pods}
        with suppress(TimeoutError):
            async with asyncio.timeout_at(asked_s + LEASE_S - LEASE_MARGIN_S):
                for uid in self._due(pods, costs)[:MAX_WRITES]:
                    await self._write_one(pods[uid], uid, costs[uid])
                    await asyncio.sleep(WRITE_GAP_S)

    def _due(self, pods: Mapping[str, ObjectKey], costs: Mapping[str, int]) -> list[str]:
        """The pods to write, those first that were not written for the longest time."""

        due: list[tuple[float, str]] = []
        for uid in pods.keys() & costs.keys():
            cost, at_s = self._written.get(uid, (None, 0.0))
            if cost is None or (loop_time_s() >= at_s + POD_INTERVAL_S and is_new_cost(cost, costs[uid])):
                due.append((at_s, uid))
        return [uid for _, uid in sorted(due)]

    async def _write_one(self, key: ObjectKey, uid: str, cost: int) -> None:
        namespace, name = key
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        changes = {"metadata": {"uid": uid, "annotations": {ANNOTATION: str(cost)}}}
        try:
            await self.api.patch(path, msgspec.json.encode(changes))
        except KubeApiError as error:
            if error.status not in _GONE:
                raise KubeApiError(
                    error.status, Permission("", "pods", ("patch",), namespace).refusal(path, error)
                ) from error
        self._written[uid] = cost, loop_time_s()

    def _log(self, error: str) -> None:
        if error and error != self._error:
            log.error("deletion costs not written", error=error)
        elif self._error and not error:
            log.info("deletion costs written again")
        self._error = error
