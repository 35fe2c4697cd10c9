"""Builds the definition of a discovered pod from its address and what is known about it: annotations, labels, settings.

Own annotations are the fields of a pod in router.yaml, with dashes: `warmroute.dev/role: prefill`. In addition,
`ports: "8000,8001"` (one engine or rank a port), `kv-events-port`, `kv-replay-port`, and `kv-events: "off"`.
Conventions of charts that people already run are one table; a new chart is a new row. What neither says is taken from
the configuration, or asked from the pod itself once it is probed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeAlias

from pydantic import ValidationError

from router.addresses import bracketed, join_address, url_host
from router.config.mistakes import explain_mistakes
from router.config.pod_schema import HOST, DiscoveredPods, KubernetesPods, KvEvents, PodConfig, PodSettings
from router.engines.engine_catalog import CHART_NAMES, DEFAULT_HANDOFFS, IMAGES
from router.errors import ConfigError
from router.feeds.discovery.kube_api import MAX_VALUE_CHARACTERS, OWN_PREFIX, KubePod
from router.types import Role

Facts: TypeAlias = Mapping[str, Any]
"""Values of fields of a `PodConfig`."""
NO_FACTS: Facts = MappingProxyType({})
DEFAULT_PORT = 8000
MAX_PORTS = 64
"""Ports of one pod that are used."""
MAX_UNKNOWN = 16
"""Annotations without a meaning that are named in a warning."""
ZONE_LABEL = "topology.kubernetes.io/zone"
NOT_SERVING = ""
"""A value that says that the pod takes no requests of clients."""
_CONFIGURED = ("kv_events", "speed", "models")
"""Fields that no annotation sets: a pod does not decide which models it may serve."""


def discovered_pod(
    host: str, port: int, group: DiscoveredPods, facts: Facts = NO_FACTS, hints: Facts = NO_FACTS
) -> PodConfig:
    """The pod at an address. Settings of its group override `hints`, and `facts` both. Raises `ConfigError`."""
    scheme = "https" if group.tls else "http"
    return pod_at(f"{scheme}://{join_address(host, port)}", group, facts, hints)


def pod_at(url: str, group: DiscoveredPods, facts: Facts, hints: Facts = NO_FACTS) -> PodConfig:
    """The same for a URL, whose host replaces `{host}` in the endpoints of KV events."""
    known = {**hints, **{name: getattr(group, name) for name in group.model_fields_set}, **facts, "url": url}
    if known.get("role", Role.BOTH) != Role.BOTH and not known.get("handoff"):
        known["handoff"] = DEFAULT_HANDOFFS.get(known.get("engine", "vllm"), "")
    try:
        pod = PodConfig.model_validate(known)
    except ValidationError as error:
        raise ConfigError(explain_mistakes(error, PodConfig, known, lambda _: (url, 0))) from None
    if not isinstance(events := pod.kv_events, KvEvents):
        return pod
    host, replay = bracketed(url_host(url)), events.replay_endpoint
    endpoints = KvEvents(
        endpoint=events.endpoint.replace(HOST, host), replay_endpoint=replay and replay.replace(HOST, host)
    )
    return pod.model_copy(update={"kv_events": endpoints})


MAX_PORTS_CHARACTERS = MAX_VALUE_CHARACTERS

ROLES: Mapping[str, str] = {
    "prefill": Role.PREFILL,
    "encode-prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "encode-decode": Role.DECODE,
    "prefill-decode": Role.BOTH,
    "encode-prefill-decode": Role.BOTH,
    "both": Role.BOTH,
}


@dataclass(frozen=True, slots=True)
class Convention:
    """A label or annotation of a chart. `values`: what they mean, others nothing; None: they are used as they are."""

    chart: str
    label: str
    fact: str
    values: Mapping[str, str] | None = None


CONVENTIONS = (
    Convention("llm-d", "llm-d.ai/role", "role", {**ROLES, "encode": NOT_SERVING}),
    Convention("llm-d", "llm-d.ai/engine-type", "engine", CHART_NAMES),
    Convention("llm-d", "llm-d.ai/active-ports", "ports"),
    Convention("llm-d", "inference.networking.k8s.io/active-ports", "ports"),
    Convention(
        "KServe",
        "app.kubernetes.io/component",
        "role",
        {
            "llminferenceservice-workload-prefill": Role.PREFILL,
            "llminferenceservice-workload-worker": NOT_SERVING,
            "llminferenceservice-router-scheduler": NOT_SERVING,
        },
    ),
    Convention("AIBrix", "role-name", "role", {"prefill": Role.PREFILL, "decode": Role.DECODE}),
    Convention("AIBrix", "model.aibrix.ai/engine", "engine", CHART_NAMES),
    Convention("AIBrix", "model.aibrix.ai/port", "ports"),
    Convention("AIBrix", "model.aibrix.ai/sglang-bootstrap-port", "handoff_port"),
    Convention("SMG", "smg.ai/worker-ports", "ports"),
    Convention("SMG", "sglang.ai/bootstrap-port", "handoff_port"),
    Convention("production-stack", "sleeping", "role", {"true": NOT_SERVING}),
    Convention("Kubernetes 1.35", ZONE_LABEL, "zone"),
)
"""The first row that applies gives the fact."""
_OWN = {
    **{name.replace("_", "-"): name for name in PodSettings.model_fields if name not in _CONFIGURED},
    **{name: name.replace("-", "_") for name in ("ports", "kv-events", "kv-events-port", "kv-replay-port")},
}
"""Fields by the name of our own annotation."""


def read_keys(entry: KubernetesPods) -> frozenset[str]:
    """The annotations and labels that may be facts, in addition to our own."""
    return frozenset({*(row.label for row in CONVENTIONS), *filter(None, [entry.rack_label])})


@dataclass(frozen=True, slots=True)
class NodePlace:
    zone: str = ""
    rack: str = ""


def pod_configs(
    pod: KubePod, entry: KubernetesPods, place: NodePlace, pod_id: str, pool_ports: Sequence[int] = ()
) -> list[PodConfig]:
    """The definitions of a pod, one for each port; none if it takes no requests. Of `pool_ports`, those of an
    InferencePool, a chart's label may exclude some. Raises `ConfigError`."""
    hints, own = _conventional(pod.labels), _annotated(pod)
    if hints.get("role") == NOT_SERVING and "role" not in own:
        return []
    container, engine = _serving_container(pod)
    hints = {
        **({"engine": engine} if engine else {}),
        "host": pod.node,
        "zone": place.zone,
        "rack": pod.labels.get(entry.rack_label, "") or place.rack,
        **hints,
    }
    own_ports, labelled = _numbers(own.pop("ports", "")), _numbers(hints.pop("ports", ""))
    in_pool = [port for port in pool_ports if port in labelled or not labelled]
    configured = [entry.port] if entry.port else []
    ports = own_ports or in_pool or configured or labelled or [_container_port(pod, container)]
    ids = [pod_id] if len(ports) == 1 else [f"{pod_id}:{port}" for port in ports]
    return [
        discovered_pod(pod.address, port, entry.pod, {**own, "id": one}, hints)
        for one, port in zip(ids, ports, strict=True)
    ]


