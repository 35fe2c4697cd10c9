"""Recent decisions, and the outcomes of their requests.

Decisions stay in memory for explanations and policy reviews. When a request has ended, its receipt is written, if
configured.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from router.decision import RouteDecision
from router.observe.ended import EndedRequest
from router.observe.receipt_lines import ReceiptWriter
from router.observe.receipts import RecordedDecision, record_decision
from router.policy.recording import record as record_scene
from router.policy.spec import Policy
from router.types import Scene

MAX_DECISIONS = 1000
MAX_EXCERPT_CHARACTERS = 100
MAX_READ_MESSAGES, MAX_READ_BYTES = 4, 64 * 1024


class _Message(msgspec.Struct):
    role: str = ""
    content: Any = None


def excerpt(prompt: Mapping[str, Any]) -> str:
    """The beginning of a prompt: of the system prompt and of the first message of a user, or of the text of a
    completion. Empty if there is none among the first messages, or if it is too long to decode here."""
    messages = prompt.get("messages")
    if not isinstance(messages, list):
        return _beginning(_decoded(prompt.get("prompt"), Any))
    decoded = [_decoded(one, _Message) for one in messages[:MAX_READ_MESSAGES]]
    known = [one for one in decoded if isinstance(one, _Message)]
    first = [next((one for one in known if (one.role == "user") is is_user), None) for is_user in (False, True)]
    return " / ".join(filter(None, (_beginning(one.content) for one in first if one)))


def _beginning(content: Any) -> str:
    """The first characters of a text, or of the first text of a list of parts."""
    if isinstance(content, list):
        content = next((part["text"] for part in content if isinstance(part, dict) and "text" in part), "")
    return content[:MAX_EXCERPT_CHARACTERS] if isinstance(content, str) else ""


def _decoded(value: Any, kind: Any) -> Any:
    """Undecoded JSON as `kind`; None if it is long or another kind. Other values as they are."""
    if not isinstance(value, msgspec.Raw):
        return value
    try:
        return msgspec.json.decode(value, type=kind) if memoryview(value).nbytes <= MAX_READ_BYTES else None
    except msgspec.DecodeError:
        return None


@dataclass(slots=True, eq=False)
class RecentDecisions:
    """The last `size` decisions by request id, newest last. A request id that occurs again replaces the earlier one."""

    size: int = MAX_DECISIONS
    prompts: bool = False
    writer: ReceiptWriter | None = None
    on_decided: Callable[[RecordedDecision], None] = lambda _: None
    _decisions: OrderedDict[str, RecordedDecision] = field(default_factory=OrderedDict)

    def record(self, scene: Scene, decision: RouteDecision, policy: Policy, workload: str = "") -> RecordedDecision:
        """Record a decision; the oldest is dropped. `workload` is the class of the request."""
        prompt = dict(scene.request.prompt) if self.prompts else None
        recorded = record_decision(record_scene(scene, workload), decision, policy, time.time(), prompt)
        self._decisions[scene.request.id] = recorded
        self._decisions.move_to_end(scene.request.id)
        if len(self._decisions) > self.size:
            self._decisions.popitem(last=False)
        self.on_decided(recorded)
        return recorded

    def settle(self, ended: EndedRequest) -> None:
        """Record how a request ended, and drop its prompt."""
        if not ended.is_read:
            return
        outcome, recorded = ended.outcome, ended.recorded
        if recorded is not None:
            recorded.outcome = outcome
        if self.writer is not None:
            self.writer.write(outcome, recorded, ended.prompt)
        if recorded is not None and recorded.prompt is not None:
            recorded.excerpt = excerpt(recorded.prompt)
            recorded.prompt = None  # a thousand prompts have no bound

    def find(self, request_id: str) -> RecordedDecision | None:
        return self._decisions.get(request_id)

    def in_flight_tokens(self) -> dict[str, int]:
        """Prompt tokens by tenant of requests that have not ended, of the latest `MAX_DECISIONS`."""
        found: dict[str, int] = {}
        for kept in islice(reversed(self._decisions.values()), MAX_DECISIONS):
            if kept.outcome is None:
                found[kept.scene.tenant] = found.get(kept.scene.tenant, 0) + (kept.scene.prompt_tokens or 0)
        return found

    def latest(self, count: int) -> list[RecordedDecision]:
        """Up to `count` of the newest decisions, oldest first."""
        return list(islice(reversed(self._decisions.values()), count))[::-1]
