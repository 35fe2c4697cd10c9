"""What the routers of a simulation learn of its pods and of each other, and when.

KV events arrive late or never, loads are scraped, work in flight is exchanged, and a router that restarts reads the
index again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from loadtest.simulator.router_view import RouterView
from loadtest.simulator.scenario import Conditions
from loadtest.simulator.virtual_clock import VirtualClock
from loadtest.simulator.virtual_pod import VirtualPod
from router.types import BlockChange, PodId, PodLoad


@dataclass(slots=True, eq=False)
class ViewUpdates:
    """Updates the views of all routers. `goes_on`: whether the simulation is not complete."""

    views: Sequence[RouterView]
    pods: Mapping[PodId, VirtualPod]
    conditions: Conditions
    clock: VirtualClock
    goes_on: Callable[[], bool]
    has_events: bool
    random: Random
    _events: deque[tuple[float, PodId, BlockChange]] = field(default_factory=deque)
    """KV events on their way to the routers."""

    def start(self) -> None:
        exchange_ms = self.conditions.exchange_ms
        self._repeat(self._scrape, self.conditions.scrape_ms, first_ms=0.0)
        if exchange_ms and len(self.views) > 1:
            self._repeat(self._exchange, exchange_ms, first_ms=exchange_ms)
        for replica, at_s, blind_s in self.conditions.restarts:
            self.clock.call_at(at_s * 1000, self._restart, replica, blind_s)

    def publish(self, pod_id: PodId, change: BlockChange) -> None:
        lost = self.conditions.event_loss > 0 and self.random.random() < self.conditions.event_loss
        if self.has_events and not lost:
            self._events.append((self.clock.now_ms + self.conditions.event_delay_ms, pod_id, change))

    def refresh(self, view: RouterView) -> None:
        """What has arrived by now, to be called before a decision of `view`: KV events, and the steps that the tokens
        of its own requests show. Pods skip steps that only decode."""
        events, now_ms = self._events, self.clock.now_ms
        while events and events[0][0] <= now_ms:
            _, pod_id, change = events.popleft()
            for each in self.views:
                each.apply_blocks(pod_id, change)
        for pod_id, streams in view.streams.items():
            if streams:
                began_s = self.pods[pod_id].step_began_ms(now_ms) / 1000
                if began_s > view.ledger.decoding(pod_id)[2]:
                    view.apply_step(pod_id, began_s)

    def _scrape(self) -> None:
        """Give all routers the current load of every pod. They keep it until the next scrape."""
        loads = self._loads()
        for view in self.views:
            view.apply_loads(loads)

    def _loads(self) -> dict[PodId, PodLoad]:
        return {pod_id: pod.load for pod_id, pod in self.pods.items()}

    def _exchange(self) -> None:
        own = [view.ledger.own() for view in self.views]
        for at, view in enumerate(self.views):
            view.ledger.apply_replicas([one for other, one in enumerate(own) if other != at], self.clock.now_s)

    def _restart(self, replica: int, blind_s: float) -> None:
        self.views[replica].restart()
        self.views[replica].apply_loads(self._loads())
        if self.has_events:
            self.clock.call_in(blind_s * 1000, self._read_index, replica)

    def _read_index(self, replica: int) -> None:
        """Give a restarted router all blocks that the pods hold now."""
        view = self.views[replica]
        for pod_id, pod in self.pods.items():
            for change in pod.held_blocks():
                view.apply_blocks(pod_id, change)

    def _repeat(self, update: Callable[[], None], every_ms: float, *, first_ms: float) -> None:
        """Call at this interval until the simulation is complete."""

        def run() -> None:
            update()
            if self.goes_on():
                self.clock.call_in(every_ms, run)

        self.clock.call_at(first_ms, run)
