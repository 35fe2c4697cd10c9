"""What are the nouns of this program?

Frozen values that every other module speaks in. Of ours it imports the cost model alone, holds no behaviour beyond
one-line readings of its own fields, and never touches a clock, a socket or a random number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from math import inf
from typing import Any, TypeAlias

import msgspec

from router.cost_model import Link as Link
from router.cost_model import PodSpeed as PodSpeed

PodId: TypeAlias = str
BlockHash: TypeAlias = int
"""One block of tokens *and everything before it*: a 64-bit chain hash, seeded by the generation."""


class Tier(IntEnum):
    """Where a block lies, nearest first. The value indexes the tuples that count blocks by tier."""

    GPU = 0
    CPU = 1
    DISK = 2
    REMOTE = 3


class Endpoint(StrEnum):
    """The endpoints that the router tells apart."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"
    OTHER = "other"
    """Everything that is passed through unread; shares no prefix."""


class Role(StrEnum):
    """What a pod does with a request."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class PodState(StrEnum):
    """Where a pod stands in its life; `fleet/lifecycle.py` owns the transitions."""

    JOINING = "joining"
    READY = "ready"
    DRAINING = "draining"
    EJECTED = "ejected"
    GONE = "gone"


class PrefixTrust(StrEnum):
    """Does this pod's cache mean what the router thinks it means? The parity self-test answers."""

    UNTESTED = "untested"
    TRUSTED = "trusted"
    MISMATCH = "mismatch"


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One downstream request, parsed once. `body` is what the client sent, to the byte."""

    id: str
    endpoint: Endpoint
    model: str
    body: bytes
    stream: bool = False
    adapter: str = ""
    tenant: str = ""
    session: str = ""
    salt: str = ""
    max_output_tokens: int | None = None
    prompt: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """The fields that decide the prompt's tokens (messages, tools, prompt, ...), decoded."""
    arrived_at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What must be equal for KV to be reusable. Its digest seeds every block hash, so that entries of
    another model version, adapter or tenant salt cannot match even by accident."""

    model: str
    revision: str = ""
    tokenizer: str = ""
    kv_dtype: str = "auto"
    block_size_tokens: int = 16
    adapter: str = ""
    salt: str = ""


class PromptPrefix(msgspec.Struct, frozen=True, gc=False):
    """A prompt as tokens and as the hashes of its *full* blocks: `hashes[i]` covers tokens
    `[0, (i + 1) * block_size_tokens)`. `tokens` is anything indexable of ints (an `array('I')` usually)."""

    generation: Generation
    tokens: Sequence[int]
    hashes: Sequence[BlockHash]

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    @property
    def block_size_tokens(self) -> int:
        return self.generation.block_size_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """A holder now has these blocks. `tokens` are those of all listed blocks, concatenated; both `tokens`
    and `block_size_tokens` may be empty/0, which is a tier update for hashes the holder announced before."""

    block_hashes: tuple[int, ...]
    parent_hash: int | None
    tokens: Sequence[int]
    block_size_tokens: int
    tier: Tier = Tier.GPU
    group: int = 0
    adapter: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRemoved:
    """One physical copy of each of these blocks is gone."""

    block_hashes: tuple[int, ...]
    tier: Tier = Tier.GPU
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """The holder's whole cache is gone."""


KvEvent: TypeAlias = BlocksStored | BlocksRemoved | BlocksCleared


@dataclass(frozen=True, slots=True)
class BlockChange:
    """From now on a holder has all of these blocks in this tier, or none of them."""

    tier: Tier
    held: bool
    blocks: Sequence[BlockHash]


BlocksByTier: TypeAlias = tuple[int, int, int, int]
"""How many leading blocks of one prompt a holder has, counted in the nearest tier each lies in."""


class PrefixMatch(msgspec.Struct, frozen=True, gc=False):
    """Who holds how much of one prompt: leading blocks only, per pod and tier."""

    blocks: Mapping[PodId, BlocksByTier] = msgspec.field(default_factory=dict)
    age_s: float = 0.0
    degraded: bool = False

    def held_blocks(self, pod: PodId) -> int:
        """Length of the contiguous prefix that `pod` holds, in blocks, over all tiers."""
        found = self.blocks.get(pod)
        return sum(found) if found else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One serving process (or one data-parallel rank of it) as the router knows it from configuration,
    discovery and its own answers. Counters and health live elsewhere."""

    id: PodId
    url: str
    engine: str
    speed: PodSpeed
    role: Role = Role.BOTH
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    max_model_len_tokens: int | None = None
    block_size_tokens: int | None = None
    capacity_blocks: int | None = None
    """KV capacity in *router* blocks; None while unknown."""
    kv_bytes_per_token: int = 0
    """Of the model it serves; 0 while unknown."""
    hardware: str = ""
    """As `config/models` names it: pods of one model, engine and hardware are one class for the cost model."""
    version: str = ""
    """Of its engine; KV passes only between pods of one engine and version."""
    handoff: str = ""
    """The dialect in which it takes part in prefill/decode handoffs; empty where it does not."""
    handoff_port: int | None = None
    """Where its peers reach its KV; None for the dialect's usual port."""
    serves_alone: bool = True
    """Takes a request that is not part of a handoff."""
    pulls: str = ""
    """The dialect in which it can be told to fetch KV from a peer; empty where it cannot."""
    dp_rank: int | None = None
    host: str = ""
    rack: str = ""
    zone: str = ""
    epoch: int = 0
    trust: PrefixTrust = PrefixTrust.UNTESTED
    socket: str = ""
    """The Unix socket over which it is reached; empty: over the network, at its URL."""
    ready_since_s: float | None = None
    """When it last became READY; None where nobody saw it."""

    def serves(self, model: str) -> bool:
        return model in self.models or model in self.adapters


