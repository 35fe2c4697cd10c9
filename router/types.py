"""The values that several packages share: frozen, without behaviour beyond short readings of their own fields.

Pods, endpoints, KV events and the cost model have modules of their own, and are nouns of this one, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from router.apis.api import PromptKind as PromptKind
from router.apis.body_types import MAX_NAME_CHARACTERS as MAX_NAME_CHARACTERS
from router.cost_model import Link as Link
from router.cost_model import PodSpeed as PodSpeed
from router.endpoints import Endpoint as Endpoint
from router.kv_events import AttentionKind as AttentionKind
from router.kv_events import BlocksCleared as BlocksCleared
from router.kv_events import BlocksRemoved as BlocksRemoved
from router.kv_events import BlocksStored as BlocksStored
from router.kv_events import KvEvent as KvEvent
from router.kv_events import LayerType as LayerType
from router.kv_events import Tier as Tier
from router.pods import NO_TLS_FILES as NO_TLS_FILES
from router.pods import FleetSnapshot as FleetSnapshot
from router.pods import Links as Links
from router.pods import Matching as Matching
from router.pods import Pod as Pod
from router.pods import PodId as PodId
from router.pods import PodLoad as PodLoad
from router.pods import PodState as PodState
from router.pods import PodStatus as PodStatus
from router.pods import PodTls as PodTls
from router.pods import PrefixTrust as PrefixTrust
from router.pods import Role as Role

BlockHash: TypeAlias = int
"""64-bit chain hash of a block of tokens and all tokens before it, seeded by the generation."""
_Count: TypeAlias = Annotated[int, Meta(ge=0, le=10**9)]
_Amount: TypeAlias = Annotated[float, Meta(ge=-1.0, le=1e9)]
"""Bounds of what other routers report. Differences of sums may be slightly below 0."""


class UsageShown(Enum):
    """Which counts of tokens a client sees in its stream. Pods may send more: `request/usage_filter.py`."""

    NONE = "none"
    AT_END = "at end"
    """In an event of their own behind the last choice: `stream_options.include_usage`."""
    ALL = "all"
    """All that the pod sends."""


class RequestInputs(msgspec.Struct, frozen=True, gc=False):
    """What a policy may read of a request apart from its prompt. Recorded with the decision."""

    endpoint: Endpoint
    model: str
    adapter: str = ""
    session: str = ""
    tenant: str = ""
    stream: bool = False
    max_output_tokens: int | None = None
    name: str = ""
    """The name that its client asked for, as the file of names has it; "" if it asked for the model."""


class InferenceRequest(RequestInputs, frozen=True, kw_only=True, gc=False):
    """One client request, parsed once. `body` is what pods receive: the client's bytes, if necessary with the salt of
    its tenant, and with a request for usage. `salt` is what the blocks of its prompt are hashed with."""

    id: str
    body: bytes
    salt: str = ""
    choices: int = 1
    """Number of answers that it asks for."""
    fallbacks: tuple[str, ...] = ()
    """Models, adapters or providers of its name that may serve it in place of this model."""
    fallback: str = ""
    """Why its target does not serve it; "" unless a fallback does."""
    prompts: int = 1
    """Number of prompts, of which only the first is read."""
    usage: UsageShown = UsageShown.ALL
    prompt: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """The decoded fields that determine the prompt's tokens (messages, tools, prompt, ...)."""


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
    others: tuple[tuple[str, PromptPrefix | None], ...] = ()
    """The prompt by each front end that reads another one; None where that is unknown."""

    def read_by(self, front_end: str) -> PromptPrefix | None:
        """The prompt as pods with this front end read it."""
        if not self.others:
            return self
        return next((prompt for name, prompt in self.others if name == front_end), self)

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
    """A holder now has all of these blocks in this tier (`held`), or none of them. `layer`: in the layers of this type
    of its rule."""

    tier: Tier
    held: bool
    blocks: Sequence[BlockHash]
    layer: int = 0


BlocksByTier: TypeAlias = tuple[int, int, int, int]
"""Leading blocks of one prompt that a holder has, each counted in its nearest tier."""


class PrefixMatch(msgspec.Struct, frozen=True, gc=False):
    """Leading blocks of one prompt by pod and tier."""

    blocks: Mapping[PodId, BlocksByTier] = msgspec.field(default_factory=dict)
    degraded: bool = False

    def held_blocks(self, pod: PodId) -> int:
        """Length of the contiguous prefix that `pod` holds, in blocks, over all tiers."""
        found = self.blocks.get(pod)
        return sum(found) if found else 0


class InFlight(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Unfinished requests of this router and its replicas on one pod. Serialized as an array in this order."""

    requests: _Count = 0
    prefill_requests: _Count = 0
    """Requests without a first token."""
    prefill_tokens: _Count = 0
    """Their uncached prompt tokens, as predicted."""
    prefill_ms: _Amount = 0.0
    """Expected time of the pod to compute these, without the fixed part of a step."""
    context_tokens: _Count = 0
    """Prompt tokens of all requests in flight: the KV that decoding reads."""
    pulls: _Count = 0
    """Transfers of KV to other pods in progress."""
    decode_tokens: _Count = 0
    """The part of `context_tokens` of requests with a first token."""
    head_ms: _Amount = 0.0
    """The part of `prefill_ms` of this router's oldest prompt, the head of the queue."""
    head_since_s: _Amount = 0.0
    """When that prompt became the head."""
    prompts_per_s: _Amount = 0.0
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


PRIOR_OUTPUT_TOKENS = 256
"""Expected length of an answer of a model before any has ended."""


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
    """How busy the pods are that compute the prompts of this model."""
    pictures: tuple[ScenePicture, ...] = ()
    learnt_reuse: float = 0.0
    """Expected number of requests that would have used a block that is evicted now, as learnt for this model."""
    expected_output_tokens: int = PRIOR_OUTPUT_TOKENS
    """Expected length of the answer, as learnt for this model and limited by the client."""
