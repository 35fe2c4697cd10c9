"""What the controller of Deployments does next: one new pod at a time, and old ones only when enough are ready."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

Object = dict[str, Any]
OWNER, HASH = "live.test/deployment", "pod-template-hash"


def template_hash(deployment: Object) -> str:
    return hashlib.sha256(json.dumps(deployment["spec"]["template"], sort_keys=True).encode()).hexdigest()[:8]


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def is_terminating(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def next_step(deployment: Object, pods: Sequence[Object]) -> tuple[bool, list[Object]]:
    """Whether to create a pod, and the pods to delete. `pods`: those of this Deployment."""
    replicas, current = deployment["spec"]["replicas"], template_hash(deployment)
    alive = [pod for pod in pods if not is_terminating(pod)]
    new = [pod for pod in alive if pod["metadata"]["labels"][HASH] == current]
    old = [pod for pod in alive if pod not in new]
    create = len(new) < replicas and len(alive) < replicas + bool(old)
    return create, list(_surplus(old, new, replicas))


def deployment_status(deployment: Object, pods: Sequence[Object]) -> Object:
    """What `kubectl rollout status` and `helm --wait` read."""
    current, replicas = template_hash(deployment), deployment["spec"]["replicas"]
    alive = [pod for pod in pods if not is_terminating(pod)]
    ready = sum(map(is_ready, alive))
    return {
        "observedGeneration": deployment["metadata"]["generation"],
        "replicas": len(alive),
        "updatedReplicas": sum(pod["metadata"]["labels"][HASH] == current for pod in alive),
        "readyReplicas": ready,
        "availableReplicas": ready,
        "conditions": [
            {"type": "Available", "status": str(ready >= replicas)},
            {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"},
        ],
    }


def is_complete(deployment: Object, pods: Sequence[Object]) -> bool:
    """Whether the Deployment has all its pods, and no others."""
    hashes = [pod["metadata"]["labels"][HASH] for pod in pods if not is_terminating(pod)]
    return hashes == [template_hash(deployment)] * deployment["spec"]["replicas"]


def _surplus(old: Sequence[Object], new: Sequence[Object], replicas: int) -> Iterator[Object]:
    """Pods that are not ready first, then old ones; of ready ones no more than leave `replicas` ready."""
    ready = sum(is_ready(pod) for pod in [*old, *new])
    excess = len(old) + len(new) - replicas
    for pod in sorted([*old, *new[replicas:]], key=is_ready):
        if excess <= 0 or (is_ready(pod) and ready <= replicas):
            return
        excess -= 1
        ready -= is_ready(pod)
        yield pod


def new_pod(deployment: Object, number: int) -> Object:
    """A pod of the Deployment, already on the node."""
    template, name = deployment["spec"]["template"], deployment["metadata"]["name"]
    current = template_hash(deployment)
    metadata = template["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-{current}-{number}",
            "labels": {**metadata["labels"], HASH: current},
            "annotations": {**metadata.get("annotations", {}), OWNER: name},
        },
        "spec": {**template["spec"], "nodeName": "node-1"},
    }
