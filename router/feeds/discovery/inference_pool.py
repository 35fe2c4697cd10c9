"""Finds the pods of an InferencePool (Gateway API's inference extension, `inference.networking.k8s.io/v1`): those that
its `selector` selects, each at its `targetPorts`. Reads its InferenceObjectives: the priority of those that name one.

Both are read again every `POOL_S`, because they rarely change; pods are watched. While one cannot be read, or is gone,
its last pods or priorities stay in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, TypeAlias

import msgspec

from router.feeds.discovery.kube_api import KubeApi, KubeApiError, Permission
from router.feeds.discovery.kubernetes_pods import KubernetesSource
from router.feeds.discovery.membership import ListedPod, SourceStatus
from router.feeds.supervise import cancel_all
from router.guards import Bound

POOL_S = 10.0
GROUP, RESOURCE = "inference.networking.k8s.io", "inferencepools"
MAX_PORTS, MAX_LABELS = 8, 64
"""The API server allows no more of either."""


_POOL = Bound("InferencePool", 1024 * 1024)
OBJECTIVE_GROUPS, OBJECTIVES = ("inference.networking.x-k8s.io", "llm-d.ai"), "inferenceobjectives"
"""That of the inference extension, and llm-d's since its release 0.8. A cluster may have both, one or none."""
NOT_FOUND = 404
MAX_OBJECTIVES = 1000


class _TargetPort(msgspec.Struct):
    number: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class _Selector(msgspec.Struct, rename="camel"):
    match_labels: Annotated[dict[str, str], msgspec.Meta(min_length=1, max_length=MAX_LABELS)]


class _Spec(msgspec.Struct, rename="camel"):
    selector: _Selector
    target_ports: Annotated[list[_TargetPort], msgspec.Meta(min_length=1, max_length=MAX_PORTS)]


class _Pool(msgspec.Struct):
    spec: _Spec


_POOLS = msgspec.json.Decoder(_Pool)


class PoolTarget(msgspec.Struct, frozen=True):
    """The pods that a pool means, by label selector, and the ports of each, one an engine or rank."""

    selector: str
    ports: tuple[int, ...]


def read_pool(body: bytes) -> PoolTarget:
    """Raises `ValueError`."""
    spec = _POOL.json(body, _POOLS).spec
    selector = ",".join(f"{name}={value}" for name, value in sorted(spec.selector.match_labels.items()))
    return PoolTarget(selector, tuple(port.number for port in spec.target_ports))


class PoolPods:
    """The pods of one pool. `follow` builds the source of the pods that it means now."""

    def __init__(
        self,
        name: str,
        namespace: str,
        api: KubeApi,
        status: SourceStatus,
        follow: Callable[[PoolTarget], KubernetesSource],
    ) -> None:
        self._path = f"/apis/{GROUP}/v1/namespaces/{namespace}/{RESOURCE}/{name}"
        self._permission = Permission(GROUP, RESOURCE, ("get",), namespace)
        self._api = api
        self._status = status
        self._follow = follow

    async def __aiter__(self) -> AsyncGenerator[Sequence[ListedPod], None]:
        target = await self._other_than(None)
        while True:
            changed = asyncio.create_task(self._other_than(target))
            try:
                async with aclosing(aiter(self._follow(target))) as sets:
                    while (found := await _next_before(changed, sets)) is not None:
                        yield found
                target = changed.result()
            finally:
                await cancel_all([changed])

    async def _other_than(self, known: PoolTarget | None) -> PoolTarget:
        """What the pool means as soon as that differs from `known`."""
        while True:
            found = await self._read()
            if found is not None and found != known:
                return found
            await asyncio.sleep(POOL_S)

    async def _read(self) -> PoolTarget | None:
        """None if the pool cannot be read."""
        try:
            target = read_pool(await self._api.get(self._path, {}))
        except KubeApiError as error:
            self._status.fail(self._permission.refusal(self._path, error))
        except ValueError as error:
            self._status.fail(f"{self._path}: {error}")
        else:
            self._status.confirm()
            return target
        return None


async def _next_before(
    changed: asyncio.Task[PoolTarget], sets: AsyncGenerator[Sequence[ListedPod], None]
) -> Sequence[ListedPod] | None:
    """The next set of pods; None if the pool changed before."""
    upcoming = asyncio.ensure_future(anext(sets))
    try:
        await asyncio.wait({upcoming, changed}, return_when=asyncio.FIRST_COMPLETED)
        return upcoming.result() if upcoming.done() and not changed.done() else None
    finally:
        if not upcoming.done():
            upcoming.cancel()
            await asyncio.gather(upcoming, return_exceptions=True)


_OBJECTIVES = Bound("InferenceObjectives", 4 * 1024 * 1024, 32 * MAX_OBJECTIVES, b"{")

Priorities: TypeAlias = Mapping[bytes, int]
"""By name of the objective."""


class _Named(msgspec.Struct):
    name: str


class _ObjectiveSpec(msgspec.Struct, rename="camel"):
    pool_ref: _Named
    priority: int | None = None


class _Objective(msgspec.Struct):
    metadata: _Named
    spec: _ObjectiveSpec


class _Listed(msgspec.Struct):
    items: Annotated[list[_Objective], msgspec.Meta(max_length=MAX_OBJECTIVES)]


_LISTS = msgspec.json.Decoder(_Listed)


def read_objectives(body: bytes, pool: str) -> Priorities:
    """Those of one pool. Raises `ValueError`."""
    found = (one for one in _OBJECTIVES.json(body, _LISTS).items if one.spec.pool_ref.name == pool)
    return {one.metadata.name.encode(): one.spec.priority or 0 for one in found}


class PoolObjectives:
    """The objectives of one pool. `priorities` has the latest."""

    def __init__(self, pool: str, namespace: str, api: KubeApi, status: SourceStatus) -> None:
        self._pool = pool
        self._namespace = namespace
        self._api = api
        self.status = status
        self.priorities: Priorities = {}

    async def run(self) -> None:
        while True:
            await self._read()
            await asyncio.sleep(POOL_S)

    async def _read(self) -> None:
        found: dict[bytes, int] = {}
        for group in OBJECTIVE_GROUPS:
            path = f"/apis/{group}/v1alpha2/namespaces/{self._namespace}/{OBJECTIVES}"
            try:
                found |= read_objectives(await self._api.get(path, {}), self._pool)
            except KubeApiError as error:
                if error.status != NOT_FOUND:  # the cluster lacks this kind of objects
                    permission = Permission(group, OBJECTIVES, ("list",), self._namespace)
                    self.status.fail(permission.refusal(path, error))
                    return
            except ValueError as error:
                self.status.fail(f"{path}: {error}")
                return
        self.priorities = found
        self.status.confirm()
