"""The frozen models of `config/router.yaml`, with every default.

A change of these settings needs a restart; settings that change at run time are in `policies/`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from router.admission.tenant import Slo, SloKey
from router.config.discovery_schema import Discovery
from router.config.edge_schema import Edge
from router.config.index_schema import Index, Publish
from router.config.links import LinksConfig
from router.config.listen_schema import AdminListen, Listen, PickerListen
from router.config.load import MODEL_FOLDER, FilePath, Strict, TokenizerPlace
from router.config.log_schema import Log, Receipts, ReceiptsOrFile, TracingConfig, UsageFile
from router.config.mistakes import wrong_at
from router.config.pod_schema import PodConfig
from router.types import Generation, Role

KEY_HEADERS = frozenset({"authorization", "x-api-key"})
"""Headers with the API keys of clients."""
QUEUE_SLO = Slo(ttft_ms=2000.0, tpot_ms=100.0, idle_prefills=3.0)
"""What models without one have in the queue of `admission`."""
VERSION = 1
"""The version of the format, for files that an older or newer release reads."""


class CostPrior(Strict):
    """The row of `config/models/` with this model's speed, used until enough responses were measured. The default is
    where a model without `cost` starts."""

    model: str = "llama-3.1-8b"
    hardware: str = "h100x1"


class ModelConfig(Strict):
    """One model under the name that clients use, and how its prompts become tokens. A name with `*` is a pattern: its
    settings are those of every other model that a pod serves and whose name matches, the first pattern wins."""

    name: str
    tokenizer: TokenizerPlace | None = None
    """A directory with tokenizer.json, `package:NAME`, a hub name, or `engine` to call the pods' /tokenize.
    Without one, this model is routed by load alone. For a pattern also `/models/{model}`: folders with the names of
    models, listed at the start; pods tokenize the prompts of models without one."""
    chat_template: FilePath | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    chat_format: Literal["template", "harmony"] = "template"
    """How pods render chats: by the chat template, or in the Harmony format, as vLLM does for gpt-oss. The latter needs
    the package oss-harmony (the extra `harmony`)."""
    harmony_date: Annotated[str, Field(pattern=r"^(\d{4}-\d{2}-\d{2})?$")] = ""
    """VLLM_SYSTEM_START_DATE of the pods, as YYYY-MM-DD. Empty: today, in the time zone of this machine."""
    fast_tokenizer: bool = True
    block_size_tokens: PositiveInt = 16
    """The router's block size. Every engine's block size must be a multiple of it."""
    max_prompt_tokens: PositiveInt = 1_048_576
    """Context length, if the pods do not report theirs. A prompt whose text alone is longer than that gets 400."""
    revision: str = ""
    kv_dtype: str = "auto"
    cost: CostPrior | None = None
    """Without one, the model starts with the default row, which may be far from its speed."""
    slo: SloKey = None
    """Times that a good request meets, unless its tenant has others: read by `admission`, the alert WarmrouteSloMissed
    and `warmroute plan --config`. Without it, `admission` has 2 s or three idle prefills and 100 ms a token."""

    @property
    def is_pattern(self) -> bool:
        """Whether its settings are those of models that pods name."""
        return "*" in self.name

    @property
    def has_folders(self) -> bool:
        """Whether each of its models has a tokenizer of its own, in a folder with its name."""
        return MODEL_FOLDER in (self.tokenizer or "")

    @model_validator(mode="after")
    def _folders_are_of_a_pattern(self) -> ModelConfig:
        if self.has_folders and not self.is_pattern:
            raise wrong_at(("tokenizer",), f"{MODEL_FOLDER} needs a `name` with *, such as meta-llama/*")
        return self

    @property
    def cost_row(self) -> CostPrior:
        """The row that its pods start with."""
        return self.cost or CostPrior()

    def generation(self, tokenizer_fingerprint: str = "") -> Generation:
        """The generation that block hashes of this model include."""
        return Generation(
            model=self.name,
            revision=self.revision,
            tokenizer=tokenizer_fingerprint,
            kv_dtype=self.kv_dtype,
            block_size_tokens=self.block_size_tokens,
        )


class Limits(Strict):
    """Sizes, counts and times after which a request is refused or aborted."""

    max_body_bytes: PositiveInt = 32 * 1024 * 1024
    max_json_items: Annotated[int, Field(ge=1024, le=524_288)] = 131_072
    """Objects and lists in a JSON body, and their elements: bounds the time that decoding takes. 24 escaped
    characters count as one element; outside of chats, 16 numbers do: token ids."""
    max_messages: PositiveInt = 16_384
    """Messages of a chat."""
    max_header_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024
    """Request line and headers."""
    max_headers: Annotated[int, Field(ge=16)] = 100
    """Headers or trailers of a request, the default of Envoy, Apache and Tomcat. In memory, a header without a value
    takes 27 times its bytes."""
    max_connections: PositiveInt = 16_384
    """Client connections, shared as `max_in_flight` is. Each needs one open file, and a second one while a request is
    served: at most 4/9 of the process's limit. The admin listener has at most 128.
    Counts those of which a request was admitted. Beyond that one more replaces an idle or incomplete one of the client
    with the most, else its request gets 503. Others use the places that are free, and 64 more."""
    max_in_flight: PositiveInt = 8_192
    """Requests being served; further ones get 503 with Retry-After. One tenant alone, or one address without `tenants`,
    may have all. When 7/8 are used, those with more than their share get no more: 429 with Retry-After. For others, 1/8
    more than the limit is kept. Clients of a trusted proxy that names no addresses have no share."""
    max_held_bytes: PositiveInt = 1024 * 1024 * 1024
    """Total size of buffered request bodies, and of responses of more than 64 KiB that are held until they are whole
    and read, shared as `max_in_flight` is. When it is used up, responses pass as they come, and bodies that have been
    incomplete for 5 s are dropped for others, those of the client with the most bytes first."""
    request_timeout_s: PositiveFloat = 60.0
    """From the first byte of a request to its last; it begins again with each MiB of the body."""
    write_timeout_s: PositiveFloat = 60.0
    """A client that reads nothing for this long is disconnected."""
    slow_read_timeout_s: PositiveFloat = 600.0
    """A client whose buffer is full (64 KiB, besides those of the sockets) is disconnected unless it reads most of it
    within this time. Otherwise one that reads a byte a second would hold its stream and its pod for hours."""
    connect_timeout_s: PositiveFloat = 2.0
    first_byte_timeout_s: PositiveFloat = 600.0
    idle_timeout_s: PositiveFloat = 300.0
    """Longest pause between two pieces of a pod's response."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Further candidates to try before the first byte of the response: at most one of them after a pod received the
    request, which may itself be the cause."""
    retry_budget: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Retries per request over the last minute, plus 20 a minute. Failed connections do not count as retries."""
    drain_delay_s: NonNegativeFloat = 2.0
    """On SIGTERM, /readyz fails for this long before connections are refused, so that load balancers notice first."""
    drain_timeout_s: NonNegativeFloat = 60.0
    """On SIGTERM, running responses get this long to finish."""


