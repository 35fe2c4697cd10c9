"""What may people change of a router that serves?

Pods are added, removed and drained, policies are read anew: here, and with other workers there as well, also for those
that come later. This file decides nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from router.config.schema import PodConfig
from router.errors import ConfigError
from router.feeds.policies import PolicyFeed, Reload
from router.fleet.fleet import Fleet
from router.fleet.lifecycle import PodEvent
from router.types import PodId, PodState

POD, DRAIN, POLICIES = "pod ", "drain ", "policies"
"""What an order is about: a pod by its URL, a pod by its id, all policies."""

log = structlog.get_logger()


class Orders:
    """Carries them out. `add` and `remove` are the router's own; `told` passes an order on to other workers."""

    def __init__(
        self, fleet: Fleet, policies: PolicyFeed, add: Callable[[PodConfig], None], remove: Callable[[PodId], bool]
    ) -> None:
        self._fleet = fleet
        self._policies = policies
        self._add = add
        self._remove = remove
        self._reloads: set[asyncio.Task[Reload]] = set()
        self.told: Callable[[str, str], None] | None = None

    def add(self, pod: PodConfig) -> None:
        """Take up one more pod. Raises `ConfigError`."""
        self._add(pod)
        self._tell(POD + pod.url, pod.model_dump_json())

    def remove(self, pod_id: PodId) -> bool:
        """Let go of a pod; False where it is none that was configured or added."""
        status = self._fleet.status(pod_id)
        if status is None or not self._remove(pod_id):
            return False
        self._tell(POD + status.pod.url, "")
        self._tell(DRAIN + pod_id, "")
        return True

    def drain(self, pod_id: PodId, event: PodEvent) -> PodState:
        """DRAIN or UNDRAIN it. Returns its state afterwards."""
        self._tell(DRAIN + pod_id, event.value)
        return self._fleet.event(pod_id, event)

    async def reload(self) -> Reload:
        """Read the policies anew; the others do so at once, too. They are told before anything is read: of two workers
        that are asked at once, the one that was asked first hears of the other's order, and reads again."""
        self._tell(POLICIES, "")
        return await self.reload_here()

    async def reload_here(self) -> Reload:
        """In this worker alone: the others hear of it themselves."""
        return await self._policies.reload()

    def obey(self, subject: str, wanted: str) -> None:
        """Somebody ordered this at another worker."""
        if subject == POLICIES:
            reload = asyncio.ensure_future(self.reload_here())
            self._reloads.add(reload)
            reload.add_done_callback(self._reloads.discard)
        elif subject.startswith(DRAIN) and wanted:
            self._fleet.event(subject.removeprefix(DRAIN), PodEvent(wanted))
        elif subject.startswith(POD):
            self._obey_pod(subject.removeprefix(POD), wanted)
        log.info("ordered at another worker", order=subject, wanted=wanted)

    def _obey_pod(self, url: str, wanted: str) -> None:
        if wanted:
            try:
                self._add(PodConfig.model_validate_json(wanted))
            except ConfigError as error:  # it was right where it was ordered
                log.error("a pod that another worker took up cannot be taken up here", pod=url, why=str(error))
            return
        known = [status.pod.id for status in self._fleet.snapshot.pods if status.pod.url == url]
        for pod_id in known[:1]:
            self._remove(pod_id)

    def _tell(self, subject: str, wanted: str) -> None:
        if self.told is not None:
            self.told(subject, wanted)
