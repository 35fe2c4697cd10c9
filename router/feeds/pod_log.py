"""Logs the changes of pods, and how prompts are matched on them: a summary once all have been tested, and each change.

A warning about matching names the pods, the first known cause and what to do; pods with the same cause share a line.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import structlog

from router.engines.adapter import PodFacts
from router.engines.engine_catalog import ENGINES
from router.feeds.discovery.membership import Membership
from router.feeds.kv_zmq import KvStreams
from router.feeds.supervise import in_turns
from router.feeds.watch import Check, Turn
from router.fleet.fleet import Fleet, Listener
from router.observe.changes import ChangeKind, Changes
from router.stores.prefix_store import LocalStore
from router.types import Matching, Pod, PodId, PodState, PodStatus, PrefixTrust

_REASONS: Mapping[PodState, str] = {
    PodState.JOINING: "undrained",
    PodState.READY: "health check passed",
    PodState.DRAINING: "admin call",
    PodState.GONE: "removed, or no longer listed",
}
"""Reasons of changes for which the fleet records none."""
_SERVING = (PodState.READY, PodState.EJECTED)
_KINDS: Mapping[tuple[PodState, PodState], ChangeKind] = {
    (PodState.JOINING, PodState.READY): "joined",
    (PodState.READY, PodState.EJECTED): "ejected",
    (PodState.EJECTED, PodState.READY): "readmitted",
    **{(old, new): "left" for old in _SERVING for new in (PodState.DRAINING, PodState.GONE)},
}
"""The changes of state that change what the fleet can serve. A pod that is drained has left; its end is no change."""

LOOK_S, LINES_S = 5.0, 1.0
"""How often a pod is looked at that does not change, and the time between two lines of one pod."""
MAX_NAMES, MAX_CAUSES = 20, 3
_GUESSED = "by what they were sent"
_WORDS = {Matching.EVENTS: "matched by KV events", Matching.OFF: "by load only"}

Found: TypeAlias = Mapping[PodId, tuple[Matching, str]]
"""By pod, how prompts are matched, and why not by KV events."""

log = structlog.get_logger()


def untested(fleet: Fleet) -> list[PodId]:
    """Pods that join, or whose self-test has not ended."""
    waiting = (s for s in fleet.snapshot.pods if s.state in (PodState.JOINING, PodState.READY))
    return [s.pod.id for s in waiting if s.state is PodState.JOINING or not fleet.trust_reason(s.pod.id)]


def summary(found: Found) -> str:
    """One sentence about these pods, with their most frequent causes."""
    counts = Counter(found.values()).most_common(MAX_CAUSES + 1)
    counts.sort(key=lambda one: list(Matching).index(one[0][0]))
    parts = (f"{n} {_WORDS.get(kind, _GUESSED)}{why and f': {why}'}" for (kind, why), n in counts)
    return f"of {len(found)} pods, {', '.join(parts)}"


def log_changes(fleet: Fleet, changes: Changes | None = None) -> Listener:
    """A listener of the fleet, which also adds to `changes`. An ejection is a warning, other changes are info."""
    record = (changes or Changes()).add

    def on_change(pod: Pod, old: PodState, new: PodState) -> None:
        if old is new:
            log.info("pod restarted; its cache is empty", pod=pod.id, epoch=pod.epoch)
            record("restarted", pod.id, "a new process answers; its cache is empty")
            return
        reason = "found" if old is PodState.GONE else fleet.state_reason(pod.id) or _REASONS.get(new, "")
        write = log.warning if new is PodState.EJECTED else log.info
        write("pod state changed", pod=pod.id, old=old.value, new=new.value, reason=reason)
        if kind := _KINDS.get((old, new)):
            record(kind, pod.id, reason)

    return on_change


OF_GENERATION = ("models", "weights", "version", "block_size_tokens")
"""What pods report of the generation of their blocks."""


def generation_change(pod: Pod, facts: PodFacts) -> str:
    """What a pod that was described before reports otherwise now, of that which decides whether its KV is reusable."""
    pairs = ((name, getattr(pod, name), getattr(facts, name)) for name in OF_GENERATION)
    different = [f"{name} {new}, before {old}" for name, old, new in pairs if new and old != new]
    return "; ".join(different) if pod.models else ""


def warn_of_others_models(fleet: Fleet, pod: Pod, facts: PodFacts) -> None:
    """A pod that lists models of others receives their prompts. Pods of one model usually list the same names."""
    names = {*facts.models, *facts.adapters}
    for other in (status.pod for status in fleet.snapshot.pods if status.pod.id != pod.id):
        taken = names.intersection(other.models)
        if taken and not pod.allowed_models and set(facts.models) != set(other.models):
            hint = "limit what it may serve by `models` of the pod"
            log.warning("pod lists models of others", pod=pod.id, models=sorted(taken)[:8], of=other.id, hint=hint)
            return


@dataclass(frozen=True, slots=True)
class PodMatching:
    """How prompts are matched on pods. `unread_reason`: why the prompts of a model are not read. `no_events_reason`:
    why the index of a cluster does not get the events of a pod, given why the pod does not name them."""

    fleet: Fleet
    unread_reason: Callable[[str], str]
    membership: Membership
    store: LocalStore
    kv_streams: KvStreams
    no_events_reason: Callable[[Pod, str], str] | None = None

    def publishes_events(self, pod_id: PodId) -> bool:
        """Whether the index receives the pod's KV events."""
        is_followed = self.kv_streams.follows(pod_id) and not self.kv_streams.problems.get(pod_id)
        return is_followed or self.store.is_published(pod_id, time.monotonic())

    def of(self, pod: Pod) -> tuple[Matching, str]:
        """How prompts are matched on a pod, and why not by its KV events."""
        if why := next(filter(None, map(self.unread_reason, pod.models)), ""):
            return Matching.OFF, why
        if pod.trust is not PrefixTrust.TRUSTED:
            return Matching.OFF, f"self-test {pod.trust.value}: {self.fleet.trust_reason(pod.id)}"
        if self.publishes_events(pod.id):
            return Matching.EVENTS, ""
        why = self._no_events_reason(pod)
        return (Matching.NO_EVENTS, f"no KV events: {why}") if why else (Matching.PREDICTED, "")

    def _no_events_reason(self, pod: Pod) -> str:
        """The first known cause, and what to do; empty where there should be none."""
        config = self.membership.config_of(pod)
        if config is not None and config.kv_events == "off":
            return ""
        own, has_flag = self.kv_streams.problems.get(pod.id, ""), ENGINES[pod.engine].kv_events_flag
        if self.no_events_reason is None or self.kv_streams.follows(pod.id) or not has_flag:
            return own
        return self.no_events_reason(pod, own)