class AdmissionConfig(Strict):
    """The queue in front of the fleet. While no pod has a place for it, a request waits in the router and not in an
    engine; a request that would be late is refused at once, with 503, or with 429 if its tenant has used its share."""

    max_requests: PositiveInt = 1000
    """Waiting requests of one model. Beyond that, the tenant with the most waiting prefill loses its
    last one."""
    max_bytes: PositiveInt = 256 * 1024 * 1024
    """Their bodies."""
    max_wait_ms: PositiveFloat = 1200.0
    """The longest wait that is predicted for a request that is not refused."""
    slo_share: Annotated[float, Field(ge=0.5, le=0.999)] = 0.975
    """The share of the accepted requests that shall meet the SLO; a larger one refuses more. How much later than
    predicted a first token may come, and how long a pod only decodes between two prompts, is learnt for it."""


class Probes(Strict):
    """Health checks, load scrapes, self-tests and ejection of pods."""

    health_interval_s: PositiveFloat = 1.0
    health_timeout_s: PositiveFloat = 2.0
    failures_to_eject: PositiveInt = 3
    """Consecutive failures of requests or of health checks that eject a pod."""
    clients_to_eject: Annotated[int, Field(ge=1, le=16)] = 2
    """Clients (tenants, else addresses) that must cause failures which may be due to a request, such as a 500 or a slow
    TTFT, before these eject a pod. 1 where one trusted gateway hides all clients."""
    min_ready_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Requests eject no pod if fewer pods than this share, or none, would stay ready for one of its models or adapters,
    by role. Health checks that are refused or get an error always eject."""
    slow_ttft_factor: Annotated[float, Field(gt=1)] = 10.0
    """A TTFT is slow if it exceeds the expected one (at least 0.5 s) by this factor."""
    slow_ttfts_to_eject: NonNegativeInt = 8
    """Consecutive slow TTFTs that eject a pod while most other pods are not slow. 0: never."""
    doubt_window_s: NonNegativeFloat = 2.0
    """Failures that may be due to a request, and slow TTFTs, eject a pod only if no request succeeds on it for this
    long."""
    load_interval_s: PositiveFloat = 0.25
    """The shortest time between two scrapes of a pod. It grows with the fleet, up to 20 times, so that scrapes take at
    most a tenth of a core: first for idle pods."""
    load_timeout_s: PositiveFloat = 2.0
    self_test_interval_s: PositiveFloat = 30.0
    self_test: bool = True
    """When a pod joins, verify that its tokens and block hashes equal the router's. Off: trust every pod."""

    @property
    def max_load_age_s(self) -> float:
        """Age from which a load is unknown: twenty scrapes of an idle pod, and one that times out."""
        return 40 * self.load_interval_s + self.load_timeout_s


