"""The values that several packages share: frozen, without behaviour beyond short readings of their own fields.

This module imports only the cost model, the endpoints and the KV events.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any, TypeAlias

import msgspec

from router.cost_model import Link as Link
from router.cost_model import PodSpeed as PodSpeed
from router.endpoints import CONVERTED as CONVERTED
from router.endpoints import MAY_NAME_NO_MODEL as MAY_NAME_NO_MODEL
from router.endpoints import READ_AS_CHATS as READ_AS_CHATS
from router.endpoints import TEXTS as TEXTS
from router.endpoints import Endpoint as Endpoint
from router.kv_events import BlocksCleared as BlocksCleared
from router.kv_events import BlocksRemoved as BlocksRemoved
from router.kv_events import BlocksStored as BlocksStored
from router.kv_events import KvEvent as KvEvent
from router.kv_events import Tier as Tier

PodId: TypeAlias = str
BlockHash: TypeAlias = int
"""64-bit chain hash of a block of tokens and all tokens before it, seeded by the generation."""

MAX_NAME_CHARACTERS = 1024
"""Longest name that a client or a pod may give: session, tenant, salt, model. Names are kept after their request."""


class Role(StrEnum):
    """The part of a request that a pod computes."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class PodState(StrEnum):
    """A pod's state; `fleet/fleet.py` has the transitions."""

    JOINING = "joining"
    READY = "ready"
    DRAINING = "draining"
    EJECTED = "ejected"
    GONE = "gone"


class PrefixTrust(StrEnum):
    """Whether the pod tokenizes and caches prompts as the router does: the result of the parity test."""

    UNTESTED = "untested"
    TRUSTED = "trusted"
    MISMATCH = "mismatch"


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One client request, parsed once. `body` is the client's bytes; where tenants are configured, with a salt. `salt`
    is what the blocks of its prompt are hashed with."""

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
    """The decoded fields that determine the prompt's tokens (messages, tools, prompt, ...)."""
    arrived_at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Everything that must be equal for KV to be reusable. Its digest seeds every block hash, so that blocks of another
    model version, adapter or tenant salt cannot match."""

    model: str
    revision: str = ""
    tokenizer: str = ""
    kv_dtype: str = "auto"
    block_size_tokens: int = 16
    adapter: str = ""
    salt: str = ""


class PromptPicture(msgspec.Struct, frozen=True, gc=False):
    """A picture, sound or video of a prompt."""

    key: int
    """64-bit hash of what identifies it."""
    end_token: int | None
    """Tokens of the prompt up to its end; None where that is unknown."""
    token_count: int
    """Estimated where its place is unknown."""


class PromptPrefix(msgspec.Struct, frozen=True, gc=False):
    """A prompt as tokens (usually an `array('I')`) and hashes of its full blocks: `hashes[i]` covers tokens
    `[0, (i + 1) * block_size_tokens)`. One token stands for a picture whose own are unknown; hashes end in front."""

    generation: Generation
    tokens: Sequence[int]
    hashes: Sequence[BlockHash]
    media_tokens: int = 0  # of pictures whose tokens are unknown, estimated; of texts that share no prefix
    pictures: tuple[PromptPicture, ...] = ()

    @property
    def token_count(self) -> int:
        return len(self.tokens) + self.media_tokens

    @property
    def has_media(self) -> bool:
        """Whether it has tokens that are only counted, such as those of pictures, sounds or videos."""
        return bool(self.media_tokens or self.pictures)

    @property
    def block_size_tokens(self) -> int:
        return self.generation.block_size_tokens


class BlockChange(msgspec.Struct, frozen=True, gc=False):
    """A holder now has all of these blocks in this tier (`held`), or none of them."""

    tier: Tier
    held: bool
    blocks: Sequence[BlockHash]


BlocksByTier: TypeAlias = tuple[int, int, int, int]
"""Leading blocks of one prompt that a holder has, each counted in its nearest tier."""


class PrefixMatch(msgspec.Struct, frozen=True, gc=False):
    """Leading blocks of one prompt by pod and tier."""

    blocks: Mapping[PodId, BlocksByTier] = msgspec.field(default_factory=dict)
    age_s: float = 0.0
    degraded: bool = False

    def held_blocks(self, pod: PodId) -> int:
        """Length of the contiguous prefix that `pod` holds, in blocks, over all tiers."""
        found = self.blocks.get(pod)
        return sum(found) if found else 0


@dataclass(frozen=True, slots=True)
class PodTls:
    """Files for TLS to a pod. Empty: the system's authorities; no client certificate; the key is in `cert_file`."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""


