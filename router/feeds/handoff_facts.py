"""Fetches the facts of a pod that some handoff dialects need, from the pod's bootstrap server.

They are fetched once per epoch: after a restart of the pod they are unknown until they are fetched again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from router.addresses import split_url
from router.engines.engine_catalog import DIALECTS
from router.engines.handoff.dialect import Dialect
from router.errors import UpstreamError
from router.feeds.watch import Check, Turn
from router.fleet.fleet import Fleet
from router.types import Pod, PodId, PodState, Role

RETRY_S = 1.0

_Facts = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class HandoffFacts:
    fleet: Fleet
    get_url: Callable[..., Awaitable[bytes]]
    timeout_s: float
    dialects: Mapping[str, Dialect] = field(default_factory=lambda: DIALECTS)
    retry_s: float = RETRY_S
    _known: dict[tuple[PodId, str], tuple[int, _Facts]] = field(default_factory=dict)

    def of(self, pod: Pod, dialect: str) -> _Facts | None:
        """The pod's facts for `Pair.facts`; None while they are unknown for its epoch."""
        if self.dialects[dialect].facts_url(pod) is None:
            return {}
        epoch, facts = self._known.get((pod.id, dialect), (None, None))
        return facts if epoch == pod.epoch else None

    @property
    def check(self) -> Check:
        return Check(
            name="handoff facts",
            run=self._fetch_missing,
            due=lambda status: status.state is PodState.READY and bool(self._missing(status.pod)),
            every_s=lambda _status: self.retry_s,
            forget=self._forget,
        )

    def _forget(self, pod_id: PodId) -> None:
        self._known = {key: known for key, known in self._known.items() if key[0] != pod_id}

    def _missing(self, pod: Pod) -> list[str]:
        """Dialects whose facts are unknown. A decode pod never sends KV and has no bootstrap server."""
        if pod.role is Role.DECODE:
            return []
        return [name for name in sorted({pod.handoff, pod.pulls} - {""}) if self.of(pod, name) is None]

    async def _fetch_missing(self, pod: Pod, _turn: Turn) -> None:
        for name in self._missing(pod):
            url = self.dialects[name].facts_url(pod)
            assert url is not None, "facts without a URL are known"
            try:
                answer = await self.get_url(url, self.timeout_s, pod=_credentials(pod, url))
            except UpstreamError:
                continue
            facts = self.dialects[name].parse_facts(answer, pod)
            if facts is not None:
                self._known[pod.id, name] = (pod.epoch, facts)


def _credentials(pod: Pod, url: str) -> Pod | None:
    """The pod, if its bootstrap server may get its credentials; None where they would leave TLS."""
    return pod if split_url(url).scheme == split_url(pod.url).scheme else None
