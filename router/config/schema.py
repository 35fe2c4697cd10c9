"""The frozen models of `config/router.yaml`, with every default.

A change of these settings needs a restart; settings that change at run time are in `policies/`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from router.addresses import is_loopback, read_host
from router.admission.admission_queue import AdmissionConfig
from router.admission.tenant import Slo, SloKey
from router.config.index_schema import Index, Publish
from router.config.load import MODEL_FOLDER, FilePath, HttpUrl, SecretPath, Strict, TokenizerPlace
from router.config.mistakes import wrong_at
from router.config.pod_schema import Discovery, PodConfig, SocketPath
from router.config.provider_schema import Provider
from router.cost_model import BYTES_PER_MS_PER_GB_PER_S
from router.engines.forwarded_headers import forwarded_header, is_header_name
from router.engines.forwarded_paths import added_path, changes_engine
from router.fleet.breaker import Probes
from router.fleet.scaling import Scaling
from router.types import Generation, Link, Role

KEY_HEADERS = frozenset({"authorization", "x-api-key"})
"""Headers with the API keys of clients."""
VERSION = 1
"""The version of the format, for files that an older or newer release reads."""


def _host(value: str) -> str:
    """The host; a link-local address may name its zone, such as fe80::1%eth0."""
    address, percent, zone = value.partition("%")
    return read_host(address) + percent + zone


def _one_process(workers: int) -> int:
    if workers != 1:
        raise ValueError(
            f"a router is one process: start {workers} with `listen: {{reuse_port: true}}`, the same `index.redis` and "
            "different --admin-port; with the chart, set `replicaCount`"
        )
    return workers


Host = Annotated[str, AfterValidator(_host)]
ListenPort = Annotated[int, Field(ge=0, le=65535)]


class ListenTls(Strict):
    """The certificate that clients see. Both files are read again when they change."""

    cert_file: FilePath
    """The certificate, followed by those of intermediate authorities, in PEM."""
    key_file: SecretPath | None = None
    """Its key, without a password. Default: it is in `cert_file`."""


class Listen(Strict):
    """The address that clients connect to."""

    host: Host = "127.0.0.1"
    """"::" is all addresses of the machine, IPv4 and IPv6; 0.0.0.0 those of IPv4."""
    port: ListenPort = 8080
    tls: ListenTls | None = None
    """TLS for clients. The admin listener has none."""
    reuse_port: bool = False
    """Whether other routers of this user may listen on the same port: the kernel then spreads connections over them.
    A router uses one core; several on one machine share `index.redis`."""
    workers: Annotated[int, AfterValidator(_one_process)] = 1
    """Accepted for configurations of older releases."""


class PickerListen(Strict):
    """What `warmroute picker` serves in place of `listen`: the endpoint picker of a gateway, by gRPC."""

    host: Host = "127.0.0.1"
    """The gateway is believed: let nothing else connect."""
    port: ListenPort = 9002
    tls: ListenTls | None = None
    """TLS for the gateway. The files are read at the start."""
    fallbacks: Annotated[int, Field(ge=0, le=8)] = 0
    """Further addresses after the best one, for retries of the gateway. Only where its cluster takes a list
    (`override_host`); one with ORIGINAL_DST refuses requests with more than one address."""
    message_timeout_s: PositiveFloat = 0.2
    """`message_timeout` of the gateway's filter, which only counts where it buffers requests: one that would take
    longer is refused by then."""
    requests: Literal["gateway", "picker"] = "gateway"
    """Who sends requests to pods: the gateway, to the pod that the picker names; or the picker, whose response the
    gateway passes on. Then requests are tried again, streams continued and KV pulled as by `warmroute serve`."""
    prefill: Literal["picker", "sidecar"] = "picker"
    """Who sends the prefill requests of handoffs: the picker, before it names the decode pod, whose body then names the
    KV; or llm-d's sidecar in the decode pod, which reads the prefill pod from `x-prefiller-host-port`."""
    test_header: bool = False
    """Whether clients may choose pods with the header `test-epp-endpoint-selection`, as the conformance tests of
    gateways do. Never where clients are not trusted."""


