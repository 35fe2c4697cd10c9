"""The frozen models of `discovery` in `config/router.yaml`: where the router finds pods besides those under `pods`."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from router.addresses import read_address
from router.config.load import FilePath, HttpUrl, SecretPath, Strict, checked_url
from router.config.mistakes import wrong_at
from router.config.pod_schema import HOST, KvEvents, PodAuth, PodSettings, PodTlsFiles

ALL_NAMESPACES = "*"
DNS_PORT = 53

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
