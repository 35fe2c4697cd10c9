"""What can be configured, with which defaults?

The whole of `config/router.yaml` as frozen models. What stands here needs a restart; what may change at run time
stands in `policies/`. This file never reads a file and never builds an object of the program.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from router.config.limits import Limits
from router.config.links import LinksConfig
from router.config.load import Strict
from router.config.receipts import Receipts, ReceiptsOrFile
from router.types import PodSpeed, Role


def _http_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must look like http://host:port")
    if parts.query or parts.fragment or parts.username:
        raise ValueError("must be scheme, host, port and perhaps a path prefix, nothing else")
    return value.rstrip("/")


def _socket_path(value: str) -> str:
    if value and (not value.startswith("/") or len(value.encode()) > LONGEST_SOCKET_BYTES):
        raise ValueError(f"must be an absolute path of at most {LONGEST_SOCKET_BYTES} bytes")
    return value


HttpUrl = Annotated[str, AfterValidator(_http_url)]
SocketPath = Annotated[str, AfterValidator(_socket_path)]
LONGEST_SOCKET_BYTES = 107
"""Of a Unix socket's path, on Linux."""
EngineName = Literal["vllm", "sglang", "trtllm", "llamacpp"]
HandoffName = Literal["nixl", "mooncake", "bootstrap", "trtllm", "shared_store", "p2p"]


class Listen(Strict):
    """Where clients connect."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    workers: PositiveInt = 1
    """Processes that serve together, with one view of the fleet; a core each."""


class CostPrior(Strict):
    """Which row of `config/models/` describes this model's speed until the pods' own answers do."""

    model: str = "llama-3.1-8b"
    hardware: str = "h100x1"


class ModelConfig(Strict):
    """One model as clients name it, and how its prompts become tokens."""

    name: str
    tokenizer: str | None = None
    """A directory with tokenizer.json, `package:NAME`, a hub name, or `engine` to ask the pods' /tokenize.
    Without one, this model is routed by load alone."""
    chat_template: str | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    fast_tokenizer: bool = True
    block_size_tokens: PositiveInt = 16
    """The router's own block. Every engine's block must be a whole multiple of it."""
    revision: str = ""
    kv_dtype: str = "auto"
    cost: CostPrior = CostPrior()


class KvEvents(Strict):
    """Where a pod publishes its KV events. `*` in the endpoint means that the router binds and engines connect."""

    endpoint: str
    replay_endpoint: str | None = None


class PodConfig(Strict):
    """One pod of a fixed fleet."""

    url: HttpUrl
    """Where it is reached; it also names the pod and its host."""
    socket: SocketPath = ""
    """A Unix socket over which it is reached instead."""
    id: str = ""
    engine: EngineName = "vllm"
    role: Role = Role.BOTH
    handoff: HandoffName | Literal[""] = ""
    """The dialect in which it hands KV over, or takes it; a `prefill` or `decode` pod needs one."""
    handoff_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Where its peers reach its KV, if not at the dialect's usual port: mooncake and bootstrap 8998, p2p 5710."""
    pulls: Literal["p2p", ""] = ""
    """The dialect in which it can be told to fetch KV from a peer."""
    dp_size: PositiveInt = 1
    hardware: str = ""
    """Overrides the hardware of the model's cost prior."""
    speed: PodSpeed | None = None
    """Overrides the cost prior altogether, in milliseconds."""
    kv_events: KvEvents | Literal["auto", "off"] = "auto"
    """`auto` asks the engine; engines that do not publish are routed by what the router itself sent them. With a
    cluster index, `auto` leaves the pod's events to `warmroute publish`."""
    advertised_url: HttpUrl | None = None
    """For `warmroute publish`: the pod's URL as the routers know it, where that is another."""
    host: str = ""
    rack: str = ""
    zone: str = ""

    @model_validator(mode="after")
    def _half_a_pair_hands_over(self) -> PodConfig:
        if self.role is not Role.BOTH and not self.handoff:
            raise ValueError(
                f"a pod with `role: {self.role.value}` needs a dialect to hand KV over, for example `handoff: nixl`; "
                f"there are {', '.join(get_args(HandoffName))}"
            )
        return self


