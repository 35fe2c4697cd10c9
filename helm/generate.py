"""Writes `values.schema.json` and the table of `README.md` from `values.yaml`, alerts, dashboards and their
documentation from `monitoring/` and the router's metrics, and the reference page and schema of policy files.

    python -m helm.generate

Defaults, types and descriptions come from `values.yaml`: the comment above a key is its description, and comments that
are indented by three spaces are examples. This file adds what a default does not show. The keys under `config` come
from the router's own configuration model, those of Kubernetes from its OpenAPI schema.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ruamel.yaml import YAML

from helm.monitoring.alerts import alerts_file, runbook
from helm.monitoring.dashboards import DASHBOARDS, dashboard_file
from helm.monitoring.metrics_page import metrics_page
from helm.policy_pages import reference_page, schema_page
from router import __version__
from router.config.load import Strict
from router.config.mistakes import models_in
from router.config.schema import RouterConfig

Schema = dict[str, Any]
CHART = Path(__file__).parent
POLICIES = CHART.parent / "policies"
_VERSIONS = re.compile(r"(?m)^((?:version|appVersion): ).*$")
KUBERNETES = "v1.37.0-local-strict"
"""Version whose fields pods may use. Clusters of older versions ignore or refuse newer fields."""
TABLE = ("<!-- values: python -m helm.generate -->", "<!-- /values -->")
NAME = {"type": "string", "maxLength": 253, "pattern": r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?$"}
REQUIRED_NAME = {"type": "string", "maxLength": 63, "pattern": r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"}
DURATION = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h))+$"}
SHARE = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
STRINGS = {"type": "array", "items": {"type": "string"}}
GROUPS = {
    "apps.v1": {"DeploymentStrategy"},
    "autoscaling.v2": {"HorizontalPodAutoscalerBehavior"},
    "networking.v1": {"IngressTLS", "NetworkPolicyPeer", "NetworkPolicyIngressRule", "NetworkPolicyEgressRule"},
}
"""Groups of the types of Kubernetes that are not in core/v1."""
LABELS = {"type": "object", "additionalProperties": {"type": "string"}}


def at_least(least: int) -> Schema:
    return {"type": "integer", "minimum": least}


def one_of(*names: str) -> Schema:
    return {"type": "string", "enum": list(names)}


def k8s(name: str) -> Schema:
    """A type of Kubernetes, such as Toleration."""
    group = next((group for group, names in GROUPS.items() if name in names), "core.v1")
    return {"$ref": f"#/definitions/io.k8s.api.{group}.{name}"}


def k8s_list(name: str) -> Schema:
    return {"type": "array", "items": k8s(name)}


def fields(required: str = "", **described: tuple[str, Schema]) -> Schema:
    """An object of the chart: schema and description by key."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": {key: {"description": text, **schema} for key, (text, schema) in described.items()},
    }


def probe(path: str) -> Schema:
    return fields(
        periodSeconds=(f"Seconds between two requests of {path}.", at_least(1)),
        failureThreshold=("Consecutive failures until the kubelet acts.", at_least(1)),
        successThreshold=("Consecutive successes after a failure.", at_least(1)),
        timeoutSeconds=("Seconds to wait for the answer.", at_least(1)),
        initialDelaySeconds=("Seconds before the first request.", at_least(0)),
    )


TOKENIZER = fields(
    "name",
    name=("Folder below /tokenizers.", REQUIRED_NAME),
    persistentVolumeClaim=(
        "A volume that has the tokenizer.",
        fields(
            "claimName",
            claimName=("Name of the PersistentVolumeClaim.", NAME),
            subPath=("Folder in the volume.", {"type": "string"}),
        ),
    ),
    image=(
        "An OCI image whose root folder is the tokenizer.",
        fields(
            "reference",
            reference=("Registry, name and tag or digest.", {"type": "string", "minLength": 1}),
            pullPolicy=("When nodes pull it.", one_of("Always", "IfNotPresent", "Never")),
        ),
    ),
    configMap=("A ConfigMap whose keys are the files.", fields("name", name=("Its name.", NAME))),
    hub=(
        "A repository of the hub; an init container downloads the tokenizer's files from it.",
        fields(
            "repository",
            repository=("Name, such as Qwen/Qwen3-32B.", {"type": "string", "pattern": r"^[\w.-]+/[\w.-]+$"}),
            revision=("Branch, tag or commit.", {"type": "string", "pattern": r"^[\w./-]+$"}),
        ),
    ),
)

