"""Learns from a pod's KV events what its engine does not report of its cache: the size of its blocks, and its capacity.

A pod that evicts blocks is full: what it holds then is its capacity, but for blocks that are not complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import structlog

from router.feeds.watch import Check, Turn
from router.fleet.fleet import Fleet
from router.stores.prefix_store import LocalStore
from router.types import Pod, PodState, PodStatus

LOOK_S = 5.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class CacheFacts:
    fleet: Fleet
    store: LocalStore

    @property
    def check(self) -> Check:
        return Check(
            name="cache facts",
            run=self._learn,
            due=lambda status: status.state is PodState.READY and bool(self._found(status)),
            every_s=lambda _status: LOOK_S,
        )

    def _found(self, status: PodStatus) -> dict[str, Any]:
        """What its events say and the pod does not."""
        pod, found = status.pod, dict[str, Any]()
        if None not in (pod.block_size_tokens, pod.capacity_tokens):
            return found
        blocks = self.store.cache_of(pod.id).blocks
        if (rule := blocks.announced_rule) is None:
            return found
        if pod.block_size_tokens is None:
            found["block_size_tokens"] = rule.unit_tokens
        if pod.capacity_tokens is None and rule.is_single and self.store.fills_gpu(pod.id):
            found["capacity_tokens"] = blocks.size_blocks * rule.unit_tokens
        return found

    async def _learn(self, pod: Pod, _turn: Turn) -> None:
        found = self._found(PodStatus(pod, PodState.READY))
        self.fleet.learn(pod.id, **found)
        log.info("learnt from KV events", pod=pod.id, **found)