class Edge(Strict):
    """What clients see of the router and what they may say to the engines."""

    route_headers: bool = True
    """Answer with x-warmroute-pod, x-warmroute-policy and x-warmroute-cached-tokens."""
    trust_engine_fields: bool = False
    """Let clients send kv_transfer_params, bootstrap_* and data-parallel headers. Off: they are stripped."""
    passthrough_paths: tuple[str, ...] = ()
    """Paths outside /v1 to pass through by model, such as /tokenize. Engines leave them unauthenticated."""
    session_header: str = "x-session-id"
    tenant_header: str = "x-tenant-id"


class Probes(Strict):
    """How often the router asks the pods how they are."""

    health_interval_s: PositiveFloat = 1.0
    health_timeout_s: PositiveFloat = 2.0
    failures_to_eject: PositiveInt = 3
    slow_ttft_factor: Annotated[float, Field(gt=1)] = 10.0
    """A first token is late that takes so many times as long as expected (of which half a second is the least)."""
    slow_ttfts_to_eject: NonNegativeInt = 8
    """So many late ones, one after another, eject a pod while most others are on time; 0: never."""
    load_interval_s: PositiveFloat = 0.25
    load_timeout_s: PositiveFloat = 2.0
    self_test_interval_s: PositiveFloat = 30.0
    self_test: bool = True
    """Prove at join that tokens and hashes agree. Off: every pod is trusted."""


class RedisTls(Strict):
    """Files for TLS to Redis. Without `ca_file`, the system's authorities."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    verify_host: bool = True


class RedisIndex(Strict):
    """The cluster's index: which Redis, and how it is read."""

    url: str
    """redis[s]://[user[:password]@]host[:port][,host[:port]...][/database]; several hosts: sentinels, or cluster."""
    mode: Literal["single", "sentinel", "cluster"] = "single"
    master: str = ""
    """The master's name, with mode sentinel."""
    username_file: str | None = None
    username_env: str | None = None
    password_file: str | None = None
    password_env: str | None = None
    """Read again for every connection, so that they may be rotated."""
    tls: RedisTls | None = None
    namespace: str = "warmroute"
    """Begins every key. Routers and publishers of one fleet have the same."""
    timeout_s: PositiveFloat = 2.0
    """Longest wait for one answer, off the request path."""
    holder_ttl_s: PositiveFloat = 15.0
    """A holder whose publisher is silent for this long is out of the index."""
    max_replica_bytes: PositiveInt = 2 * 1024**3
    """Memory of the copy's table: 16 to 54 bytes a block and holder at up to 64 holders."""
    max_stale_s: PositiveFloat = 300.0
    """How old a copy may be that is still used while Redis is away."""
    ready_timeout_s: NonNegativeFloat = 10.0
    """How long to wait at the start for the index and the pods' self-tests before serving without them."""


class Index(Strict):
    """How much the router remembers."""

    redis: RedisIndex | None = None
    """The cluster's index. Without it, each router knows what it heard and sent itself."""

    tokens_cache_bytes: PositiveInt = 64 * 1024 * 1024
    predicted_ttl_s: PositiveFloat = 30.0
    """How long a dispatched prompt counts as cached on a pod whose events will confirm it."""
    no_events_ttl_s: PositiveFloat = 1200.0
    """The same for pods that publish no events."""
    no_events_capacity_tokens: PositiveInt = 400_000
    """KV capacity assumed of such a pod while its metrics do not tell."""


class MooncakeStore(Strict):
    """A Mooncake store, by its master's list of keys."""

    kind: Literal["mooncake"]
    url: HttpUrl
    """The master's HTTP admin port."""
    model: str
    """The model of this configuration whose KV is in there."""
    key_prefix: str = ""
    """What its keys begin with: as a rule the name or path that the engines loaded the model by. Default: `model`."""
    id: str = "mooncake"
    group: int = 0
    poll_interval_s: PositiveFloat = 2.0
    readable_by: str = "*"
    """Who can read it: `*` every pod of the model, or the name of a host."""


class LmcacheServers(Strict):
    """LMCache servers (multiprocess mode) whose coordinator this publisher is."""

    kind: Literal["lmcache"]
    model: str
    """The model of this configuration."""
    engine_model_name: str = ""
    """The name or path that the engines loaded it by. Default: `model`."""
    group: int = 0


class StandardBackend(Strict):
    """A tier that sends standardised KV events to `POST /kv-events`, or on standard input."""

    kind: Literal["standard"]
    backend: str
    """Its backend_id."""
    model: str
    url: HttpUrl | None = None
    """The pod whose cache it is; or ..."""
    readable_by: str = ""
    """... who can read it, as of a store."""

    @model_validator(mode="after")
    def _one_of_both(self) -> StandardBackend:
        if (self.url is None) is (not self.readable_by):
            raise ValueError("say either url (a pod's cache) or readable_by (a store)")
        return self


