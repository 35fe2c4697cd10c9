"""Recent decisions, the outcomes of their requests, and the prefixes that these had in common.

Decisions stay in memory for explanations and policy reviews. When a request has ended, its receipt is written, if
configured.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from os.path import commonprefix
from typing import Any, TypeAlias

import msgspec

from router.decision import RouteDecision
from router.errors import shortened
from router.observe.ended import Ended, RecordedDecision
from router.observe.receipts import Explained, ReceiptWriter, explained, explained_later, receipt
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
    on_decided: Callable[[RecordedDecision], None] | None = None
    _kept: OrderedDict[str, Kept] = field(default_factory=OrderedDict)
    _hosted: OrderedDict[str, Ended] = field(default_factory=OrderedDict)
    """The last `size` requests that providers served."""

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
        if self.on_decided is not None:
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
            if ended.fallback:
                self._fell_back(ended)
            return
        if (kept := self._kept.get(ended.id)) is not None and kept[0] is decision:
            self._kept[ended.id] = decision, ended
        if decision.prompt is not None:
            decision.excerpt = excerpt(decision.prompt)
            decision.prompt = None  # a thousand prompts have no bound

    def _fell_back(self, ended: Ended) -> None:
        """The decision about the target, if there was one, is not that of this request any more."""
        self._kept.pop(ended.id, None)
        if ended.served is not None and self.size:
            self._hosted[ended.id] = ended
            if len(self._hosted) > self.size:
                self._hosted.popitem(last=False)

    def find(self, request_id: str) -> Kept | None:
        return self._kept.get(request_id)

    def explained(self, request_id: str) -> Explained | None:
        """Why a request was served as it was; None if that is not known any more."""
        if (kept := self.find(request_id)) is not None:
            return explained(*kept)
        ended = self._hosted.get(request_id)
        return None if ended is None else explained_later(receipt(ended), None, None)

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


MAX_PREFIXES = 20
MAX_NAME_CHARACTERS = 128


class HotPrefix(msgspec.Struct, omit_defaults=True):
    """Requests of one model with a prefix in common. Times are Unix times of their arrival; `length_tokens` and
    `holders` are what pods held at the last of them: of the longest holder, and the number of pods with any of it."""

    key: str
    model: str
    requests: int = 0
    hits: int = 0
    """Requests that found at least one block in the cache of their pod."""
    saved_tokens: int = 0
    prompt_tokens: int = 0
    length_tokens: int = 0
    holders: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    text: str = ""
    """What the beginnings of their prompts have in common; only where receipts keep prompts."""


class PrefixTally:
    """The prefixes that save the most. Requests have one in common if they have the same affinity key: the hash of a
    block shortly beyond what all traffic shares. Computed from the decisions in memory when it is asked for."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], HotPrefix] = {}
        self._last: dict[tuple[str, str], RecordedDecision] = {}
        """The latest decision of each, by model and key."""

    def add(self, kept: RecordedDecision, ended: Ended | None) -> None:
        """Add a decision if its request was served, and its prompt is known. O(1)."""
        facts = kept.scene
        if ended is None or ended.served is None or ended.result != "ok" or not facts.key:
            return
        cached = ended.served.cached_tokens if ended.cached_tokens is None else ended.cached_tokens
        prefix = self._prefix(facts.adapter or facts.model, facts.key, kept.at_s)
        prefix.requests += 1
        prefix.hits += cached > 0
        prefix.saved_tokens += cached
        prefix.prompt_tokens += ended.prompt_tokens
        prefix.first_s = min(prefix.first_s, kept.at_s)
        prefix.text = _common(prefix.text, kept.excerpt)
        if kept.at_s >= prefix.last_s:
            prefix.last_s = kept.at_s
            self._last[prefix.model, prefix.key] = kept

    def hottest(self) -> list[HotPrefix]:
        """The prefixes that saved the most tokens, with what pods hold of them. O(prefixes + holders)."""
        found = hottest(self._found.values())
        for prefix in found:
            facts = self._last[prefix.model, prefix.key].scene
            held = [sum(blocks) for blocks in facts.match.values() if any(blocks)]
            prefix.length_tokens, prefix.holders = max(held, default=0) * facts.block_size_tokens, len(held)
        return found

    def _prefix(self, model: str, key: int, at_s: float) -> HotPrefix:
        known = self._found.get((model, key))
        if known is None:
            name = shortened(model, MAX_NAME_CHARACTERS)
            known = self._found[model, key] = HotPrefix(f"{key:016x}", name, first_s=at_s)
        return known


def hottest(prefixes: Iterable[HotPrefix]) -> list[HotPrefix]:
    """Those that saved the most, first; those that saved nothing are left out."""
    saving = (one for one in prefixes if one.saved_tokens)
    return sorted(saving, key=attrgetter("saved_tokens"), reverse=True)[:MAX_PREFIXES]


def _common(one: str, other: str) -> str:
    """What two texts begin with; an empty one is unknown."""
    return commonprefix((one, other)) if one and other else one or other