def unknown_annotations(pod: KubePod) -> list[str]:
    """Annotations with our prefix that mean nothing, most likely typing errors."""
    found = (key for key in pod.labels if key.startswith(OWN_PREFIX) and key.removeprefix(OWN_PREFIX) not in _OWN)
    return list(islice(found, MAX_UNKNOWN))


def label_facts(labels: Mapping[str, str]) -> dict[str, Any] | None:
    """What the labels of a target file say: those of charts, and those that are named like our annotations, with
    underscores or dashes. Others are ignored. None if the targets take no requests."""
    named = {_OWN.get(name.replace("_", "-"), ""): value.strip() for name, value in labels.items()}
    found = _conventional(labels) | {name: value for name, value in named.items() if name in PodSettings.model_fields}
    found.pop("ports", None)
    return None if found.get("role") == NOT_SERVING else found


def _conventional(labels: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in CONVENTIONS:
        value = labels.get(row.label, "").strip()
        meaning = row.values.get(value.lower()) if row.values is not None else value or None
        if meaning is not None:
            found.setdefault(row.fact, meaning)
    return found


def _annotated(pod: KubePod) -> dict[str, Any]:
    given = {
        _OWN[name]: value.strip()
        for key, value in pod.labels.items()
        if key.startswith(OWN_PREFIX) and (name := key.removeprefix(OWN_PREFIX)) in _OWN
    }
    events, replay = given.pop("kv_events_port", ""), given.pop("kv_replay_port", "")
    found: dict[str, Any] = dict(given)
    if events:
        replay_endpoint = f"tcp://{{host}}:{_port(replay)}" if replay else None
        found["kv_events"] = KvEvents(endpoint=f"tcp://{{host}}:{_port(events)}", replay_endpoint=replay_endpoint)
    return found


def _numbers(text: str) -> list[int]:
    """Ports from a list separated by commas, without duplicates. Raises `ConfigError`."""
    if len(text) > MAX_PORTS_CHARACTERS:
        raise ConfigError(f"{len(text)} characters are no list of ports")
    found = list(dict.fromkeys(_port(part.strip()) for part in text.split(",") if part.strip()))
    if len(found) > MAX_PORTS:
        raise ConfigError(f"more than {MAX_PORTS} ports")
    return found


def _port(text: str) -> int:
    if not (text.isdecimal() and len(text) <= 5 and 0 < int(text) <= 65535):
        raise ConfigError(f"{text[:20]!r} is not a port")
    return int(text)


def _serving_container(pod: KubePod) -> tuple[int, str]:
    """(number, engine) of the first container with an engine's image; else the first container."""
    for number, image in enumerate(pod.images):
        for part, engine in IMAGES.items():
            if part in image.lower():
                return number, engine
    return 0, ""


def _container_port(pod: KubePod, container: int) -> int:
    """The port named http, else the first one, else `DEFAULT_PORT`."""
    ports = pod.ports[container] if container < len(pod.ports) else ()
    return next((number for name, number in ports if name == "http"), ports[0][1] if ports else DEFAULT_PORT)