POOL = fields(
    "name",
    name=("Name of the pool; part of the Deployment's name.", {**REQUIRED_NAME, "maxLength": 40}),
    engine=(
        "vllm, or mock: no model, but real tokens, blocks and KV events, and answers without sense.",
        one_of("vllm", "mock"),
    ),
    model=("Hub name or path of the model, for vLLM.", {"type": "string"}),
    servedModelName=("Name that clients use. Default: `model`.", {"type": "string"}),
    replicas=("Number of pods.", at_least(0)),
    autoscaled=(
        "An autoscaler sets the number of pods, as in examples/engine-scaling; `replicas` is ignored.",
        {"type": "boolean"},
    ),
    role=("Whether the pods prefill, decode, or do both.", one_of("both", "prefill", "decode")),
    handoff=(
        "How prefill pods hand KV over to decode pods.",
        one_of("", "nixl", "mooncake", "shared_store", "p2p", "bootstrap", "trtllm"),
    ),
    kvTransferConfig=("vLLM's --kv-transfer-config.", {"type": "object"}),
    image=("The engine's image. Default: vllm/vllm-openai of `tag`; for mock the chart's own.", {"type": "string"}),
    args=("Further arguments of the engine.", STRINGS),
    port=("Port of the engine's API.", PORT),
    maxStreamSeconds=("How long a pod that stops may take to complete its answers.", at_least(1)),
    startupSeconds=("How long a pod may take to load the model.", at_least(10)),
    sidecar=("Publish the pod's KV events to the shared index from a sidecar.", {"type": "boolean"}),
    sharedMemory=("Size of /dev/shm, for tensor parallelism.", {"type": "string"}),
    resources=("CPU, memory and GPUs.", k8s("ResourceRequirements")),
    env=("Environment variables.", k8s_list("EnvVar")),
    volumes=("Volumes.", k8s_list("Volume")),
    volumeMounts=("Mounts of the volumes.", k8s_list("VolumeMount")),
    nodeSelector=("Labels of nodes to run on.", LABELS),
    tolerations=("Taints of nodes to accept.", k8s_list("Toleration")),
    affinity=("Rules of the scheduler.", k8s("Affinity")),
    podAnnotations=("Annotations of the pods.", LABELS),
    podLabels=("Labels of the pods.", LABELS),
    podSecurityContext=("Security of the pods.", k8s("PodSecurityContext")),
    securityContext=("Security of the containers.", k8s("SecurityContext")),
)

TARGETS = {
    "type": ["string", "object"],
    "minLength": 1,
    "minProperties": 1,
    "additionalProperties": {"type": "number", "minimum": 0},
}
NAMED = fields(
    "name to",
    name=("The name; with `*` at its end, all names with that beginning that are not models.", {"type": "string"}),
    to=("The model or adapter that it becomes, or several with their weights.", TARGETS),
    rules=(
        "Other targets for some tenants or headers; the first that applies counts.",
        {
            "type": "array",
            "items": fields(
                "to",
                tenants=("Tenants whose requests it is for.", STRINGS),
                headers=("Headers with their values.", LABELS),
                to=("The same as `to` of the name.", TARGETS),
            ),
        },
    ),
    fallbacks=("Models or adapters that serve a request that the target cannot.", STRINGS),
)

SCALED = fields(
    "target models maxReplicas",
    target=(
        "What is scaled, in the namespace of the release. Its replicas must not be set by anything else.",
        fields(
            "name",
            name=("Name of the object.", {**NAME, "minLength": 1}),
            apiVersion=("Its API. Default: apps/v1.", {"type": "string"}),
            kind=("Its kind. Default: Deployment.", {"type": "string"}),
        ),
    ),
    models=(
        "Models and adapters of its pods, by the pods' own names. Requests for one of them start the first pod.",
        {**STRINGS, "minItems": 1},
    ),
    pool=("Value of the pods' label warmroute.dev/pool. Default: pods without one.", {"type": "string"}),
    minReplicas=("Fewest pods. 0 needs config.limits.hold_s. Default: 1.", at_least(0)),
    maxReplicas=("Most pods.", at_least(1)),
    cooldownSeconds=("Seconds without requests after which the last pod is stopped. Default: 900.", at_least(0)),
    pollingIntervalSeconds=("Seconds between two queries. Default: 5.", at_least(1)),
    fallbackReplicas=("Fewest pods while Prometheus does not answer. Default: 1.", at_least(1)),
)

