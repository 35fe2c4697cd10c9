"""Which connection pool belongs to a pod?

One pool a pod and life: made on first use, closed when the pod is gone. This file sends nothing.
"""

from __future__ import annotations

from router.proxy.connection import UpstreamTimeouts
from router.proxy.upstream import UpstreamPool
from router.types import Pod, PodId


class UpstreamPools:
    """Upstream pools by pod."""

    def __init__(self, timeouts: UpstreamTimeouts) -> None:
        self._timeouts = timeouts
        self._pools: dict[PodId, UpstreamPool] = {}

    def of(self, pod: Pod) -> UpstreamPool:
        """The pod's pool."""
        pool = self._pools.get(pod.id)
        if pool is None:
            pool = self._pools[pod.id] = UpstreamPool(pod.id, pod.url, self._timeouts, pod.socket)
        return pool

    def forget(self, pod: PodId) -> None:
        """Close what is idle; exchanges under way end by themselves."""
        pool = self._pools.pop(pod, None)
        if pool is not None:
            pool.close()

    def expire_idle(self) -> None:
        """Close connections that engines are about to close themselves."""
        for pool in self._pools.values():
            pool.expire_idle()

    def close(self) -> None:
        """The router stops."""
        for pod in list(self._pools):
            self.forget(pod)