@dataclass(frozen=True, slots=True)
class PodLoad:
    """What the engine last said of itself. `kv_usage` is 0..1; `scraped_at_s` 0 means never scraped."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    scraped_at_s: float = 0.0
    our_prompts: int = 0
    """So many that had no first token may be among `waiting`: the most there were at once while the engine was asked,
    of this router and its replicas."""

    @property
    def foreign_waiting(self) -> int:
        """Requests in its queue that came past us. Whatever we do, they are there until it is asked again."""
        return max(self.waiting - self.our_prompts, 0)


@dataclass(frozen=True, slots=True)
class PodStatus:
    """One row of the snapshot: the pod, its state and its last load."""

    pod: Pod
    state: PodState
    load: PodLoad = PodLoad()


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The ways that KV can take: between two pods by how near they are, and out of a pod's own tiers into its GPU.

    None where nothing is known to lead that way: such a pull or handoff is not planned, and such a read costs nothing.
    """

    same_host: Link | None = None
    same_rack: Link | None = None
    same_zone: Link | None = None
    elsewhere: Link | None = None
    cpu: Link | None = None
    disk: Link | None = None
    remote: Link | None = None

    def between(self, one: Pod, other: Pod) -> Link | None:
        """The nearest class that both are known to share."""
        if one.host and one.host == other.host and self.same_host:
            return self.same_host
        if one.rack and one.rack == other.rack and self.same_rack:
            return self.same_rack
        return self.same_zone if one.zone and one.zone == other.zone and self.same_zone else self.elsewhere


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """All pods at one moment, ordered by id. Rebuilt when a pod or its load changes, never per request."""

    version: int = 0
    pods: tuple[PodStatus, ...] = ()
    links: Links = Links()

    __hash__ = object.__hash__
    """By identity: results cached for a snapshot hold for that object alone."""

    def find(self, pod: PodId) -> PodStatus | None:
        """Its row. O(log pods)."""
        at = bisect_left(self.pods, pod, key=_id_of)
        return self.pods[at] if at < len(self.pods) and self.pods[at].pod.id == pod else None


def _id_of(status: PodStatus) -> PodId:
    return status.pod.id


class InFlight(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Unfinished requests of this router and its replicas on one pod. Serialized as an array in this order."""

    requests: int = 0
    prefill_requests: int = 0
    """Requests whose first token has not come yet."""
    prefill_tokens: int = 0
    """Their uncached prompt tokens: what still has to be computed, by our prediction."""
    prefill_ms: float = 0.0
    """The same in the pod's own expected milliseconds, without the fixed part of a step."""
    context_tokens: int = 0
    """Prompt tokens of every request in flight: the KV that its decoding reads."""
    pulls: int = 0
    """Transfers of KV that it is sending to other pods."""
    decode_tokens: int = 0
    """Of `context_tokens`, those of requests that decode already."""
    head_ms: float = 0.0
    """Of `prefill_ms`, the part of this router's prompt that is first in line."""
    head_since_s: float = 0.0
    """Since when that prompt is first."""

    @property
    def decode_requests(self) -> int:
        """Requests that have their first token."""
        return self.requests - self.prefill_requests

    def without_head(self) -> InFlight:
        """The sums alone: `head_ms` and `head_since_s` are by the clock of one router."""
        return msgspec.structs.replace(self, head_ms=0.0, head_since_s=0.0)

    def queue_ms(self, now_s: float) -> float:
        """Prefill that is still to be done, at a glance: what is first in line has been worked on since it was."""
        if not self.head_ms:
            return self.prefill_ms
        return self.prefill_ms - min((now_s - self.head_since_s) * 1000, self.head_ms)


class StepBegan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A pod's step under way. With prompts in it, the first of those steps that compute the one that is first in line;
    where it could not be seen, `at_s` is minus infinity."""

    at_s: float = -inf
    prefill_ms: float = 0.0
    """Of our prompts that were there when it began."""


# --- the decision ---------------------------------------------------------------------------------------
# What is made for every pod of every decision is a msgspec struct: frozen like the rest, and six times as cheap.


class Scene(msgspec.Struct, frozen=True, gc=False):
    """Everything a policy may look at. A recorded scene replays to the identical decision."""

    request: InferenceRequest
    prompt: PromptPrefix | None
    match: PrefixMatch
    fleet: FleetSnapshot
    inflight: Mapping[PodId, InFlight]
    now_s: float
    steps: Mapping[PodId, StepBegan] = msgspec.field(default_factory=dict)
    turn: int = 0
    """Number of this decision among those for its model: what round robin counts."""
    shared_blocks: int = 0
    """Leading blocks of this prompt that so much of the traffic shares that they tell nothing apart."""
