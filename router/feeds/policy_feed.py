"""Owns the active policies and reloads them when their files change.

Checks the files twice a second (also through the links of a mounted ConfigMap), and reloads at once on SIGHUP or an
admin call. A set becomes active after it was built and validated as a whole. If it is invalid, the last valid set stays
active, and log and /readyz name file and line. Learned state (speeds, prefixes, load) survives a reload.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from router.config.policy_files import PolicyFolder
from router.config.watched_file import Sleep, WatchedFile
from router.feeds.supervise import pause
from router.fleet.fleet import Fleet
from router.observe.changes import Changes
from router.observe.declared import of_decisions
from router.observe.ended import RecordedDecision
from router.observe.metrics import Metrics
from router.observe.recent_decisions import RecentDecisions
from router.policy.pickers import RingBoundedLoad
from router.policy.policy_set import PolicySet
from router.policy.price import Choice, choice_of
from router.policy.review import Review, chosen, review
from router.policy.ring import pod_points
from router.policy.spec import Policy
from router.types import Scene

INTERVAL_S = 0.5
"""Time between checks."""

ReviewChange = Callable[[PolicySet, PolicySet], Awaitable[Review | None]]
"""Maps (old set, new set) to the decisions that differ; None if unknown."""


log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Reload:
    version: str
    """Version of the active set."""
    changed: bool = False
    review: str | None = None
    ttft_ratio: float = 1.0
    """Mean expected time to first token, relative to that of the old policies."""
    error: str = ""
    """File, line and reason if the files are invalid."""
    at_s: float = field(default_factory=time.time)
    """Unix time of its end."""


class PolicyFeed:
    """Owns the active set. The constructor raises `ConfigError`: a router does not start with invalid policies."""

    def __init__(
        self,
        folder: PolicyFolder,
        metrics: Metrics,
        review: ReviewChange | None = None,
        sleep: Sleep = asyncio.sleep,
        changes: Changes | None = None,
    ) -> None:
        self._folder = folder
        self._metrics = metrics
        self._review = review
        self._changes = changes or Changes()
        self._files = WatchedFile(folder.read, folder.stamp, sleep=sleep)
        self._reload_lock = asyncio.Lock()
        self.last_reload: Reload | None = None
        """Since the start of this process."""
        self._files.current()
        self._count_active()

    @property
    def folder(self) -> Path:
        return self._folder.folder

    def current(self) -> PolicySet:
        return self._files.value

    @property
    def error(self) -> str:
        """Why the current files are not active; empty if they are."""
        return self._files.error

    @property
    def refused_since_s(self) -> float | None:
        """Unix time since when they are not."""
        return self._files.failed_since_s

    async def run(self) -> None:
        hangup = asyncio.Event()
        with suppress(ValueError, RuntimeError):  # signals can be handled in the main thread only
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup.set)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S):
                    await hangup.wait()
            if hangup.is_set():
                hangup.clear()
                await self.reload()
            else:
                await self.check_files()

    async def check_files(self) -> None:
        """Reload if the files have changed and are steady."""
        if await self._files.is_due():
            await self.reload()

    async def reload(self) -> Reload:
        """Read all files, changed or not. Does not raise for invalid files."""
        async with self._reload_lock:
            self.last_reload = await self._reload()
            return self.last_reload

    async def _reload(self) -> Reload:
        old = self.current()
        await self._files.reload()
        if self.error:
            return self._refuse()
        new = self.current()
        changed = new.version != old.version
        self._count_active()
        self._metrics[of_decisions.POLICY_RELOADS].labels("ok").inc()
        found = await self._reviewed(old, new) if changed else None
        self._metrics[of_decisions.POLICY_RELOAD_TTFT].set(found.ttft_ratio if found else 1.0)
        review = str(found) if found else None
        if changed:
            self._changes.add("policy", _different(old, new), review or "files changed")
        log.info("policies reloaded", version=new.version, changed=changed, review=review)
        return Reload(new.version, changed, review, ttft_ratio=found.ttft_ratio if found else 1.0)

    async def _reviewed(self, old: PolicySet, new: PolicySet) -> Review | None:
        """Compare the sets while the new one is already active."""
        try:
            return await self._review(old, new) if self._review else None
        except Exception:
            log.exception("policy impact review failed")
            return None

    def _count_active(self) -> None:
        policies = self.current()
        self._metrics[of_decisions.POLICY_RELOAD_FAILED].set(0)
        self._metrics.observe_policies(policies.version, {one.name: one.version for one in policies.active})

    def _refuse(self) -> Reload:
        version, error = self.current().version, self.error
        self._metrics[of_decisions.POLICY_RELOAD_FAILED].set(1)
        self._metrics[of_decisions.POLICY_RELOADS].labels("refused").inc()
        log.error("invalid policies; last valid set stays active", version=version, error=error)
        return Reload(version, error=error)


def _different(old: PolicySet, new: PolicySet) -> str:
    """The names of the policies that differ, or the version where only their order does."""
    before, after = ({(one.name, one.version) for one in policies.active} for policies in (old, new))
    return ", ".join(sorted({name for name, _ in before ^ after})) or new.version


# --- the review of a change ---

REVIEWED = 500
"""Number of recent decisions that a reload compares in a thread. With 100 pods this takes two seconds."""
SLICE_S, PAUSE_S = 0.0005, 0.002
"""The comparison computes for `SLICE_S`, then sleeps for `PAUSE_S`, so that requests get the GIL."""


async def review_change(recent: RecentDecisions, old: PolicySet, new: PolicySet) -> Review | None:
    """The last decisions that differ under the new set; None without decisions."""
    last = recent.latest(REVIEWED)
    decisions = [decision for decision, _ in last]
    return await asyncio.to_thread(review, _decided(decisions, old, new), new.version) if last else None


def _decided(
    last: Sequence[RecordedDecision], old: PolicySet, new: PolicySet
) -> Iterator[tuple[Scene, Choice | None, Policy]]:
    """(scene, old choice, new policy), with pauses. The old set decides again what an older version of it decided."""
    due_s = time.monotonic() + SLICE_S
    for kept in last:
        if time.monotonic() > due_s:
            time.sleep(PAUSE_S)
            due_s = time.monotonic() + SLICE_S
        scene, by = kept.scene.scene(), old.for_recorded(kept.scene, kept.policy.name)
        same = by.version == kept.policy.version
        was = choice_of(kept.candidates[0].plan) if same else chosen(scene, by)
        yield scene, was, new.for_recorded(kept.scene, kept.policy.name)


# --- ring points ---

RINGS_INTERVAL_S = 1.0
"""Time between checks for policies that have changed."""


@dataclass(slots=True, eq=False)
class RingFeed:
    """Computes the ring points of pods when they join, before a decision needs them: up to 0.1 ms for each. One pod is
    computed in each turn of the event loop, so that 500 pods that join together do not stop it."""

    fleet: Fleet
    policies: Callable[[], PolicySet]

    async def run(self) -> None:
        changed = asyncio.Event()
        unlisten = self.fleet.listen(lambda *_: changed.set())
        try:
            while True:
                await self.prepare()
                await pause(changed, RINGS_INTERVAL_S)
        finally:
            unlisten()

    async def prepare(self) -> None:
        for points_per_pod in ring_sizes(self.policies()):
            for status in self.fleet.snapshot.pods:
                known = pod_points.cache_info().misses
                pod_points(status.pod.id, points_per_pod)
                if pod_points.cache_info().misses > known:
                    await asyncio.sleep(0)


def ring_sizes(policies: PolicySet) -> set[int]:
    """`points_per_pod` of all rings in use."""
    pickers = (policy.picker for policy in policies.active)
    return {picker.points_per_pod for picker in pickers if isinstance(picker, RingBoundedLoad)}
