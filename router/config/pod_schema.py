"""The frozen models of `pods[]` and `discovery` in `config/router.yaml`: pods, and where the router finds others."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from router.addresses import read_address, read_host
from router.config.load import FilePath, HttpUrl, SecretPath, SecretVariable, Strict, checked_url
from router.config.mistakes import not_one_of, wrong_at
from router.engines.engine_catalog import DIALECTS, ENGINES, PULL_DIALECTS
from router.types import PodSpeed, PodTls, Role

MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux."""
HOST = "{host}"
"""Replaced by a pod's host in the KV event endpoints of discovered pods."""
ALL_NAMESPACES = "*"
DNS_PORT = 53


def _socket_path(value: str) -> str:
    if value and (not value.startswith("/") or len(value.encode()) > MAX_SOCKET_PATH_BYTES):
        raise ValueError(f"must be an absolute path of at most {MAX_SOCKET_PATH_BYTES} bytes")
    return value


def _one_of(*names: str) -> AfterValidator:
    def check(value: str) -> str:
        if value not in names:
            raise not_one_of(names)
        return value

    return AfterValidator(check)


HostName = Annotated[str, AfterValidator(read_host)]
SocketPath = Annotated[str, AfterValidator(_socket_path)]
EngineName = Annotated[str, _one_of(*ENGINES)]
HandoffName = Annotated[str, _one_of(*DIALECTS, "")]
PullDialectName = Annotated[str, _one_of(*PULL_DIALECTS, "")]


class PodAuth(Strict):
    """The router's own credentials at a pod. Clients' are not forwarded, see `edge.forward_headers`."""

    bearer_file: SecretPath | None = None
    """A file with the pod's API key, sent as `authorization: Bearer KEY` with each request of the router to the pod.
    It is read again when it changes."""
    bearer_env: SecretVariable | None = None
    """An environment variable with the key, instead of a file."""

    @model_validator(mode="after")
    def _one_source(self) -> PodAuth:
        if bool(self.bearer_file) == bool(self.bearer_env):
            raise ValueError("needs either `bearer_file` or `bearer_env`, and not both")
        return self


class PodTlsFiles(Strict):
    """TLS to a pod whose URL begins with https. The files are read again when they change."""

    ca_file: FilePath | None = None
    """The certificate of the authority that signed the pod's, in PEM. Default: the system's authorities."""
    cert_file: FilePath | None = None
    """The router's own certificate, for pods that ask for one."""
    key_file: SecretPath | None = None
    """The key of `cert_file`, without a password. Default: it is in `cert_file`."""

    @model_validator(mode="after")
    def _a_key_needs_its_certificate(self) -> PodTlsFiles:
        if self.key_file and not self.cert_file:
            raise ValueError("`key_file` needs `cert_file`")
        return self


def credential_fields(auth: PodAuth | None, tls: PodTlsFiles | None) -> dict[str, Any]:
    """The fields of a `Pod` with these credentials."""
    fields = auth.model_dump(exclude_none=True) if auth else {}
    return {**fields, "tls": PodTls(**tls.model_dump(exclude_none=True))} if tls else fields


def _zmq_address(value: str) -> str:
    scheme, _, place = value.partition("://")
    if scheme not in ("tcp", "ipc") or not place:
        raise ValueError("must be tcp://HOST:PORT or ipc://PATH")
    if scheme == "tcp":
        read_address(place.replace(HOST, "host").replace("*", "host"))
    return value


ZmqAddress: TypeAlias = Annotated[str, AfterValidator(_zmq_address)]


class KvEvents(Strict):
    """Where a pod publishes its KV events. If the endpoint contains `*`, the router binds it and engines connect."""

    endpoint: ZmqAddress
    replay_endpoint: ZmqAddress | None = None


class PodSettings(Strict):
    """What a router can be configured with about one pod or a group of pods, apart from addresses and credentials."""

    engine: EngineName = "vllm"
    """Default: as the pod reports, and vllm until then."""
    role: Role = Role.BOTH
    handoff: HandoffName = ""
    """Dialect for handing KV over between prefill and decode; required with role `prefill` or `decode` (discovered pods
    have a default)."""
    handoff_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on which peers read this pod's KV. Default: the dialect's (mooncake and bootstrap 8998, p2p 5710)."""
    handoff_hosts: tuple[HostName, ...] = ()
    """Hosts besides that of its URL that its handoffs may name: of a network for KV, or its address where the URL has a
    name. The decode pod connects to them; a handoff with another one is not used."""
    pulls: PullDialectName = ""
    """Dialect for fetching KV from a peer."""
    dp_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """Data-parallel ranks. Default: as many as the pod reports, and 1 until then."""
    models: tuple[str, ...] = ()
    """Names of the models and adapters that it may serve; `*` stands for any characters. Others that it lists are
    ignored. Default: all that it lists."""
    pool: str = ""
    """The group of pods that is scaled as one, for example its Deployment; a label of metrics."""
    hardware: str = ""
    """Overrides the hardware of the model's cost prior."""
    speed: PodSpeed | None = None
    """Overrides the cost prior, in milliseconds."""
    capacity_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    """KV capacity, where the engine does not report it. Default: what its KV events show once it evicts."""
    kv_events: KvEvents | Literal["auto", "off"] = "auto"
    """`auto` asks the engine; the router predicts the caches of engines that do not publish. With a cluster index,
    `auto` leaves the pod's events to `warmroute publish`."""
    host: str = ""
    rack: str = ""
    zone: str = ""


