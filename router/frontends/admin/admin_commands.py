"""Carries out admin commands: add, remove and drain pods, reload policies.

With several workers, each command is also published to the other workers, and their commands are applied here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from router.config.pod_schema import PodConfig
from router.errors import ConfigError
from router.feeds.policy_feed import PolicyFeed, Reload
from router.fleet.fleet import Fleet, PodEvent
from router.types import PodId, PodState

POD, DRAIN, POLICIES, ADAPTERS = "pod ", "drain ", "policies", "adapters "
"""Subjects of commands. A pod's URL follows `POD`, a pod's id follows `DRAIN` and `ADAPTERS`."""
_NAMES = msgspec.json.Decoder(tuple[str, ...])

log = structlog.get_logger()


class AdminCommands:
    """`add`, `remove` and `drain` change the pods of this process. `publish(subject, wanted)`, if set, sends a command
    to the other workers."""

    def __init__(
        self,
        fleet: Fleet,
        policies: PolicyFeed,
        add: Callable[[PodConfig], None],
        remove: Callable[[PodId], bool],
        drain: Callable[[PodId, PodEvent], PodState],
    ) -> None:
        self._fleet = fleet
        self._policies = policies
        self._add = add
        self._remove = remove
        self._drain = drain
        self._reloads: set[asyncio.Task[Reload]] = set()
        self.publish: Callable[[str, str], None] | None = None

    def add(self, pod: PodConfig) -> None:
        """Add a pod, or replace the one with its URL. Raises `ConfigError`."""
        self._add(pod)
        self._publish(POD + pod.url, pod.model_dump_json())

    def remove(self, pod_id: PodId) -> bool:
        """Remove a pod. False if there is no pod with this id."""
        status = self._fleet.status(pod_id)
        if status is None or not self._remove(pod_id):
            return False
        self._publish(POD + status.pod.url, "")
        self._publish(DRAIN + pod_id, "")
        return True

    def drain(self, pod_id: PodId, event: PodEvent) -> PodState:
        """DRAIN or UNDRAIN a pod. Returns its new state."""
        self._publish(DRAIN + pod_id, event.value)
        return self._drain(pod_id, event)

    def set_adapters(self, pod_id: PodId, adapters: tuple[str, ...]) -> None:
        """Record which adapters a pod has loaded."""
        self._fleet.learn_adapters(pod_id, adapters)
        self._publish(ADAPTERS + pod_id, msgspec.json.encode(adapters).decode())

    async def reload(self) -> Reload:
        """Reload the policies of all workers. Publishing comes first: if two workers receive this call concurrently,
        each reads again after the other's command, so that both end with the same files."""
        self._publish(POLICIES, "")
        return await self._policies.reload()

    def apply_remote(self, subject: str, wanted: str) -> None:
        """Apply a command from another worker."""
        if subject == POLICIES:
            reload = asyncio.ensure_future(self._policies.reload())
            self._reloads.add(reload)
            reload.add_done_callback(self._reloads.discard)
        elif subject.startswith(DRAIN) and wanted:
            self._drain(subject.removeprefix(DRAIN), PodEvent(wanted))
        elif subject.startswith(ADAPTERS):
            self._fleet.learn_adapters(subject.removeprefix(ADAPTERS), _NAMES.decode(wanted))
        elif subject.startswith(POD):
            self._apply_pod(subject.removeprefix(POD), wanted)
        log.info("applied admin command from peer worker", subject=subject, wanted=wanted)

    def _apply_pod(self, url: str, wanted: str) -> None:
        if wanted:
            try:
                self._add(PodConfig.model_validate_json(wanted))
            except ConfigError as error:  # the other worker accepted it
                log.error("pod of peer worker rejected", url=url, error=str(error))
            return
        known = next((status.pod.id for status in self._fleet.snapshot.pods if status.pod.url == url), None)
        if known is not None:
            self._remove(known)

    def _publish(self, subject: str, wanted: str) -> None:
        if self.publish is not None:
            self.publish(subject, wanted)
