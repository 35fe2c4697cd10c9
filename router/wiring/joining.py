"""When may a router, or one of its workers, begin to serve beside others that do?

Once it knows what they know and can use the pods that they use; or without, when time is up. This file starts nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog

from router.fleet.fleet import Fleet
from router.types import PodId, PodState
from router.wiring.cluster_member import ClusterMember
from router.workers.worker_sync import WorkerSync

POLL_S = 0.02
CATCH_UP_S = 10.0
"""How long a worker waits for what other workers have."""

log = structlog.get_logger()


class Joining:
    """One router's. `parity`: are pods tested?"""

    def __init__(self, fleet: Fleet, *, parity: bool) -> None:
        self._fleet = fleet
        self._parity = parity

    async def cluster(self, cluster: ClusterMember, timeout_s: float) -> None:
        """Know the index and which pods to trust."""
        try:
            async with asyncio.timeout(timeout_s):
                await cluster.loaded.wait()
                while self._parity and self._untested():  # noqa: ASYNC110  # many owners decide that
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            log.warning("serving before all is known", index=cluster.loaded.is_set(), untested=self._untested())

    async def workers(self, sync: WorkerSync) -> None:
        """Where others serve already, use the pods that they use."""
        used = await sync.remote_ready_pods()
        try:
            async with asyncio.timeout(CATCH_UP_S):
                while self._unused(used):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            log.warning("serving before all pods are known", unused=self._unused(used))
        sync.begin()

    def _untested(self) -> list[PodId]:
        """Pods that may yet prove that their tokens and hashes are ours."""
        return [
            status.pod.id
            for status in self._fleet.snapshot.pods
            if status.state is PodState.JOINING
            or (status.state is PodState.READY and not self._fleet.trust_reason(status.pod.id))
        ]

    def _unused(self, pods: Iterable[PodId]) -> list[PodId]:
        wanting = {status.pod.id for status in self._fleet.snapshot.pods if status.state is PodState.JOINING}
        return sorted(wanting.union(self._untested() if self._parity else ()).intersection(pods))
