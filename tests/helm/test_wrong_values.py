"""Wrong values are refused before anything reaches the cluster, with a message that names the key."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.charts import MINIMAL, HelmFailed, merged, minimal, render

DISCOVERED = {"discovery": {"kubernetes": {"selector": "app=vllm"}}}
REDIS = {"config": {"index": {"redis": {"url": "redis://redis:6379/0"}}}}
SCALED = {"target": {"name": "vllm"}, "models": ["m"], "maxReplicas": 2}
HUB = {"repository": "Qwen/Qwen3-8B"}

WRONG: list[tuple[dict[str, Any], str]] = [
    # Spelling: every level knows its keys.
    ({"replicas": 3}, "additional properties 'replicas' not allowed"),
    ({"image": {"tga": "1"}}, "'/image': additional properties 'tga' not allowed"),
    ({"config": {"limit": {}}}, "'/config': additional properties 'limit' not allowed"),
    ({"config": {"limits": {"drain_timout_s": 5}}}, "'/config/limits': additional properties 'drain_timout_s' not"),
    ({"probes": {"readiness": {"path": "/"}}}, "'/probes/readiness': additional properties 'path' not allowed"),
    ({"resources": {"limit": {}}}, "'/resources': additional properties 'limit' not allowed"),
    ({"tolerations": [{"keys": "gpu"}]}, "'/tolerations/0': additional properties 'keys' not allowed"),
    ({"securityContext": {"readOnlyRoot": True}}, "'/securityContext': additional properties 'readOnlyRoot' not"),
    ({"tokenizers": [{"name": "a", "hub": {"repo": "a/b"}}]}, "additional properties 'repo' not allowed"),
    ({"engines": {"pools": [{"name": "a", "gpus": 1}]}}, "'/engines/pools/0': additional properties 'gpus' not"),
    (
        {"config": {"discovery": {"kubernetes": {"selector": "app=vllm", "deletion_cost": True}}}},
        "'/config/discovery/kubernetes': additional properties 'deletion_cost' not allowed",
    ),
    ({"config": {"admission": {"slo": {}}}}, "'/config/admission': additional properties 'slo' not allowed"),
    # Types and ranges.
    ({"replicaCount": "two"}, "'/replicaCount': got string, want null or integer"),
    ({"image": {"digest": "sha256:abc"}}, "'/image/digest': 'sha256:abc' does not match pattern"),
    ({"service": {"type": "External"}}, "'/service/type': value must be one of 'ClusterIP'"),
    ({"config": {"listen": {"port": 70000}}}, "'/config/listen/port': maximum: got 70,000"),
    ({"config": {"models": [{"tokenizer": "engine"}]}}, "'/config/models/0': missing property 'name'"),
    ({"monitoring": {"podMonitor": {"interval": "15"}}}, "'/monitoring/podMonitor/interval': '15' does not match"),
    ({"tokenizers": [{"name": "a"}]}, "tokenizers: a needs one source"),
    ({"tokenizers": [{"name": "a", "hub": HUB, "configMap": {"name": "b"}}]}, "tokenizers: a needs one source"),
    ({"names": [{"name": "a", "to": {"b": "half"}}]}, "'/names/0/to/b': got string, want number"),
    ({"engineScaling": [{"target": {"name": "a"}, "models": [], "maxReplicas": 2}]}, "minItems: got 0, want 1"),
    # Values that do not fit together.
    ({"names": [{"name": "a", "to": "b"}], "config": {"names": "/my.yaml"}}, "config.names is another file (/my.yaml)"),
    (
        {"engineScaling": [SCALED | {"minReplicas": 0}]},
        "would be refused while it has no pod; set config.limits.hold_s",
    ),
    ({"engineScaling": [SCALED | {"minReplicas": 3}]}, "minReplicas of vllm exceeds maxReplicas (2)"),
    (
        {
            "engineScaling": [SCALED | {"target": {"name": "r-warmroute-chat"}}],
            "engines": {"pools": [{"name": "chat", "model": "m"}]},
        },
        "the chart sets the replicas of r-warmroute-chat, too; set autoscaled: true",
    ),
    ({"config": {"pods": []}}, "there are no pods to route to"),
    ({"terminationGracePeriodSeconds": 60}, "terminationGracePeriodSeconds: 60 would kill routers while they answer"),
    ({"config": {"limits": {"drain_timeout_s": 700}}}, "need at least 715"),
    ({"preStopSeconds": 30}, "need at least 640"),
    ({"config": {"listen": {"workers": 4}}}, "a router is one process; set `replicaCount: 4`"),
    (
        {"replicaCount": 2, "config": {"admission": {"max_wait_ms": 900}}},
        "config.admission: each of several routers would fill all places",
    ),
    ({"autoscaling": {"hpa": {"enabled": True}, "keda": {"enabled": True}}}, "hpa and keda are both enabled"),
    ({"autoscaling": {"minReplicas": 5, "maxReplicas": 4, "hpa": {"enabled": True}}}, "minReplicas (5) exceeds"),
    ({"autoscaling": {"keda": {"enabled": True, "fallbackReplicas": 1}}}, "a gap of metrics would remove routers"),
    ({"replicaCount": 2, "podDisruptionBudget": {"minAvailable": 2}}, "2 of 2 routers lets no node drain"),
    (
        {"replicaCount": 2, "podDisruptionBudget": {"minAvailable": "100%"}},
        "minAvailable: 100% of 2 routers lets no node drain",
    ),
    ({"replicaCount": 2, "podDisruptionBudget": {"minAvailable": 3}}, "exceeds the number of routers (2)"),
    ({"replicaCount": 2, "podDisruptionBudget": {"maxUnavailable": 0}}, "maxUnavailable: 0 lets no node drain"),
    ({"config": {"index": {"redis": {"url": "redis://:secret@redis:6379"}}}}, "contains credentials"),
    (merged(REDIS, {"valkey": {"enabled": True}}), "names another Redis"),
    ({"valkey": {"enabled": True}, "redis": {"existingSecret": "a"}}, "the bundled Valkey has valkey.existingSecret"),
    ({"redis": {"existingSecret": "credentials"}}, "config.index.redis.url does not name a Redis"),
    (merged(REDIS, {"redis": {"usernameKey": "user"}}), "redis.existingSecret does not name a Secret"),
    (merged(REDIS, {"redis": {"publisherSecret": "a"}}), "does not name the routers' Secret"),
    (merged(REDIS, {"redis": {"tls": {"caKey": "ca.crt"}}}), "existingSecret does not name the Secret"),
    (merged(REDIS, {"redis": {"tls": {"existingSecret": "a"}}}), "name caKey, certKey or keyKey"),
    (merged(REDIS, {"redis": {"tls": {"existingSecret": "a", "caKey": "b"}}}), "must begin with rediss://"),
    ({"publisher": {"enabled": True}}, "publisher.enabled: needs a shared index"),
    ({"config": {"publish": {"stores": [{"kind": "lmcache", "model": "a"}]}}}, "nothing reads them"),
    ({"config": {"models": [{"name": "a", "tokenizer": "/tokenizers/b"}]}}, "/tokenizers/b of a is not under"),
    ({"engines": {"pools": [{"name": "a"}]}}, "engines.pools: a has no model"),
    ({"engines": {"pools": [{"name": "a", "model": "b/c", "role": "decode"}]}}, "needs a handoff"),
    ({"engines": {"pools": [{"name": "a", "model": "b/c", "handoff": "nixl"}]}}, "config.links.elsewhere: missing"),
    ({"engines": {"pools": [{"name": "a", "model": "b/c", "sidecar": True}]}}, "sidecar of a needs a shared index"),
    ({"ingress": {"enabled": True}}, "name at least one of ingress.hosts"),
    ({"httpRoute": {"enabled": True}}, "name a Gateway in httpRoute.parentRefs"),
    ({"ingress": {"enabled": True, "hosts": ["a.b"]}, "streaming": {"idleTimeoutSeconds": 60}}, "proxies would cut"),
    ({"serviceAccount": {"create": False}, "config": DISCOVERED}, "name the ServiceAccount that may read pods"),
    ({"service": {"nodePort": 30080}}, "needs type NodePort or LoadBalancer"),
]


def lmcache_with_two_publishers() -> dict[str, Any]:
    stores = [{"kind": "lmcache", "model": "a"}]
    publisher = {"enabled": True, "replicaCount": 2}
    return {"valkey": {"enabled": True}, "publisher": publisher, "config": {"publish": {"stores": stores}}}


@pytest.mark.parametrize(("values", "message"), [*WRONG, (lmcache_with_two_publishers(), "to one publisher only")])
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmFailed) as refused:
        minimal(values)
    text = str(refused.value)
    assert message in text
    assert len(text) < 2_000


def test_all_mistakes_are_listed_at_once() -> None:
    with pytest.raises(HelmFailed, match="3 mistakes in the values") as refused:
        minimal({"preStopSeconds": 30, "publisher": {"enabled": True}, "ingress": {"enabled": True}})
    assert str(refused.value).count("\n- ") == 3


def test_the_defaults_name_what_is_missing() -> None:
    with pytest.raises(HelmFailed, match=r"config\.discovery\.kubernetes\.selector=app=vllm"):
        render()


def test_the_minimal_values_are_accepted() -> None:
    assert render(MINIMAL).one("Deployment")
