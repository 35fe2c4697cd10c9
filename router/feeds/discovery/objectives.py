"""Reads the InferenceObjectives of a pool: the priority of the requests that name one of them.

They are listed again every `POOL_S`. While they cannot be read, the last ones stay in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec

from router.feeds.discovery.inference_pool import POOL_S
from router.feeds.discovery.kube_api import KubeApi, Permission
from router.feeds.discovery.kube_objects import KubeApiError
from router.feeds.discovery.source_status import SourceStatus
from router.guards import Bound

GROUPS, RESOURCE = ("inference.networking.x-k8s.io", "llm-d.ai"), "inferenceobjectives"
"""That of the inference extension, and llm-d's since its release 0.8. A cluster may have both, one or none."""
NOT_FOUND = 404
MAX_OBJECTIVES = 1000
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
        for group in GROUPS:
            path = f"/apis/{group}/v1alpha2/namespaces/{self._namespace}/{RESOURCE}"
            try:
                found |= read_objectives(await self._api.get(path, {}), self._pool)
            except KubeApiError as error:
                if error.status != NOT_FOUND:  # the cluster lacks this kind of objects
                    permission = Permission(group, RESOURCE, ("list",), self._namespace)
                    self.status.fail(permission.refusal(path, error))
                    return
            except ValueError as error:
                self.status.fail(f"{path}: {error}")
                return
        self.priorities = found
        self.status.confirm()