NO_TLS_FILES = PodTls()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One serving process, or one data-parallel rank of it: facts from configuration, discovery and the pod itself."""

    id: PodId
    url: str
    engine: str
    speed: PodSpeed
    role: Role = Role.BOTH
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    max_model_len_tokens: int | None = None
    block_size_tokens: int | None = None
    capacity_tokens: int | None = None
    """KV capacity; None while unknown."""
    kv_bytes_per_token: int = 0
    """KV size of a token of its model; 0 while unknown."""
    pool: str = ""
    """Its Deployment, or another group that is scaled as one."""
    hardware: str = ""
    """A name as in `config/models`; pods of one model, engine and hardware share a calibration."""
    weights: str = ""
    """The path or name that its engine loaded its model from; empty if unknown."""
    version: str = ""
    """Version of its engine; KV is exchanged only between pods of one engine and version."""
    handoff: str = ""
    """Dialect of its prefill/decode handoffs; empty if it has none."""
    handoff_port: int | None = None
    """Port where its peers read its KV; None for the dialect's default."""
    serves_alone: bool = True
    """Whether it accepts requests that are not part of a handoff."""
    pulls: str = ""
    """Dialect of its pulls of KV from a peer; empty if it cannot pull."""
    dp_rank: int | None = None
    host: str = ""
    rack: str = ""
    zone: str = ""
    epoch: int = 0
    trust: PrefixTrust = PrefixTrust.UNTESTED
    reads_pictures: bool = False
    """Whether it identifies and counts pictures as the router does: the result of a parity test."""
    converts: frozenset[Endpoint] = frozenset()
    """Endpoints whose bodies it converts as the router does, of those with a parity test of their own."""
    uid: str = ""
    """Identity of its process, such as that of a Kubernetes pod; empty if unknown."""
    socket: str = ""
    """Unix socket to connect to; empty: its URL."""
    bearer_file: str = ""
    """Path of the file with its API key; empty: it needs none."""
    bearer_env: str = ""
    """Environment variable with its API key."""
    tls: PodTls = NO_TLS_FILES
    ready_since_s: float | None = None
    """When it last became READY; None if unknown."""

    def serves(self, model: str) -> bool:
        return model in self.models or model in self.adapters

    def converts_alike(self, endpoint: Endpoint) -> bool:
        """Whether it converts bodies of this endpoint as the router does, or needs not convert them."""
        return endpoint not in CONVERTED or endpoint in self.converts

    def reads_alike(self, endpoint: Endpoint) -> bool:
        """Whether parity tests have shown that it reads prompts of this endpoint as the router does."""
        return self.trust is PrefixTrust.TRUSTED and self.converts_alike(endpoint)


@dataclass(frozen=True, slots=True)
class PodLoad:
    """Load in the engine's last scrape. `kv_usage` is 0..1; `scraped_at_s` 0: never scraped."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    scraped_at_s: float = 0.0
    our_prompts: int = 0
    """Prompts of this router and its replicas that may be among `waiting`: the maximum number without a first token
    during the scrape."""

    @property
    def foreign_waiting(self) -> int:
        """Waiting requests of another origin, by the last scrape."""
        return max(self.waiting - self.our_prompts, 0)


@dataclass(frozen=True, slots=True)
class PodStatus:
    """A pod with its state and load: one row of the fleet snapshot."""

    pod: Pod
    state: PodState
    load: PodLoad = PodLoad()


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Links for KV: between two pods by distance, and from a pod's tiers into its GPU.

    None for an unknown link: such a pull or handoff is not planned, and such a read costs nothing.
    """

    same_host: Link | None = None
    same_rack: Link | None = None
    same_zone: Link | None = None
    elsewhere: Link | None = None
    cpu: Link | None = None
    disk: Link | None = None
    remote: Link | None = None

    def between(self, one: Pod, other: Pod) -> Link | None:
        """The link of the nearest place that both pods share."""
        if one.host and one.host == other.host and self.same_host:
            return self.same_host
        if one.rack and one.rack == other.rack and self.same_rack:
            return self.same_rack
        return self.same_zone if one.zone and one.zone == other.zone and self.same_zone else self.elsewhere


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """All pods at one time, ordered by id. Rebuilt when a pod or its load changes, not per request."""

    version: int = 0
    pods: tuple[PodStatus, ...] = ()
    links: Links = Links()

    __hash__ = object.__hash__
    """By identity: results cached for a snapshot hold for that object alone."""

    def find(self, pod: PodId) -> PodStatus | None:
        """The row of a pod; None if it is missing. O(log pods)."""
        at = bisect_left(self.pods, pod, key=_id_of)
        return self.pods[at] if at < len(self.pods) and self.pods[at].pod.id == pod else None


