"""What the name that a client asks for becomes: a model, or one of several by their weights.

A target is a model or an adapter of a pod, never another name, so names have no chains or cycles. A conversation stays
with its model: the choice is a function of its key and the weights alone, equal in all routers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import log
from typing import Any, NamedTuple, TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

from router.errors import DECODE_ERRORS

Weights: TypeAlias = Mapping[str, float]
"""Targets, with their shares of the conversations relative to each other."""

MAX_SEARCHED = 32
"""Messages in front of the first one of the user, and parts of each."""
MAX_PART_FIELDS = 1024
"""A part with more counts as it is."""


class _Message(msgspec.Struct):
    role: msgspec.Raw = msgspec.Raw(b'"user"')
    content: msgspec.Raw = msgspec.Raw(b"")


class _Text(msgspec.Struct):
    text: msgspec.Raw


_MESSAGE, _TEXT = msgspec.json.Decoder(_Message), msgspec.json.Decoder(_Text)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FIRST = [(f"part_{number}", msgspec.Raw, msgspec.Raw()) for number in range(MAX_SEARCHED)]
_PARTS = msgspec.json.Decoder(msgspec.defstruct("_Parts", _FIRST, array_like=True))
"""It passes over all parts after the first ones."""
_USER = b'"user"'
REVIEWED = 500
"""Latest requests that a change is reviewed with: two milliseconds."""
MAX_SHOWN = 5
_BITS = 52


@dataclass(frozen=True, slots=True)
class NameRule:
    """Other weights for requests of one of these tenants, if any are named, that have all of these headers."""

    weights: Weights
    tenants: frozenset[str] = frozenset()
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def applies(self, tenant: str, headers: Mapping[bytes, bytes]) -> bool:
        is_theirs = not self.tenants or tenant in self.tenants
        return is_theirs and all(headers.get(name) == value for name, value in self.headers)


@dataclass(frozen=True, slots=True)
class ModelName:
    """One name of the file; it may end with `*`. The first rule that applies decides, else `weights`."""

    name: str
    weights: Weights
    rules: tuple[NameRule, ...] = ()
    fallbacks: tuple[str, ...] = ()
    """Models, adapters or providers that serve where the target cannot, in this order."""

    @property
    def all_targets(self) -> frozenset[str]:
        return frozenset(self.weights).union(self.fallbacks, *(rule.weights for rule in self.rules))

    def weights_for(self, tenant: str, headers: Mapping[bytes, bytes]) -> Weights:
        return next((rule.weights for rule in self.rules if rule.applies(tenant, headers)), self.weights)


@dataclass(frozen=True, slots=True)
class Names:
    """All names. Of several that end with `*`, the longest that matches counts; an exact name counts before them."""

    exact: Mapping[str, ModelName] = field(default_factory=dict)
    beginnings: tuple[tuple[str, ModelName], ...] = ()
    """Without their `*`, the longest first."""
    targets: frozenset[str] = frozenset()

    def find(self, asked: str, *, is_model: bool) -> ModelName | None:
        """The entry of what a client asks for. One with `*` is not for models."""
        found = self.exact.get(asked)
        if found is None and self.beginnings and not is_model and asked not in self.targets:
            found = next((one for beginning, one in self.beginnings if asked.startswith(beginning)), None)
        return found


def chosen_target(weights: Weights, key: int) -> str:
    """The target of the conversation with this 64-bit key; "" if no weight is above 0.

    Weighted rendezvous hashing (Schindelhauer and Schomaker 2005): a target that gains weight takes conversations from
    the others in proportion, and no other conversation moves."""
    if len(weights) == 1:
        return next(iter(weights))
    scores = ((_score(target, key, weight), target) for target, weight in weights.items() if weight)
    return max(scores, default=(0.0, ""))[1]


def _score(target: str, key: int, weight: float) -> float:
    share = ((xxh3_64_intdigest(target.encode(), seed=key) >> (64 - _BITS)) + 0.5) / (1 << _BITS)
    return -weight / log(share)


# --- which conversation a request belongs to ---


def conversation_key(session: str, tenant: str, parsed: Any, body: bytes) -> int:
    """64 bits: of the session, else of the tenant and the messages up to the first of the user, without what clients
    change of them from turn to turn; else of the body. `session` includes the tenant."""
    if session:
        return xxh3_64_intdigest(session.encode("utf-8", "surrogatepass"))
    begin = b"".join(_begin(messages)) if (messages := _messages(parsed)) else body
    return xxh3_64_intdigest(begin, seed=xxh3_64_intdigest(tenant.encode()))


def _messages(parsed: Any) -> Sequence[msgspec.Raw]:
    """Those of a chat, or the items of a response; a text is one."""
    found = getattr(parsed, "messages", None) or getattr(parsed, "input", None)
    if isinstance(found, msgspec.Raw):
        return (found,)
    return found if isinstance(found, list) else ()


def _begin(messages: Iterable[msgspec.Raw]) -> Iterator[bytes]:
    for message in islice(messages, MAX_SEARCHED):
        try:
            found = _MESSAGE.decode(message)
            yield from _parts(bytes(found.content))
        except DECODE_ERRORS:
            yield bytes(message)
            return
        if bytes(found.role) == _USER:
            return


def _parts(content: bytes) -> Iterator[bytes]:
    """The first parts of a message without marks of a cache, which clients move; a text is a part."""
    if not content.startswith(b"["):
        yield content
        return
    for part in filter(None, map(bytes, msgspec.structs.astuple(_PARTS.decode(content)))):
        try:
            yield bytes(_TEXT.decode(part).text)
        except msgspec.ValidationError:
            yield _unmarked(part) if part.count(b":") <= MAX_PART_FIELDS else part


def _unmarked(part: bytes) -> bytes:
    kept = {name: value for name, value in _FIELDS.decode(part).items() if name != "cache_control"}
    return msgspec.json.encode(kept, order="deterministic")


# --- the review of a change ---


class NameChoice(NamedTuple):
    """What became of one request: `name` is its entry's, "" for a model of its own name; `key` its conversation's."""

    asked: str
    name: str
    model: str
    tenant: str
    key: int


def review(names: Names, recent: Iterable[NameChoice]) -> str:
    """How many of these requests would become another model. Requests whose old or new rules read headers, which are
    not kept, are left out."""
    count, moves = 0, Counter[str]()
    for choice in recent:
        entry = names.find(choice.asked, is_model=not choice.name)
        if entry is not None and any(rule.headers for rule in entry.rules):
            continue
        count += 1
        now = chosen_target(entry.weights_for(choice.tenant, {}), choice.key) if entry is not None else choice.asked
        if now != choice.model:
            moves[f"{choice.model} -> {now}"] += 1
    shown = "".join(f"; {move}: {requests:,}" for move, requests in moves.most_common(MAX_SHOWN))
    return f"{moves.total():,} of {count:,} requests would become another model{shown}"


@dataclass(slots=True, eq=False)
class NamesInUse:
    """The names, which are replaced as a whole, and what became of the latest requests."""

    current: Names = Names()
    recent: deque[NameChoice] = field(default_factory=lambda: deque(maxlen=REVIEWED))
