"""Waits at startup until this process has the state of the replicas and workers that already serve, or a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

import structlog

from router.fleet.fleet import Fleet
from router.types import PodId, PodState
from router.workers.worker_sync import WorkerSync

if TYPE_CHECKING:
    from router.wiring.cluster_member import ClusterMember

POLL_S = 0.02
WORKERS_TIMEOUT_S = 10.0
"""Longest wait for the pods that other workers use."""

log = structlog.get_logger()


class StartupWait:
    """`self_test`: whether pods must pass the parity self-test before their caches count."""

    def __init__(self, fleet: Fleet, *, self_test: bool) -> None:
        self._fleet = fleet
        self._self_test = self_test

    async def for_cluster(self, cluster: ClusterMember, timeout_s: float) -> None:
        """Wait for the cluster's index and for the self-tests."""
        try:
            async with asyncio.timeout(timeout_s):
                await cluster.loaded.wait()
                while self._self_test and self._untested():  # noqa: ASYNC110  # many owners change this state
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            log.warning("serving before startup is complete", index=cluster.loaded.is_set(), untested=self._untested())

    async def for_workers(self, sync: WorkerSync) -> None:
        """Wait until this worker can use the pods that other workers use."""
        used = await sync.remote_ready_pods()
        try:
            async with asyncio.timeout(WORKERS_TIMEOUT_S):
                while self._unusable(used):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            log.warning("serving before all pods are ready", missing=self._unusable(used))
        sync.begin()

    def _untested(self) -> list[PodId]:
        """Pods whose self-test has no result yet."""
        return [
            status.pod.id
            for status in self._fleet.snapshot.pods
            if status.state is PodState.JOINING
            or (status.state is PodState.READY and not self._fleet.trust_reason(status.pod.id))
        ]

    def _unusable(self, pods: Iterable[PodId]) -> list[PodId]:
        joining = {status.pod.id for status in self._fleet.snapshot.pods if status.state is PodState.JOINING}
        return sorted(joining.union(self._untested() if self._self_test else ()).intersection(pods))