NUMBER_OR_SHARE = {"type": ["integer", "string"], "minimum": 0, "pattern": "^([0-9]+%)?$"}

RULES: Mapping[str, Schema] = {
    "nameOverride": {**NAME, "maxLength": 40},
    "fullnameOverride": {**NAME, "maxLength": 40},
    "commonLabels": LABELS,
    "commonAnnotations": LABELS,
    "image.repository": {"type": "string", "pattern": r"^[a-z0-9][a-z0-9._:/-]*$"},
    "image.digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "image.pullPolicy": one_of("Always", "IfNotPresent", "Never"),
    "imagePullSecrets": k8s_list("LocalObjectReference"),
    "config": {"$ref": "#/definitions/RouterConfig"},
    "policies": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z0-9][a-z0-9_.-]*$"},
        "additionalProperties": {"type": "object"},
    },
    "names": {"type": "array", "items": NAMED},
    "replicaCount": {"type": ["integer", "null"], "minimum": 0},
    "tokenizers": {"type": "array", "items": TOKENIZER},
    "hub.endpoint": {"type": "string", "pattern": "^(https?://.+)?$"},
    "hub.tokenSecret.name": NAME,
    "tenants.existingSecret": NAME,
    "providerKeys.existingSecret": NAME,
    "tenants.existingSecretKey": {"type": "string", "minLength": 1},
    "admin.existingSecret": NAME,
    "admin.existingSecretKey": {"type": "string", "minLength": 1},
    "redis.existingSecret": NAME,
    "redis.tls.existingSecret": NAME,
    "valkey.existingSecret": NAME,
    "valkey.existingSecretKey": {"type": "string", "minLength": 1},
    "valkey.maxMemory": {"type": "string", "pattern": "^[0-9]+(kb|mb|gb)$"},
    "publisher.replicaCount": at_least(1),
    "engines.pools": {"type": "array", "items": POOL},
    "engineScaling": {"type": "array", "items": SCALED},
    "service.type": one_of("ClusterIP", "NodePort", "LoadBalancer"),
    "service.port": PORT,
    "service.nodePort": {"type": "integer", "minimum": 0, "maximum": 65535},
    "service.trafficDistribution": one_of("", "PreferClose", "PreferSameZone", "PreferSameNode"),
    "service.externalTrafficPolicy": one_of("", "Cluster", "Local"),
    "serviceAccount.name": NAME,
    "terminationGracePeriodSeconds": at_least(1),
    "preStopSeconds": at_least(0),
    "updateStrategy": k8s("DeploymentStrategy"),
    "probes.startup": probe("/livez"),
    "probes.liveness": probe("/livez"),
    "probes.readiness": probe("/readyz"),
    "podDisruptionBudget.maxUnavailable": NUMBER_OR_SHARE,
    "podDisruptionBudget.minAvailable": NUMBER_OR_SHARE,
    "autoscaling.minReplicas": at_least(1),
    "autoscaling.maxReplicas": at_least(1),
    "autoscaling.targetInFlight": at_least(1),
    "autoscaling.targetLoopLagShare": SHARE,
    "autoscaling.hpa.behavior": k8s("HorizontalPodAutoscalerBehavior"),
    "autoscaling.keda.serverAddress": {"type": "string", "pattern": "^https?://.+$"},
    "autoscaling.keda.authenticationRef": NAME,
    "autoscaling.keda.pollingIntervalSeconds": at_least(1),
    "autoscaling.keda.cooldownSeconds": at_least(0),
    "autoscaling.keda.fallbackReplicas": at_least(1),
    "topologySpreadConstraints": k8s_list("TopologySpreadConstraint"),
    "hostAliases": k8s_list("HostAlias"),
    "podSecurityContext": k8s("PodSecurityContext"),
    "securityContext": k8s("SecurityContext"),
    "networkPolicy.clients": k8s_list("NetworkPolicyPeer"),
    "networkPolicy.monitoring": k8s_list("NetworkPolicyPeer"),
    "networkPolicy.engines": k8s_list("NetworkPolicyPeer"),
    "networkPolicy.enginePorts": {"type": "array", "items": PORT},
    "networkPolicy.apiServer": k8s_list("NetworkPolicyPeer"),
    "networkPolicy.apiServerPorts": {"type": "array", "items": PORT},
    "networkPolicy.redis": k8s_list("NetworkPolicyPeer"),
    "networkPolicy.extraIngress": k8s_list("NetworkPolicyIngressRule"),
    "networkPolicy.extraEgress": k8s_list("NetworkPolicyEgressRule"),
    "streaming.idleTimeoutSeconds": at_least(60),
    "ingress.controller": one_of("nginx", "alb", "gce", "haproxy", "openshift", "other"),
    "ingress.hosts": {"type": "array", "items": {"type": "string", "minLength": 1}},
    "ingress.tls": k8s_list("IngressTLS"),
    "httpRoute.parentRefs": {
        "type": "array",
        "items": fields(
            "name",
            name=("Name of the Gateway.", NAME),
            namespace=("Its namespace. Default: the release's.", NAME),
            sectionName=("One of its listeners. Default: all.", NAME),
            group=("API group. Default: gateway.networking.k8s.io.", {"type": "string"}),
            kind=("Kind. Default: Gateway.", {"type": "string"}),
            port=("Port of the listener.", PORT),
        ),
    },
    "httpRoute.hostnames": {"type": "array", "items": {"type": "string", "minLength": 1}},
    "picker.port": PORT,
    "picker.inferencePool.name": NAME,
    "picker.inferencePool.matchLabels": LABELS,
    "picker.inferencePool.targetPorts": {
        "type": "array",
        "items": PORT,
        "minItems": 1,
        "maxItems": 8,
        "uniqueItems": True,
    },
    "picker.inferencePool.failureMode": one_of("FailOpen", "FailClose"),
    "monitoring.podMonitor.interval": DURATION,
    "monitoring.serviceMonitor.interval": DURATION,
    "monitoring.podMonitor.metricRelabelings": {"type": "array", "items": {"type": "object"}},
    "test.timeoutSeconds": at_least(1),
    "extraArgs": STRINGS,
    "extraEnvFrom": k8s_list("EnvFromSource"),
    "extraVolumes": k8s_list("Volume"),
    "extraVolumeMounts": k8s_list("VolumeMount"),
    "extraContainers": k8s_list("Container"),
    "extraInitContainers": k8s_list("Container"),
    "extraObjects": {"type": "array", "items": {"type": ["object", "string"]}},
}
"""Schema by path, where the default does not show it."""

