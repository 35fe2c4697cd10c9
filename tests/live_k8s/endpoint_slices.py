"""What the controller of EndpointSlices writes: one slice for each Service, in the version of Kubernetes 1.20."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tests.live_k8s.rollout import is_ready, is_terminating

Object = dict[str, Any]
SLICES = "/apis/discovery.k8s.io/v1beta1"
ZONE = "zone-1"


def endpoint_slice(service: Object, pods: Iterable[Object]) -> Object:
    """The slice of a Service with a selector. Endpoints that terminate stay until their pod is gone."""
    name, spec = service["metadata"]["name"], service["spec"]
    selected = [
        pod
        for pod in pods
        if spec["selector"].items() <= pod["metadata"]["labels"].items() and pod.get("status", {}).get("podIP")
    ]
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "endpoints": [_endpoint(pod) for pod in selected],
        "ports": [_port(port, selected) for port in spec["ports"]],
    }


def _endpoint(pod: Object) -> Object:
    meta, leaves = pod["metadata"], is_terminating(pod)
    return {
        "addresses": [pod["status"]["podIP"]],
        "conditions": {"ready": is_ready(pod) and not leaves, "serving": is_ready(pod), "terminating": leaves},
        "targetRef": {"kind": "Pod", "namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]},
        "nodeName": pod["spec"]["nodeName"],
        "topology": {"topology.kubernetes.io/zone": ZONE},
    }


def _port(port: Object, pods: Sequence[Object]) -> Object:
    """Names of container ports are those of the first pod."""
    target = port.get("targetPort", port["port"])
    named = [one for pod in pods[:1] for one in pod["spec"]["containers"][0]["ports"] if one.get("name") == target]
    number = target if isinstance(target, int) else named[0]["containerPort"] if named else port["port"]
    return {"name": port.get("name", ""), "port": number}