class TierTtl(Strict):
    """Seconds, by tier of a pod."""

    cpu: PositiveFloat = 3600.0
    disk: PositiveFloat = 3600.0
    remote: PositiveFloat = 3600.0


StoreConfig = Annotated[MooncakeStore | LmcacheServers | StandardBackend, Field(discriminator="kind")]


class Publish(Strict):
    """What `warmroute publish` needs beyond models, pods and index.redis."""

    stores: tuple[StoreConfig, ...] = ()
    """Caches that are no pod's own."""
    ttl: TierTtl = TierTtl()
    """When a block that a pod announced in such a tier counts as gone: some never say so."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 9470
    """Where the publisher answers: health, metrics, events in."""
    heartbeat_s: PositiveFloat = 5.0
    flush_interval_ms: PositiveFloat = 20.0
    """How long changes are gathered before they are written."""
    reload_jitter_s: NonNegativeFloat = 1.0
    """Publishers that lost the same Redis come back within this time, not at once."""


class RouterConfig(Strict):
    """`config/router.yaml`."""

    listen: Listen = Listen()
    policy: str = "cost_aware"
    """Decides all requests that no other policy of the folder matches."""
    classes: str | None = None
    """A file of workload classes; without it, `config/classes.yaml`."""
    models: tuple[ModelConfig, ...] = ()
    pods: tuple[PodConfig, ...] = ()
    links: LinksConfig = LinksConfig()
    limits: Limits = Limits()
    edge: Edge = Edge()
    probes: Probes = Probes()
    index: Index = Index()
    publish: Publish = Publish()
    log_format: Literal["console", "json"] = "console"
    priors: str | None = None
    """A folder of cost priors, as `warmroute prior` writes them; they go before the shipped ones."""
    receipts: ReceiptsOrFile = Receipts()

    @model_validator(mode="after")
    def _no_two_alike(self) -> RouterConfig:
        for what, names in (("models", [m.name for m in self.models]), ("pods", [p.url for p in self.pods])):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{what}: {', '.join(twice)} stands there twice")
        return self

    @model_validator(mode="after")
    def _receipts_have_a_way(self) -> RouterConfig:
        if self.receipts.redis_maxlen and self.index.redis is None:
            raise ValueError("receipts.redis_maxlen: there is no index.redis whose stream that could be")
        return self

    @model_validator(mode="after")
    def _kv_has_a_way(self) -> RouterConfig:
        moving = [pod.id or pod.url for pod in self.pods if pod.handoff or pod.pulls]
        if moving and self.links.elsewhere is None:
            raise ValueError(
                f"links.elsewhere: KV moves between pods ({', '.join(moving)}): say over what, for example "
                "`links: {elsewhere: rdma_100}`; the classes stand in config/hardware/links.yaml"
            )
        return self


class SpeedPrior(Strict):
    """One (model, hardware) row: fitted coefficients and where they come from."""

    c0_ms: float
    c1_ms_per_token: PositiveFloat
    c2_ms_per_token2: NonNegativeFloat
    d0_ms: NonNegativeFloat = 0.0
    d1_ms_per_request: NonNegativeFloat = 0.0
    d2_ms_per_context_token: NonNegativeFloat = 0.0
    source: str

    def speed(self) -> PodSpeed:
        """The row as the core's value; a fitted constant below zero is an artefact and counts as zero."""
        return PodSpeed(
            max(self.c0_ms, 0.0),
            self.c1_ms_per_token,
            self.c2_ms_per_token2,
            self.d0_ms,
            self.d1_ms_per_request,
            self.d2_ms_per_context_token,
        )


class ModelPrior(Strict):
    """`config/models/NAME.yaml`."""

    name: str
    kv_bytes_per_token: PositiveInt
    hardware: dict[str, SpeedPrior]


class GpuPrior(Strict):
    """What one GPU achieves in a prefill: for models without a fitted row."""

    c0_ms: NonNegativeFloat
    prefill_tflops: PositiveFloat
    attention_tflops: PositiveFloat
    source: str


class GpuPriors(Strict):
    """`config/hardware/gpus.yaml`."""

    gpus: dict[str, GpuPrior]
