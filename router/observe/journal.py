"""What happens to a decision once it is made?

It is kept for a while, to be explained and to try other policies on; when its request has ended it is written down,
where that is configured, and shown to a shadow policy. Costs a few microseconds a request. This file never changes a
decision and never waits.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from itertools import islice

from router.decision import RouteDecision
from router.observe.receipt_lines import ReceiptWriter
from router.observe.receipts import Outcome, RecordedDecision, record_decision
from router.observe.shadow import Shadows
from router.policy.recording import record as record_scene
from router.policy.spec import Policy
from router.types import PromptPrefix, Scene

KEEP = 1000


class Journal:
    """The last `size` decisions by request id, newest last; of two with one id, the later."""

    def __init__(
        self,
        *,
        size: int = KEEP,
        prompts: bool = False,
        writer: ReceiptWriter | None = None,
        shadows: Shadows | None = None,
    ) -> None:
        self._size = size
        self._prompts = prompts
        self._writer = writer
        self.shadows = shadows
        self._kept: OrderedDict[str, RecordedDecision] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def record(self, scene: Scene, decision: RouteDecision, policy: Policy, workload: str = "") -> RecordedDecision:
        """Keep it; the oldest goes. `workload` is the class of the request."""
        prompt = dict(scene.request.prompt) if self._prompts else None
        kept = record_decision(record_scene(scene, workload), decision, policy, time.time(), prompt)
        known = len(self._kept)
        self._kept[scene.request.id] = kept
        if len(self._kept) == known:
            self._kept.move_to_end(scene.request.id)
        elif known >= self._size:
            self._kept.popitem(last=False)
        return kept

    def settle(
        self,
        outcome: Outcome,
        kept: RecordedDecision | None,
        decision: RouteDecision | None,
        prompt: PromptPrefix | None,
    ) -> None:
        """Its request has ended; without `kept`, before anything was decided."""
        if kept is not None:
            kept.outcome = outcome
        if self._writer is not None:
            self._writer.write(outcome, kept, prompt)
        if self.shadows is not None and kept is not None and decision is not None:
            self.shadows.offer(kept.scene, decision, kept.policy, outcome.ttft_ms)

    def find(self, request_id: str) -> RecordedDecision | None:
        """The decision about that request, if it is still kept."""
        return self._kept.get(request_id)

    def latest(self, count: int) -> list[RecordedDecision]:
        """The newest decisions, oldest first: what other policies can be tried on."""
        return list(islice(reversed(self._kept.values()), count))[::-1]