def default_id(url: str) -> str:
    """Host, port and path of the URL, as written."""
    return url.partition("://")[2]


class PodConfig(PodSettings):
    """One pod."""

    url: HttpUrl
    """Address of the pod; also its default id and host."""
    socket: SocketPath = ""
    """A Unix socket to connect to instead of the URL's address."""
    auth: PodAuth | None = None
    """For engines with an API key."""
    tls: PodTlsFiles | None = None
    """For engines with a certificate of a private authority, or that ask for a client certificate."""
    id: str = ""
    advertised_url: HttpUrl | None = None
    """For `warmroute publish`: the pod's URL in the routers' configuration, if different."""

    @model_validator(mode="before")
    @classmethod
    def _not_a_bare_address(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError("must be a mapping; write `- url: http://HOST:PORT`")
        return value

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of its pods: one per data-parallel rank, `id#rank` if there are several. The default id is host, port
        and path of the URL."""
        own = self.id or default_id(self.url)
        return tuple(f"{own}#{rank}" for rank in range(self.dp_size)) if self.dp_size > 1 else (own,)

    @property
    def credentials(self) -> dict[str, Any]:
        """The fields of a `Pod` with which the router connects to it."""
        return credential_fields(self.auth, self.tls)

    @model_validator(mode="after")
    def _tls_needs_https(self) -> Self:
        if self.tls and not self.url.startswith("https://"):
            raise wrong_at(("tls",), "needs a `url` that begins with https://")
        return self

    @model_validator(mode="after")
    def _split_roles_need_a_handoff(self) -> Self:
        if self.role is not Role.BOTH and not self.handoff:
            raise ValueError(
                f"a pod with `role: {self.role.value}` needs a handoff dialect, for example `handoff: nixl`; "
                f"known: {', '.join(DIALECTS)}"
            )
        return self


Port = Annotated[int, Field(ge=1, le=65535)]
_Entry = TypeVar("_Entry")


def _namespace(value: str) -> str:
    if value != ALL_NAMESPACES and not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", value):
        raise ValueError('must be the name of a namespace, or "*" for all')
    return value


def _dns_server(value: str) -> str:
    try:
        ip_address(read_address(value, DNS_PORT)[0] if value else "::")
    except ValueError:
        raise ValueError("must be an IP address, optionally with a port: 10.0.0.10:53 or [fd00::10]:53") from None
    return value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


Namespace = Annotated[str, AfterValidator(_namespace)]
OneOrMore = Annotated[tuple[_Entry, ...], BeforeValidator(_listed)]
"""One entry, or a list of entries."""


class GroupSettings(PodSettings):
    """Facts of several pods."""

    @model_validator(mode="after")
    def _each_pod_has_its_own_events(self) -> Self:
        events = self.kv_events
        if isinstance(events, KvEvents):
            endpoints = [each for each in (events.endpoint, events.replay_endpoint) if each is not None]
            if not all(HOST in each for each in endpoints):
                raise wrong_at(("kv_events",), f'must contain {HOST} for the pods\' hosts: "tcp://{HOST}:5557"')
        return self

    @model_serializer(mode="wrap")
    def _only_set_fields(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without defaults: a configuration that is validated again must not override labels by defaults."""
        return {name: value for name, value in serialize(self).items() if name in self.model_fields_set}


class DiscoveredPods(GroupSettings):
    """Facts of all pods that one entry finds. They override what labels of a pod say; `warmroute.dev/` annotations of a
    pod, and an entry of a file, override them. A role without a `handoff` has the default of its engine: nixl for vLLM,
    bootstrap for SGLang, trtllm for TensorRT-LLM."""

    auth: PodAuth | None = None
    tls: PodTlsFiles | None = None
    """With TLS, the pods are reached over https."""


def _target(value: str) -> str:
    if "://" in value:
        return checked_url(value)
    target = value.rstrip("/")
    read_address(target)
    return target


class TargetGroup(GroupSettings):
    """One entry of a file of targets."""

    targets: Annotated[tuple[Annotated[str, AfterValidator(_target)], ...], Field(max_length=10_000)]
    """HOST:PORT or URLs."""
    labels: Annotated[dict[str, str], Field(max_length=100)] = Field(default_factory=dict)
    """As in Prometheus' file_sd. Those with names of fields, such as `role` and `zone`, and those of charts are facts,
    which `pod` and the fields of this entry override. Others are ignored."""


class TargetFile(Strict):
    """A file that lists pods. It is read again when it changes."""

    path: FilePath
    """YAML or JSON: a list of `{targets: [HOST:PORT, ..]}`, each with any fields of `pod` except `auth` and `tls`."""
    pod: DiscoveredPods = DiscoveredPods()


class DnsName(Strict):
    """The addresses of a DNS name, such as that of a headless Service. They are resolved again when their TTL ends."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9.])?$")]
    """Its A records, else its AAAA records; if it begins with `_`, its SRV records, such as
    `_http._tcp.vllm.models.svc.cluster.local`."""
    port: Port | None = None
    """Required for A and AAAA records; SRV records contain it."""
    server: Annotated[str, AfterValidator(_dns_server)] = ""
    """Address of the DNS server, as IP, IP:PORT or [IPv6]:PORT. Default: those of /etc/resolv.conf."""
    pod: DiscoveredPods = DiscoveredPods()

    @model_validator(mode="after")
    def _addresses_need_a_port(self) -> Self:
        if (self.port is None) is not self.name.startswith("_"):
            raise ValueError("an address needs `port`; a name that begins with `_` (SRV) has none")
        return self


class KubernetesApi(Strict):
    """How to reach the API server. The defaults are those of a pod with a ServiceAccount."""

    url: HttpUrl | None = None
    """Default: from the environment, KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT."""
    token_file: SecretPath = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    """Read for each request, because tokens are rotated. Not required to exist."""
    ca_file: FilePath = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    """The authority of the API server, if its URL begins with https; it must exist. Read again when it changes. Empty:
    the system's authorities."""


class KubernetesPods(Strict):
    """Pods of a Kubernetes cluster, by label selector or by InferencePool."""

    selector: str = ""
    """Label selector of the pods, such as `app=vllm`. Needs list and watch on pods. Where those must not be read,
    `dns` finds them by a headless Service, without any permission."""
    inference_pool: Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$")] = ""
    """Name of an InferencePool of Gateway API, instead of `selector`: its pods, each at its `targetPorts`. Needs, in
    addition, get on inferencepools of inference.networking.k8s.io."""
    namespaces: tuple[Namespace, ...] = ()
    """Default: the router's own. `["*"]`: all."""
    port: Port | None = None
    """The port of the engines. Default: from annotations and labels, else the container port named http, else the first
    one."""
    not_ready_grace_s: NonNegativeFloat = 300.0
    """A pod that is not ready gets no new requests, but keeps its streams and its index entries for this long."""
    resync_s: Annotated[float, Field(ge=10)] = 300.0
    """Time between two full lists, which find what a watch has lost."""
    node_labels: bool = True
    """Read zone and rack from labels of nodes. Needs get on nodes (a ClusterRole); without it, the
    labels of pods remain."""
    rack_label: str = ""
    """Label of pods or nodes that names the rack."""
    api: KubernetesApi = KubernetesApi()
    pod: DiscoveredPods = DiscoveredPods()

    @model_validator(mode="after")
    def _one_way_to_find_pods(self) -> Self:
        if bool(self.selector) == bool(self.inference_pool):
            raise ValueError("needs either `selector`, such as `selector: app=vllm`, or `inference_pool`")
        if self.inference_pool and (len(self.namespaces) > 1 or ALL_NAMESPACES in self.namespaces):
            raise ValueError("an `inference_pool` is in one of `namespaces`")
        return self


class Discovery(Strict):
    """Sources of pods. Each of the three is one entry or a list; their pods are added to those under `pods`."""

    file: OneOrMore[TargetFile] = ()
    dns: OneOrMore[DnsName] = ()
    kubernetes: OneOrMore[KubernetesPods] = ()

    @property
    def groups(self) -> dict[tuple[str, int], DiscoveredPods]:
        """The facts of each entry by its key and number."""
        entries: dict[str, tuple[TargetFile | DnsName | KubernetesPods, ...]] = {
            "file": self.file,
            "dns": self.dns,
            "kubernetes": self.kubernetes,
        }
        return {(key, number): entry.pod for key, found in entries.items() for number, entry in enumerate(found)}