@dataclass(slots=True, eq=False)
class MatchingLog:
    fleet: Fleet
    matching_of: Callable[[Pod], tuple[Matching, str]]
    _known: Found = field(default_factory=dict)
    _is_summarized: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def check(self) -> Check:
        return Check(
            name="matching",
            run=self._look,
            due=lambda _status: True,
            every_s=lambda _status: LOOK_S,
            forget=lambda _pod: self._changed.set(),
        )

    async def _look(self, pod: Pod, _turn: Turn) -> None:
        status = self.fleet.status(pod.id)
        if not self._is_summarized or (status and self._found(status)) != self._known.get(pod.id):
            self._changed.set()

    async def run(self) -> None:
        """Write lines after changes until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.write()
            await asyncio.sleep(LINES_S)

    def _found(self, status: PodStatus) -> tuple[Matching, str] | None:
        """How prompts are matched on a pod; None before its self-test has ended."""
        is_tested = status.state is PodState.READY and self.fleet.trust_reason(status.pod.id)
        return self.matching_of(status.pod) if is_tested else None

    async def write(self) -> None:
        """Log what has changed since the last call. A reason says that something is wrong."""
        waiting = untested(self.fleet)
        found = {s.pod.id: how async for s in in_turns(self.fleet.snapshot.pods) if (how := self._found(s))}
        changed = {pod: how for pod, how in found.items() if how != self._known.get(pod, (how[0], ""))}
        by_cause: dict[tuple[Matching, str], list[PodId]] = {}
        for pod, how in changed.items():
            by_cause.setdefault(how, []).append(pod)
        async for how, pods in in_turns(by_cause.items()):  # each pod may have its own
            write = log.warning if how[1] else log.info
            write("matching changed", pods=pods[:MAX_NAMES], count=len(pods), matching=how[0].value, reason=how[1])
        self._known = found
        if found and not self._is_summarized and all(map(self.fleet.state_reason, waiting)):
            self._is_summarized = True
            write = log.warning if any(why for _, why in found.values()) else log.info
            write("ready", matching=summary(found))