def _id_of(status: PodStatus) -> PodId:
    return status.pod.id


class InFlight(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Unfinished requests of this router and its replicas on one pod. Serialized as an array in this order."""

    requests: int = 0
    prefill_requests: int = 0
    """Requests without a first token."""
    prefill_tokens: int = 0
    """Their uncached prompt tokens, as predicted."""
    prefill_ms: float = 0.0
    """Expected time of the pod to compute these, without the fixed part of a step."""
    context_tokens: int = 0
    """Prompt tokens of all requests in flight: the KV that decoding reads."""
    pulls: int = 0
    """Transfers of KV to other pods in progress."""
    decode_tokens: int = 0
    """The part of `context_tokens` of requests with a first token."""
    head_ms: float = 0.0
    """The part of `prefill_ms` of this router's oldest prompt, the head of the queue."""
    head_since_s: float = 0.0
    """When that prompt became the head."""
    prompts_per_s: float = 0.0
    """Rate of prompts, decayed; as of the last change of these sums."""

    @property
    def decode_requests(self) -> int:
        """Requests that have their first token."""
        return self.requests - self.prefill_requests

    def without_head(self) -> InFlight:
        """The sums alone: `head_ms` and `head_since_s` are by the clock of one router."""
        return msgspec.structs.replace(self, head_ms=0.0, head_since_s=0.0)

    def queue_ms(self, now_s: float) -> float:
        """An estimate of the remaining prefill: the pod has computed the head since it became the head."""
        done_ms = min((now_s - self.head_since_s) * 1000, self.head_ms) if self.head_ms else 0.0
        return self.prefill_ms - done_ms


class StepBegan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A pod's current step; with prompts in it, the first of the steps that compute the head of the queue. `at_s` is
    minus infinity if its begin was not observed."""

    at_s: float = -inf
    prefill_ms: float = 0.0
    """Prefill of our prompts that were on the pod when it began."""


class Congestion(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How busy the pods are that compute the prompts of a model: means of these pods."""

    prompts_per_s: float = 0.0
    """Prompts sent to a pod, decayed."""
    busy_share: float = 0.0
    """Share of the time that a pod has a prompt without a first token, decayed."""
    backlog_ms: float = 0.0
    """Prefill that a pod still has to compute now."""
    busy_shares: Mapping[PodId, float] = msgspec.field(default_factory=dict)
    """By pod, the mean of `busy_share` of the pods that are as fast. Empty if all pods are equally fast."""


# --- the decision ---------------------------------------------------------------------------------------
# Values made for every pod of every decision are msgspec structs: frozen as well, and six times faster to create.


class ScenePicture(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A picture of the prompt, as `PromptPicture`, and the pods that have seen it."""

    end_token: int | None
    token_count: int
    pods: tuple[PodId, ...] = ()


class Scene(msgspec.Struct, frozen=True, gc=False):
    """Everything that a policy reads. A recorded scene gives the identical decision again."""

    request: InferenceRequest
    prompt: PromptPrefix | None
    match: PrefixMatch
    fleet: FleetSnapshot
    inflight: Mapping[PodId, InFlight]
    now_s: float
    steps: Mapping[PodId, StepBegan] = msgspec.field(default_factory=dict)
    turn: int = 0
    """Number of this decision among those for its model, for round robin."""
    shared_blocks: int = 0
    """Leading blocks of this prompt that most of the traffic shares."""
    congestion: Congestion = Congestion()
    """Of the pods that compute the prompts of this model."""
    pictures: tuple[ScenePicture, ...] = ()
    learnt_reuse: float = 0.0
    """Expected number of requests that would have used a block that is evicted now, as learnt for this model."""
