"""The pods of a fleet, their loads and the links between them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from router.cost_model import Link, PodSpeed
from router.endpoints import Endpoint

PodId: TypeAlias = str


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


class Matching(StrEnum):
    """How prompts are matched on a pod."""

    EVENTS = "events"
    """By its KV events."""
    PREDICTED = "predicted"
    """By the prompts that it was sent: its engine publishes no KV events, or they are off."""
    NO_EVENTS = "no_events"
    """The same, but its engine could publish them."""
    OFF = "off"
    """Not at all: it is routed by load only."""


class PrefixTrust(StrEnum):
    """Whether the pod tokenizes and caches prompts as the router does: the result of the parity test."""

    UNTESTED = "untested"
    TRUSTED = "trusted"
    MISMATCH = "mismatch"


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
    allowed_models: tuple[str, ...] = ()
    """Names, with `*`, of the models and adapters that it may serve; empty: all."""
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
    """Version of its engine; KV is exchanged only between pods of one engine, version and front end."""
    front_end: str = ""
    """`rust` for vLLM's front end in Rust; empty for the one in Python, or where the engine has only one."""
    handoff: str = ""
    """Dialect of its prefill/decode handoffs; empty if it has none."""
    handoff_port: int | None = None
    """Port where its peers read its KV; None for the dialect's default."""
    handoff_hosts: tuple[str, ...] = ()
    """Hosts besides its own that its handoffs may name."""
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
    misreads: frozenset[str] = frozenset()
    """Rules of `apis/chat_rules.py` by which it makes another prompt of a chat than the router."""
    continues: frozenset[Endpoint] = frozenset()
    """Endpoints where it went on exactly, in a test, from the token ids of a broken answer."""
    load_endpoint: str = ""
    """The ZMQ address where it publishes its load; empty where it does not."""
    lacks: frozenset[str] = frozenset()
    """What requests need and it does not serve, as it has shown to the router: paths and parameters."""
    keeps_answers: bool | None = None
    """Whether prefill pods find the answers of this decode pod, by a test or its configuration; None: unknown."""
    is_asleep: bool = False
    """Whether its engine sleeps: it serves nobody, and its cache is empty."""
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

    @property
    def base_model(self) -> str:
        """The first of its models; "" if it is not known yet."""
        return self.models[0] if self.models else ""

    def serves(self, model: str) -> bool:
        return model in self.models or model in self.adapters

    def converts_alike(self, endpoint: Endpoint) -> bool:
        """Whether it converts bodies of this endpoint as the router does, or needs not convert them."""
        return not endpoint.api.is_converted or endpoint in self.converts

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
        at = bisect_left(self.pods, pod, key=lambda status: status.pod.id)
        return self.pods[at] if at < len(self.pods) and self.pods[at].pod.id == pod else None