BY_NAME: Mapping[str, Schema] = {
    "annotations": LABELS,
    "labels": LABELS,
    "alertLabels": LABELS,
    "podAnnotations": LABELS,
    "podLabels": LABELS,
    "nodeSelector": LABELS,
    "tolerations": k8s_list("Toleration"),
    "affinity": k8s("Affinity"),
    "extraEnv": k8s_list("EnvVar"),
    "resources": k8s("ResourceRequirements"),
}
"""Schema by the last part of the path."""


def descriptions(text: str) -> dict[str, str]:
    """The description of each key that has a comment above it, by path."""
    found: dict[str, str] = {}
    above: list[str] = []
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        if comment := re.match(r" *# ?(.*)", line):
            above.append(comment[1])
        elif key := re.match(r"( *)([A-Za-z]\w*):", line):
            indent = len(key[1])
            path = [*((depth, name) for depth, name in path if depth < indent), (indent, key[2])]
            words = " ".join(one for one in above if not one.startswith("  ") and one)
            if words:
                found[".".join(name for _, name in path)] = words
            above = []
        else:
            above = []
    return found


def of_value(path: str, value: Any, about: Mapping[str, str]) -> Schema:
    """The schema of one value. Raises `ValueError` if it has no description or no known type."""
    rule = RULES.get(path) or BY_NAME.get(path.rpartition(".")[2])
    described = {"description": about[path]} if path in about else {}
    if path and not described:
        raise ValueError(f"{path} has no comment above it in values.yaml")
    if rule is None and isinstance(value, dict) and value:
        properties = {key: of_value(f"{path}.{key}".lstrip("."), one, about) for key, one in value.items()}
        return {**described, "type": "object", "additionalProperties": False, "properties": properties}
    if rule is None:
        kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
        if type(value) not in kinds:
            raise ValueError(f"{path} needs a line in RULES")
        rule = {"type": kinds[type(value)]}
    return {**described, **rule, "default": value}


# --- the router's configuration ---