class ContinuationConfig(Strict):
    """Broken streams go on, on another pod: `docs/continuation.md`."""

    enabled: Literal["proven"] | bool = "proven"
    """Remember streams while they last, of vLLM (0.27 or later) with token ids. `proven`: of pods that continued
    an answer of their own in a test. `true`: also greedy streams of other pods, which are made again and compared."""
    silence_s: PositiveFloat = 5.0
    """A pod that is not ready any more and sends nothing within a stream for this long has failed."""


class Scaling(Strict):
    """How busy replicas should be: the targets behind `warmroute_pool_desired_replicas`, for autoscalers of engines."""

    prefill_utilization: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of a pod's time that prefills should take. The rest is for decode steps and for prompts that come together:
    at 0.6 a prompt waits for 0.75 others on average (M/D/1: u / 2 (1 - u))."""
    backlog_s: PositiveFloat = 120.0
    """Time in which waiting prefills should be computed. Less than a replica takes to start leads to replicas that have
    nothing to do."""
    kv_usage: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Used share of the KV cache, as the engines report it."""
    itl_ms: PositiveFloat = 50.0
    """Time of a decode step, by the learnt costs."""


class RouterConfig(Strict):
    """`config/router.yaml`."""

    version: int = VERSION
    """Version of this format."""
    listen: Listen = Listen()
    picker: PickerListen = PickerListen()
    admin: AdminListen = AdminListen()
    policy: str = "cost_aware"
    """The default policy, for all requests that no other policy of the folder matches."""
    classes: FilePath | None = None
    """A file of workload classes. Default: `config/classes.yaml`."""
    tenants: FilePath | None = None
    """A file of tenants with digests of their API keys, read again when it changes; `warmroute tenants key` makes keys.
    Without it, every client is served, and no key is checked."""
    models: tuple[ModelConfig, ...] = ()
    unlisted_models: Literal["load_only", "engine"] = "load_only"
    """How prompts of models that are not under `models` are read: not at all, so that load alone decides, or by the
    /tokenize of their pods. `warmroute serve --pod` without `models` implies `engine`."""
    pods: tuple[PodConfig, ...] = ()
    discovery: Discovery = Discovery()
    links: LinksConfig = LinksConfig()
    limits: Limits = Limits()
    edge: Edge = Edge()
    admission: AdmissionConfig | None = None
    """A queue in front of the fleet, such as `admission: {}`. Null: requests wait in the engines, and none is refused
    because it would be late."""
    probes: Probes = Probes()
    continuation: ContinuationConfig = ContinuationConfig()
    scaling: Scaling = Scaling()
    index: Index = Index()
    publish: Publish = Publish()
    log: Log = Log()
    tracing: TracingConfig = TracingConfig()
    priors: FilePath | None = None
    """A folder of cost priors, as written by `warmroute prior`. They override the shipped ones."""
    receipts: ReceiptsOrFile = Receipts()
    """`receipts: FILE` is short for `receipts: {file: FILE}`."""
    usage: UsageFile = UsageFile()

    @model_validator(mode="before")
    @classmethod
    def _version_is_known(cls, data: Any) -> Any:
        """Checked before the other keys, which another version may name differently."""
        if isinstance(data, dict) and data.get("version", VERSION) != VERSION:
            raise wrong_at(
                ("version",),
                f"must be {VERSION}, the only version that this release reads; "
                "install the release for which the file was written, or change it as CHANGELOG.md says",
            )
        return data

    @model_validator(mode="after")
    def _no_duplicates(self) -> RouterConfig:
        models, pods = [model.name for model in self.models], [pod.url for pod in self.pods]
        for section, key, names in (("models", "name", models), ("pods", "url", pods)):
            for number, name in enumerate(names):
                if name and name in names[:number]:
                    first = f"{section}.{names.index(name)}.{key}"
                    raise wrong_at((section, number, key), f"duplicate of {first}; each needs its own")
        return self

    @model_validator(mode="after")
    def _pod_ids_differ(self) -> RouterConfig:
        owners: dict[str, int] = {}
        for number, pod in enumerate(self.pods):
            first = min(owners.setdefault(pod_id, number) for pod_id in pod.ids)
            if first != number:
                key = "id" if pod.id else "url"
                raise wrong_at(
                    ("pods", number, key),
                    f"same pod id as pods.{first}; set `id` of one of them (default: host, port and path of `url`)",
                )
        return self

    @model_validator(mode="after")
    def _listeners_need_their_own_ports(self) -> RouterConfig:
        if self.listen.port and self.listen.port == self.admin.port and not self.admin.socket:
            own, other = ("admin", "listen") if "port" in self.admin.model_fields_set else ("listen", "admin")
            raise wrong_at((own, "port"), f"equals {other}.port ({self.listen.port}); choose another")
        return self

    @model_validator(mode="after")
    def _keys_of_tenants_stay_here(self) -> RouterConfig:
        forwarded = [name for name in self.edge.forward_headers if name in KEY_HEADERS]
        if self.tenants and forwarded:
            raise wrong_at(
                ("edge", "forward_headers"),
                f"{forwarded[0]} would send the keys of `tenants` to pods; remove it, and give pods a key with `auth`",
            )
        return self

    @model_validator(mode="after")
    def _moving_kv_needs_a_link(self) -> RouterConfig:
        moving = [pod.id or pod.url for pod in self.pods if pod.handoff or pod.pulls]
        for (source, _), group in self.discovery.groups.items():
            if group.handoff or group.pulls or group.role is not Role.BOTH:
                moving.append(f"discovery.{source}")
        if moving and self.links.elsewhere is None:
            raise wrong_at(
                ("links", "elsewhere"),
                f"missing, but KV moves between pods ({', '.join(moving[:3])}); set a link class, "
                "for example `links: {elsewhere: rdma_100}`; the classes are in config/hardware/links.yaml",
            )
        return self
