"""Asks pods for what they may lack: what their front end is known to lack, and what an answer of theirs has said.

Only the router's own requests show it, so that no client can take a pod out of traffic. It is known until the pod
restarts. Source: docs/engines.md.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import structlog

from router.engines.engine_catalog import ENGINES
from router.engines.lacks import lacking, question
from router.errors import UpstreamError
from router.feeds.watch import Check, Post, Turn, check_of_missing, is_refusal
from router.fleet.fleet import Fleet
from router.types import Pod, PodId

LOOK_S, MAX_PAUSE_S = 1.0, 60.0

log = structlog.get_logger()


@dataclass(slots=True)
class _Asked:
    """What one pod is suspected to lack in this epoch, and for what it has been asked."""

    epoch: int = 0
    suspected: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class LacksTest:
    fleet: Fleet
    post: Post
    timeout_s: float
    _pods: defaultdict[PodId, _Asked] = field(default_factory=lambda: defaultdict(_Asked))

    def suspect(self, pod: Pod, need: str) -> None:
        """An answer of the pod has said that it lacks this."""
        if self.fleet.same_epoch(pod):
            self._of(pod).suspected.add(need)

    @property
    def check(self) -> Check:
        more = {"max_s": MAX_PAUSE_S, "forget": lambda pod_id: self._pods.pop(pod_id, None)}
        return check_of_missing("lacks", self._ask, self._open, LOOK_S, **more)

    def _of(self, pod: Pod) -> _Asked:
        known = self._pods[pod.id]
        if known.epoch != pod.epoch:
            known = self._pods[pod.id] = _Asked(pod.epoch)
        return known

    def _open(self, pod: Pod) -> set[str]:
        """What it has not been asked for yet."""
        known = self._of(pod)
        return known.suspected.union(ENGINES[pod.engine].may_lack.get(pod.front_end, ())) - known.asked

    async def _ask(self, pod: Pod, _turn: Turn) -> bool:
        """Ask for all that is open. False if a pod gave no answer that counts."""
        known, found = self._of(pod), set[str]()
        for need in sorted(self._open(pod)):
            if (lacks := await self._lacks(pod, need)) is not None:
                known.asked.add(need)
                found |= {need} if lacks else set()
        now = self.fleet.same_epoch(pod)
        if now is not None and found:
            self.fleet.learn(pod.id, lacks=now.pod.lacks | found)
            log.warning("pod lacks what some requests need", pod=pod.id, lacks=sorted(found))
        return not self._open(pod)

    async def _lacks(self, pod: Pod, need: str) -> bool | None:
        """Whether the pod lacks this; None where its answer does not say. What it cannot be asked for, it lacks."""
        if (asked := question(need, pod.base_model)) is None:
            return True
        path, body = asked
        try:
            await self.post(pod, path, body, self.timeout_s)
        except UpstreamError as error:
            if is_refusal(error):
                return lacking(ENGINES[pod.engine].lack_answers, error.status, error.said, [path, need]) == need
            return None
        return False