def router_config() -> dict[str, Schema]:
    """The router's configuration model and the models in it, by name, with the docstrings of fields as descriptions."""
    top = RouterConfig.model_json_schema(ref_template="#/definitions/{model}")
    models: dict[str, Schema] = top.pop("$defs")
    models["RouterConfig"] = top
    sections = (one for field in RouterConfig.model_fields.values() for one in models_in(field.annotation))
    classes: dict[str, type] = {one.__name__: one for one in (*_subclasses(Strict), *sections)}
    for name, schema in models.items():
        documented = _field_docstrings(classes[name]) if name in classes else {}
        if "properties" in schema:
            schema["additionalProperties"] = False  # pydantic says so for models, not for dataclasses
        for key, field in schema.get("properties", {}).items():
            field.pop("title", None)
            if field.get("default") == math.inf:  # no JSON: what is left out is not limited
                del field["default"]
            if key in documented:
                field["description"] = documented[key]
    for field in models.get("Discovery", {}).get("properties", {}).values():
        field["anyOf"] = [field["items"], {"type": field.pop("type"), "items": field.pop("items")}]  # one, or a list
    return models


def _subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for one in model.__subclasses__():
        yield one
        yield from _subclasses(one)


def _field_docstrings(model: type) -> dict[str, str]:
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for pair in zip(definition.body, definition.body[1:], strict=False):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                found[name] = " ".join(text.split())
    return found


# --- Kubernetes ---


def kubernetes(names: set[str]) -> dict[str, Schema]:
    """The named definitions of Kubernetes and those that they need, without their descriptions."""
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / KUBERNETES
    known = json.loads((folder / "_definitions.json").read_text())["$defs"]
    found: dict[str, Schema] = {}
    missing = set(names)
    while missing:
        name = missing.pop()
        found[name] = _without_descriptions(known[name])
        missing |= referenced(found[name]) - found.keys()
    return found


def _without_descriptions(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_descriptions(one) for one in node]
    if not isinstance(node, dict):
        return node.replace("#/$defs/", "#/definitions/") if isinstance(node, str) else node
    return {
        key: _without_descriptions(value)
        for key, value in node.items()
        if not (key == "description" and isinstance(value, str)) and not key.startswith("x-")
    }


def referenced(schema: Any) -> set[str]:
    """Names of the definitions of Kubernetes that the schema refers to."""
    return set(re.findall(r'"#/definitions/(io\.k8s\.[\w.-]+)"', json.dumps(schema)))


# --- the files ---


def values_schema() -> Schema:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    values = YAML(typ="safe").load(text)
    schema = of_value("", values, descriptions(text))
    # Helm merges `global` into the values of every chart.
    schema["properties"]["global"] = {
        "description": "Values that Helm passes to all charts; not used.",
        "type": "object",
    }
    definitions = {**router_config(), **kubernetes(referenced(schema))}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the warmroute chart",
        **schema,
        "definitions": dict(sorted(definitions.items())),
    }


def table(schema: Schema) -> str:
    """The values as a table in Markdown."""
    lines = ["| value | default | meaning |", "|---|---|---|", *_rows("", schema)]
    return "\n".join([TABLE[0], *lines, TABLE[1]])


def _rows(path: str, schema: Schema) -> Iterator[str]:
    for key, one in schema["properties"].items():
        name = f"{path}.{key}".lstrip(".")
        if "default" in one:
            default = json.dumps(one["default"], ensure_ascii=False)
            shown = default if len(default) <= 60 else "see values.yaml"
            text = one["description"].replace("|", "\\|")
            yield f"| `{name}` | `{shown}` | {text} |"
        elif "properties" in one:
            yield from _rows(name, one)


def readme(schema: Schema) -> str:
    """README.md with its table renewed."""
    text = (CHART / "README.md").read_text(encoding="utf-8")
    before, rest = text.split(TABLE[0])
    return before + table(schema) + rest.split(TABLE[1])[1]


def generated() -> dict[Path, str]:
    """The content of each generated file."""
    schema = values_schema()
    return {
        CHART / "values.schema.json": json.dumps(schema, indent=1, ensure_ascii=False) + "\n",
        CHART / "README.md": readme(schema),
        CHART / "METRICS.md": metrics_page(),
        POLICIES / "REFERENCE.md": reference_page(),
        POLICIES / "schema.json": schema_page(),
        CHART / "Chart.yaml": _VERSIONS.sub(rf"\g<1>{__version__}", (CHART / "Chart.yaml").read_text(encoding="utf-8")),
        CHART / "RUNBOOK.md": runbook(),
        CHART / "files" / "alerts.yaml": alerts_file(),
        **{CHART / "files" / "dashboards" / f"{one.name}.json": dashboard_file(one) for one in DASHBOARDS},
    }


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