class AdminListen(Strict):
    """The listener for operators: /metrics, /admin and the detailed /readyz."""

    host: Host = "127.0.0.1"
    port: ListenPort = 9480
    socket: SocketPath = ""
    """A Unix socket to listen on instead. Only the router's own user can connect."""
    bearer_file: SecretPath | None = Field(default=None, validate_default=True)
    """A file with the accepted bearer tokens, one a line; read again when it changes. Required unless `host` is a
    loopback address. Without it, only processes of this machine are served."""
    gpu_hour_price: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The price of one GPU for one hour: with it, the operators' page shows the money that hits of prefix caches
    saved."""
    currency: Annotated[str, Field(max_length=8)] = "USD"
    """The currency of `gpu_hour_price`."""

    @field_validator("bearer_file")
    @classmethod
    def _others_need_a_token(cls, value: str | None, info: ValidationInfo) -> str | None:
        host = info.data.get("host", "127.0.0.1")
        if value is None and not info.data.get("socket") and not is_loopback(host):
            raise ValueError("required, because `host` is not a loopback address; name a file with a token")
        return value


def _extra_path(path: str) -> str:
    if changes_engine(path):
        raise ValueError("changes the engine for all clients; if every client may do that, name it in `control_paths`")
    return added_path(path)


def _header_name(name: str) -> str:
    if not is_header_name(name.lower()):
        raise ValueError("must be the name of a header, such as x-session-id")
    return name.lower()


def _cors_origin(value: str) -> str:
    if value != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s,A-Z]+", value):
        raise ValueError('must be "*" or scheme://host[:port] in lower case, without a path')
    return value


HeaderName = Annotated[str, AfterValidator(_header_name)]


class Edge(Strict):
    """Headers of responses, and what clients may send."""

    route_headers: bool = True
    """Add x-warmroute-pod, x-warmroute-policy and x-warmroute-cached-tokens to responses, and x-warmroute-match where
    the prompt was routed by load only: `none; reason=...`. Off: messages of errors name no pods either."""
    trust_engine_fields: bool = False
    """Pass fields and headers of clients that steer engines on to pods, such as KV transfers, ranks, priorities and
    adapters by path (the tables of router/engines/steering.py), and the `uuid` of pictures. Off: strip them."""
    forward_headers: tuple[Annotated[str, AfterValidator(forwarded_header)], ...] = ()
    """Headers of clients to pass on although they are credentials or claims of proxies, such as authorization. With
    authorization or cookie, www-authenticate or set-cookie of pods pass as well."""
    extra_paths: tuple[Annotated[str, AfterValidator(_extra_path)], ...] = ()
    """Paths to forward by model besides those of the inference APIs, such as /tokenizer_info. Each is compared exactly.
    Engines do not authenticate paths outside /v1."""
    control_paths: tuple[Annotated[str, AfterValidator(added_path)], ...] = ()
    """Paths with which every client may change the engines, such as /reset_prefix_cache. They
    are never forwarded unless they are named here; a request changes one pod only."""
    cors_origins: tuple[Annotated[str, AfterValidator(_cors_origin)], ...] = ()
    """Origins of web pages that may call the router from a browser, such as https://chat.example.com, or "*"."""
    session_headers: tuple[HeaderName, ...] = (
        *("x-session-id", "session-id", "x-claude-code-session-id", "x-opencode-session", "x-dynamo-session-id"),
    )
    """Headers with the id of a client's session; the first that is present counts, before `session_id` and
    `prompt_cache_key` of the body. The defaults are those of OpenCode, Codex, Claude Code and clients of Dynamo."""
    keep_alive_s: PositiveFloat | None = None
    """A stream that waits longer for its first token gets its head and a comment, then one each time: gateways that cut
    silent connections keep it. Anthropic's API has the event `ping` for that. The status is 200 by then, so an error is
    an event, and SDKs do not try again. Null: never."""
    tenant_header: HeaderName = "x-tenant-id"
    """Header with the name of the tenant, where no `tenants` are configured: any client may send any. With them,
    the key decides."""


class Receipts(Strict):
    """Records of decisions. They contain prompts only with `prompts`, and never responses."""

    keep: NonNegativeInt = 1000
    """Decisions in memory, for `warmroute explain`: 7 KiB each with 10 pods, 13 with 100, 37 with 500."""
    file: FilePath | None = None
    """Append one line of JSON per request to this file, within a second."""
    max_file_bytes: NonNegativeInt = 256 * 1024 * 1024
    """A larger file is renamed to FILE.1, FILE.1 to FILE.2 and so on. 0: never."""
    rotated_files: PositiveInt = 4
    """Number of renamed files to keep."""
    replay_data: bool = True
    """Add to each line what `warmroute replay` needs."""
    prompts: bool = False
    """Add the prompts."""


class UsageFile(Strict):
    """What each request used, for bills."""

    file: FilePath | None = None
    """Append one line of JSON for each request that ended, in any way: tenant, model, adapter, prompt, cached, computed
    and output tokens, time to first token, status, and an id that no other line has. Lines that cannot be written, as
    on a full disk, are kept in memory (64 MiB) and written later."""


def _receipts(value: Any) -> Any:
    return {"file": value} if value is None or isinstance(value, str) else value


