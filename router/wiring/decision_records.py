"""Where do decisions and receipts go?

Builds the journal with what it writes to: a file, a stream of the cluster's Redis, shadow policies. This file decides
nothing about requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from router.config.schema import Receipts
from router.errors import ConfigError
from router.observe.journal import Journal
from router.observe.metrics import Metrics
from router.observe.receipt_lines import ReceiptLog, ReceiptWriter, Sink
from router.observe.receipts import RecordedDecision
from router.observe.shadow import Shadows
from router.policy.policy_set import PolicySet
from router.policy.price import Choice, choice_of
from router.policy.review import Review, chosen, each_against
from router.policy.spec import Policy
from router.types import Scene
from router.wiring.cluster_member import ClusterMember

REVIEWED = 500
"""Decisions that new policies are tried on when they are swapped in, in a thread: two seconds with 100 pods."""
SLICE_S, PAUSE_S = 0.0005, 0.002
"""It computes for so long and then gives way for so long: nobody waits for it, and requests need Python meanwhile."""


class DecisionRecords:
    """The journal and what runs and is closed with it. Raises `ConfigError` where the file cannot be written."""

    def __init__(self, config: Receipts, shadows: Shadows, metrics: Metrics, cluster: ClusterMember | None) -> None:
        self.feeds: dict[str, Callable[[], Awaitable[None]]] = {}
        self._log = _open_log(config.file)
        sinks: list[Sink] = [self._log.write] if self._log else []
        if config.redis_maxlen and cluster:
            stream = cluster.receipts(config.redis_maxlen, metrics.receipts_lost.labels().inc)
            sinks.append(stream.write)
            self.feeds["receipts"] = stream.run
        writer = ReceiptWriter(sinks, scenes=config.replay_data) if sinks else None
        self.journal = Journal(size=config.keep, prompts=config.prompts, writer=writer, shadows=shadows)

    async def review(self, old: PolicySet, new: PolicySet) -> str | None:
        """What a new set would have decided otherwise than the old one, of the last decisions."""
        last = self.journal.latest(REVIEWED)
        return str(await asyncio.to_thread(_review, last, old, new)) if last else None

    def close(self) -> None:
        """Everything that was written is on the disk."""
        if self._log:
            self._log.close()


def _review(last: Sequence[RecordedDecision], old: PolicySet, new: PolicySet) -> Review:
    """Each under the policy of the new set that would decide it."""
    return each_against(_decided(last, old, new), new.version)


def _decided(
    last: Sequence[RecordedDecision], old: PolicySet, new: PolicySet
) -> Iterator[tuple[Scene, Choice | None, Policy]]:
    """One after another, with pauses. What an older policy than that of the old set decided is decided by that."""
    due_s = time.monotonic() + SLICE_S
    for kept in last:
        if time.monotonic() > due_s:
            time.sleep(PAUSE_S)
            due_s = time.monotonic() + SLICE_S
        scene, by = kept.scene.scene(), old.for_recorded(kept.scene, kept.policy.name)
        same = by.version == kept.policy.version
        was = choice_of(kept.candidates[0].plan) if same else chosen(scene, by)
        yield scene, was, new.for_recorded(kept.scene, kept.policy.name)


def _open_log(path: str | None) -> ReceiptLog | None:
    try:
        return ReceiptLog(path) if path else None
    except OSError as error:
        raise ConfigError(f"receipts: {error}") from error
