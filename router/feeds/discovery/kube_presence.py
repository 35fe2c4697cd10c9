"""Decides which pods of a cluster the router uses, and which of them get no new requests.

A pod is used from its first readiness on. While it is not ready it is drained, for `grace_s`: readiness often fails
because the engine is busy, and its streams and cached blocks are still there. A terminating pod is drained until it is
gone. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from router.config.pod_schema import PodConfig
from router.feeds.discovery.membership import ListedPod
from router.fleet.fleet import NOT_READY

TERMINATING = "terminating in Kubernetes"


@dataclass(frozen=True, slots=True)
class SeenPod:
    """A pod at one port, as the cluster reports it."""

    config: PodConfig
    uid: str
    ready: bool
    terminating: bool
    created: str = ""


class Presence:
    """The pods that are used, and since when they are not ready."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._not_ready_since_s: dict[tuple[str, str], float | None] = {}
        """When each pod in use became unready, by uid and URL; None while it is ready."""
        self.next_change_s: float | None = None
        """When the result changes by time alone."""

    def update(self, seen: Iterable[SeenPod], now_s: float) -> list[ListedPod]:
        """The pods that are used now. Of two with one URL the last is the one that listens there: a pod keeps its
        address in the API for a while after another has got it."""
        before, self._not_ready_since_s = self._not_ready_since_s, {}
        changes_s, listed = list[float](), list[ListedPod]()
        for pod in sorted(seen, key=lambda pod: (not pod.terminating, pod.ready, pod.created)):
            key = pod.uid, pod.config.url
            reason = TERMINATING if pod.terminating else "" if pod.ready else NOT_READY
            if key not in before and reason:
                continue
            since_s = None if reason != NOT_READY else before[key] if before[key] is not None else now_s
            if since_s is not None:
                if now_s >= since_s + self._grace_s:
                    continue
                changes_s.append(since_s + self._grace_s)
            self._not_ready_since_s[key] = since_s
            listed.append(ListedPod(pod.config, pod.uid, reason))
        self.next_change_s = min(changes_s, default=None)
        return listed