ReceiptsOrFile: TypeAlias = Annotated[Receipts, BeforeValidator(_receipts)]


class Log(Strict):
    """The log on stderr."""

    format: Literal["auto", "console", "json"] = "auto"
    """`auto`: console lines on a terminal, else JSON."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Less important lines are omitted. The line of a request has the level info."""
    requests: bool = True
    """One line for each request that ended: id, model, pod, policy, status, cached tokens, times."""
    requests_sample: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the requests that are logged."""


class TracingConfig(Strict):
    """OpenTelemetry traces of requests, exported over OTLP (HTTP, protobuf). Needs the extra `otel`."""

    enabled: bool = False
    endpoint: HttpUrl | None = None
    """Base URL of the collector, such as http://collector:4318. Default: `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or
    `OTEL_EXPORTER_OTLP_ENDPOINT` of the environment, else http://localhost:4318. `OTEL_EXPORTER_OTLP_HEADERS` and the
    SDK's other variables apply as well."""
    sample_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of the requests without a `traceparent` that are traced; with one, its sampled flag decides."""
    max_requests_per_s: PositiveInt = 100
    """Traced requests a second, a bound because clients can set the sampled flag."""


QUEUE_SLO = Slo(ttft_ms=2000.0, tpot_ms=100.0, idle_prefills=3.0)
"""What models without one have in the queue of `admission`."""


class LinkFigures(Strict):
    """`transfer ms = t0 + bytes / bandwidth` of a transfer that has the link to itself."""

    t0_ms: NonNegativeFloat
    gb_per_s: PositiveFloat

    def link(self, kind: str) -> Link:
        """The figures as a core value. Calibration applies to all links of one `kind`."""
        return Link(self.t0_ms, self.gb_per_s * BYTES_PER_MS_PER_GB_PER_S, kind)


WhichLink: TypeAlias = str | LinkFigures | None
"""The name of a class, or figures; None: no such link."""


class LinksConfig(Strict):
    """The links of this fleet. Two pods use the link of the nearest place that they share."""

    same_host: WhichLink = None
    same_rack: WhichLink = None
    same_zone: WhichLink = None
    elsewhere: WhichLink = None
    """Between all other pods. Without it, they exchange no KV."""
    cpu: WhichLink = "pcie4"
    """From a pod's memory to its GPU."""
    disk: WhichLink = "nvme"
    remote: WhichLink = "rdma_100"
    """From a store to a GPU."""


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
    hold_s: PositiveFloat | None = None
    """Longest time that requests wait for the first pod of a model that is under `models`, or a target of `names`: for
    a fleet that scales from zero. Longer than a pod takes to start. Null: they get 503 at once."""
    max_waiting_for_pods: PositiveInt = 1000
    """Requests of one model that wait so, shared by tenants by their weights; further ones get 503."""
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


class ContinuationConfig(Strict):
    """Broken streams go on, on another pod: `docs/continuation.md`."""

    enabled: Literal["proven"] | bool = "proven"
    """Remember streams while they last, of vLLM (0.27 or later) with token ids. `proven`: of pods that continued
    an answer of their own in a test. `true`: also greedy streams of other pods, which are made again and compared."""
    silence_s: PositiveFloat = 5.0
    """A pod that is not ready any more and sends nothing within a stream for this long has failed."""


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
    names: FilePath | None = None
    """A file of names that clients may ask for, and the models that they become: aliases, canaries. Read again when it
    changes."""
    models: tuple[ModelConfig, ...] = ()
    unlisted_models: Literal["load_only", "engine"] = "load_only"
    """How prompts of models that are not under `models` are read: not at all, so that load alone decides, or by the
    /tokenize of their pods. `warmroute serve --pod` without `models` implies `engine`."""
    pods: tuple[PodConfig, ...] = ()
    providers: tuple[Provider, ...] = ()
    """Hosted models that may be `fallbacks` of `names`: they serve where no pod can, and cost money."""
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
    def _waits_for_what_it_wakes(self) -> RouterConfig:
        if self.scaling.wake_pods and self.limits.hold_s is None:
            raise wrong_at(("scaling", "wake_pods"), "needs limits.hold_s, the time that requests wait for a pod")
        return self

    @model_validator(mode="after")
    def _no_duplicates(self) -> RouterConfig:
        models, pods = [model.name for model in self.models], [pod.url for pod in self.pods]
        providers = [one.name for one in self.providers]
        for number, name in enumerate(providers):
            if name in models:
                raise wrong_at(("providers", number, "name"), f"is also that of models.{models.index(name)}")
        for section, key, names in (
            ("models", "name", models),
            ("pods", "url", pods),
            ("providers", "name", providers),
        ):
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
