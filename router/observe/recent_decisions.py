"""Recent decisions, and the outcomes of their requests.

Decisions stay in memory for explanations and policy reviews. When a request has ended, its receipt is written, if
configured.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

import msgspec

from router.decision import RouteDecision
from router.observe.ended import Ended, RecordedDecision
from router.observe.receipt_lines import ReceiptWriter
from router.policy.recording import record as record_scene
from router.policy.spec import Policy
from router.types import PromptPrefix, Scene

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


Kept: TypeAlias = tuple[RecordedDecision, Ended | None]
"""A decision, and how its request ended; None while it is served."""


@dataclass(slots=True, eq=False)
class RecentDecisions:
    """The last `size` decisions by request id, newest last. A request id that occurs again replaces the earlier one."""

    size: int = MAX_DECISIONS
    prompts: bool = False
    writer: ReceiptWriter | None = None
    on_decided: Callable[[RecordedDecision], None] = lambda _: None
    _kept: OrderedDict[str, Kept] = field(default_factory=OrderedDict)

    def record(
        self, scene: Scene, decision: RouteDecision, policy: Policy, at_s: float, workload: str = ""
    ) -> RecordedDecision:
        """Record a decision at the Unix time `at_s`; the oldest is dropped. `workload` is the class of the request."""
        prompt = dict(scene.request.prompt) if self.prompts else None
        recorded = RecordedDecision.of(record_scene(scene, workload), decision, policy, at_s, prompt)
        self._kept[scene.request.id] = recorded, None
        self._kept.move_to_end(scene.request.id)
        if len(self._kept) > self.size:
            self._kept.popitem(last=False)
        self.on_decided(recorded)
        return recorded

    def settle(self, ended: Ended, prompt: PromptPrefix | None) -> None:
        """Record how a request ended, and drop its prompt."""
        if not ended.is_read:
            return
        decision = ended.decision
        if self.writer is not None:
            self.writer.write(ended, prompt)
        if decision is None:
            return
        if (kept := self._kept.get(ended.id)) is not None and kept[0] is decision:
            self._kept[ended.id] = decision, ended
        if decision.prompt is not None:
            decision.excerpt = excerpt(decision.prompt)
            decision.prompt = None  # a thousand prompts have no bound

    def find(self, request_id: str) -> Kept | None:
        return self._kept.get(request_id)

    def in_flight_tokens(self) -> dict[str, int]:
        """Prompt tokens by tenant of requests that have not ended, of the latest `MAX_DECISIONS`."""
        found: dict[str, int] = {}
        for decision, ended in islice(reversed(self._kept.values()), MAX_DECISIONS):
            if ended is None:
                scene = decision.scene
                found[scene.tenant] = found.get(scene.tenant, 0) + (scene.prompt_tokens or 0)
        return found

    def latest(self, count: int) -> list[Kept]:
        """Up to `count` of the newest decisions, oldest first."""
        return list(islice(reversed(self._kept.values()), count))[::-1]
