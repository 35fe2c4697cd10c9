"""Logs how prompts are matched on the pods: a summary once all of them have been tested, and each change.

A warning names the pods, the first known cause and what to do; pods with the same cause share a line.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import structlog

from router.feeds.supervise import in_turns
from router.fleet.fleet import Fleet
from router.types import Matching, Pod, PodId, PodState

CHECK_S = 1.0
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


@dataclass(slots=True, eq=False)
class MatchingLog:
    fleet: Fleet
    matching_of: Callable[[Pod], tuple[Matching, str]]
    _known: Found = field(default_factory=dict)
    _is_summarized: bool = False

    async def run(self) -> None:
        while True:
            await self.check()
            await asyncio.sleep(CHECK_S)

    async def check(self) -> None:
        """Log what has changed since the last check. A reason says that something is wrong."""
        waiting = {*untested(self.fleet)}
        ready = [each.pod for each in self.fleet.snapshot.pods if each.state is PodState.READY]
        found = {pod.id: self.matching_of(pod) async for pod in in_turns(ready) if pod.id not in waiting}
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
