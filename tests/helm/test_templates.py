"""What the templates decide: which objects exist, and what values change in them."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.helm.charts import CHART, MINIMAL, HelmFailed, Object, Rendered, example, helm, merged, minimal
from tests.helm.kubernetes_schemas import mistakes

SELECTOR = {"selector": "app=vllm"}


def discovering(*sources: dict[str, Any], **values: Any) -> Rendered:
    return minimal({"config": {"discovery": {"kubernetes": list(sources)}}, **values})


def router(rendered: Rendered) -> Object:
    """The router's pod template."""
    template = rendered.one("Deployment", "router")["spec"]["template"]
    assert isinstance(template, dict)
    return template


# --- the number of routers ---


SHARED = {"config": {"index": {"redis": {"url": "redis://redis:6379/0"}}}}


@pytest.mark.parametrize(
    ("values", "routers"),
    [({}, 1), (SHARED, 2), ({"valkey": {"enabled": True}}, 2), ({"replicaCount": 3}, 3), ({"replicaCount": 0}, 0)],
)
def test_without_a_number_there_is_one_router_and_with_a_shared_index_two(values: dict[str, Any], routers: int) -> None:
    """Two routers without a shared index know half of the requests in flight, and grant each quota twice."""
    assert minimal(values).one("Deployment", "router")["spec"]["replicas"] == routers


def test_one_router_has_no_disruption_budget() -> None:
    """It would either never let the node drain, or change nothing."""
    assert minimal({"replicaCount": 2}).all("PodDisruptionBudget")
    assert not minimal().all("PodDisruptionBudget")
    assert not minimal({"replicaCount": 2, "podDisruptionBudget": {"enabled": False}}).all("PodDisruptionBudget")


def test_autoscaling_counts_its_least_routers_for_the_budget() -> None:
    one = {"minReplicas": 1, "hpa": {"enabled": True}}
    assert not minimal({"autoscaling": one}).all("PodDisruptionBudget")


@pytest.mark.parametrize("scaler", ["hpa", "keda"])
def test_an_autoscaler_alone_sets_the_number_of_routers(scaler: str) -> None:
    assert minimal().one("Deployment")["spec"]["replicas"] == 1
    scaled = minimal({"autoscaling": {scaler: {"enabled": True}}})
    assert "replicas" not in scaled.one("Deployment")["spec"]
    assert len(scaled.all("HorizontalPodAutoscaler")) + len(scaled.all("ScaledObject")) == 1


def test_a_gap_of_metrics_never_scales_down() -> None:
    spec = example("prefill-decode").one("ScaledObject")["spec"]
    assert spec["fallback"]["replicas"] >= spec["minReplicaCount"] >= 1
    assert {trigger["metadata"]["ignoreNullValues"] for trigger in spec["triggers"]} == {"false"}


def test_scaling_down_one_router_at_a_time() -> None:
    scaler = minimal({"autoscaling": {"hpa": {"enabled": True}}}).one("HorizontalPodAutoscaler")
    assert scaler["spec"]["behavior"]["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]


# --- stopping ---


def test_a_longer_drain_needs_a_longer_grace() -> None:
    limits = {"config": {"limits": {"drain_timeout_s": 1200}}}
    with pytest.raises(HelmFailed, match="need at least 1215"):
        minimal({**limits, "terminationGracePeriodSeconds": 1214})
    accepted = minimal({**limits, "terminationGracePeriodSeconds": 1215})
    assert router(accepted)["spec"]["terminationGracePeriodSeconds"] == 1215


def test_a_rolling_update_never_serves_with_fewer_routers() -> None:
    strategy = minimal().one("Deployment")["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


# --- what restarts routers ---


def test_a_changed_policy_does_not_restart_routers() -> None:
    policies = {"nightly": {"name": "nightly", "about": "x", "extends": "batch"}}
    changed = minimal({"policies": policies})
    assert router(changed) == router(minimal())
    [text] = changed.one("ConfigMap", suffix="-policies")["data"].values()
    assert YAML(typ="safe").load(text) == policies["nightly"]


def test_changed_names_do_not() -> None:
    """The file is read again; the first names restart them, because the configuration names the file then."""
    entries = [{"name": "gpt-4o", "to": "m"}, {"name": "m", "to": {"m": 95, "next": 5}, "fallbacks": ["o"]}]
    before, after = minimal({"names": entries[:1]}), minimal({"names": entries})
    assert router(before) == router(after)
    assert YAML(typ="safe").load(after.one("ConfigMap", suffix="-names")["data"]["names.yaml"]) == {"names": entries}
    [mount] = [one for one in router(after)["spec"]["containers"][0]["volumeMounts"] if one["name"] == "names"]
    assert after.router_config["names"] == f"{mount['mountPath']}/names.yaml"


def test_a_changed_configuration_does() -> None:
    changed = minimal({"config": {"limits": {"retries": 1}}})
    assert router(changed)["metadata"]["annotations"] != router(minimal())["metadata"]["annotations"]


@pytest.mark.parametrize(
    ("host", "port"), [("0.0.0.0", "admin"), ("::", "admin"), ("127.0.0.1", "http"), ("localhost", "http")]
)
def test_probes_use_the_admin_port_where_the_kubelet_reaches_it(host: str, port: str) -> None:
    """Clients that take all connections of the public port do not restart the router."""
    [container] = router(minimal({"config": {"admin": {"host": host}}}))["spec"]["containers"]
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")]
    assert probes == [{"path": path, "port": port} for path in ("/livez", "/livez", "/readyz")]


def test_a_router_has_ten_minutes_to_load_its_tokenizers() -> None:
    """Nothing answers before, and neither of the other probes begins."""
    [container] = router(minimal())["spec"]["containers"]
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 600


def test_large_numbers_stay_whole() -> None:
    config = minimal({"config": {"limits": {"max_held_bytes": 17179869184, "retry_budget": 0.1}}}).router_yaml
    assert "max_held_bytes: 17179869184\n" in config
    assert "retry_budget: 0.1\n" in config


# --- permissions ---


def rules(rendered: Rendered, kind: str) -> dict[str, list[tuple[str, str]]]:
    """Resource and verb by namespace, or by "*"."""
    return {
        role["metadata"].get("namespace", "*"): [
            (resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]
        ]
        for role in rendered.all(kind)
    }


def test_without_discovery_there_is_no_permission() -> None:
    rendered = minimal()
    assert not rendered.all("Role")
    assert not rendered.all("ClusterRole")


def test_a_selector_needs_pods_of_the_release_namespace_and_nodes_for_zones() -> None:
    rendered = discovering(SELECTOR)
    assert rules(rendered, "Role") == {"llm": [("pods", "list"), ("pods", "watch")]}
    assert rules(rendered, "ClusterRole") == {"*": [("nodes", "get")]}


def test_no_cluster_role_without_node_labels() -> None:
    assert not discovering({**SELECTOR, "node_labels": False}).all("ClusterRole")


def test_each_namespace_has_its_role_bound_to_the_router() -> None:
    rendered = discovering({**SELECTOR, "namespaces": ["a", "b"]}, serviceAccount={"create": False, "name": "mine"})
    assert set(rules(rendered, "Role")) == {"a", "b"}
    assert not rendered.all("ServiceAccount")
    for binding in rendered.all("RoleBinding"):
        assert binding["roleRef"]["name"] == binding["metadata"]["name"] == "r-warmroute"
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "mine", "namespace": "llm"}]


def test_all_namespaces_need_a_cluster_role() -> None:
    rendered = discovering({**SELECTOR, "namespaces": ["*"]})
    assert not rendered.all("Role")
    assert ("pods", "watch") in rules(rendered, "ClusterRole")["*"]


def test_another_cluster_needs_no_permission_in_this_one() -> None:
    assert not discovering({**SELECTOR, "api": {"url": "https://elsewhere:6443"}}).all("Role")


def test_permissions_can_be_left_to_others() -> None:
    assert not discovering(SELECTOR, rbac={"create": False}).all("Role")


# --- images and secrets ---


def test_a_digest_replaces_the_tag() -> None:
    digest = "sha256:" + "0" * 64
    image = {"repository": "registry.example.com:5000/warmroute", "tag": "2", "digest": digest}
    [container] = router(minimal({"image": image}))["spec"]["containers"]
    assert container["image"] == f"registry.example.com:5000/warmroute@{digest}"


def test_the_admin_token_is_random_unless_a_secret_is_named() -> None:
    first, second = (minimal().one("Secret")["data"]["token"] for _ in range(2))
    assert first != second
    assert len(base64.b64decode(first)) == 40
    named = minimal({"admin": {"existingSecret": "mine", "existingSecretKey": "admin-token"}})
    assert not named.all("Secret")
    [volume] = [one for one in router(named)["spec"]["volumes"] if one["name"] == "admin"]
    assert volume["secret"] == {"secretName": "mine", "items": [{"key": "admin-token", "path": "token"}]}


def test_the_file_of_tenants_is_mounted_from_its_secret() -> None:
    """As a folder, so that Kubernetes updates it."""
    rendered = minimal({"tenants": {"existingSecret": "mine", "existingSecretKey": "who.yaml"}})
    assert rendered.router_config["tenants"] == "/run/secrets/warmroute/tenants/who.yaml"
    spec = router(rendered)["spec"]
    assert {"name": "tenants", "secret": {"secretName": "mine"}} in spec["volumes"]
    mount = {"name": "tenants", "mountPath": "/run/secrets/warmroute/tenants", "readOnly": True}
    assert mount in spec["containers"][0]["volumeMounts"]
    assert "tenants" not in minimal().router_config


def test_prometheus_gets_the_admin_token() -> None:
    [endpoint] = example("single-model").one("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "r-warmroute-admin", "key": "token"}


def test_the_admin_port_is_not_on_the_service_of_clients() -> None:
    rendered = minimal({"service": {"type": "LoadBalancer"}})
    services = {one["metadata"]["name"]: one["spec"] for one in rendered.all("Service")}
    assert [port["name"] for port in services["r-warmroute"]["ports"]] == ["http"]
    assert services["r-warmroute-admin"]["type"] == "ClusterIP"


def test_redis_credentials_are_files() -> None:
    redis = example("mooncake-store").router_config["index"]["redis"]
    assert redis == {
        "url": "rediss://redis.data.svc:6380/0",
        "username_file": "/run/secrets/warmroute/redis/username",
        "password_file": "/run/secrets/warmroute/redis/password",
        "tls": {"ca_file": "/run/secrets/warmroute/redis-tls/ca"},
    }


def test_publishers_have_a_redis_user_of_their_own() -> None:
    """Under the same path, so that one configuration serves both."""
    rendered = example("mooncake-store")
    secrets = {
        one["metadata"]["name"]: volume["secret"]["secretName"]
        for one in rendered.all("Deployment")
        for volume in one["spec"]["template"]["spec"]["volumes"]
        if volume["name"] == "redis"
    }
    assert secrets == {"r-warmroute": "warmroute-redis", "r-warmroute-publisher": "warmroute-publisher-redis"}


def test_valkey_keeps_nothing_and_evicts_nothing() -> None:
    [container] = example("lmcache").one("StatefulSet")["spec"]["template"]["spec"]["containers"]
    [command] = container["args"]
    assert '--save "" --appendonly no' in command
    assert "--maxmemory-policy noeviction" in command


# --- streams through proxies ---


@pytest.mark.parametrize(
    ("controller", "annotation", "value"),
    [
        ("nginx", "nginx.ingress.kubernetes.io/proxy-read-timeout", "3600"),
        ("nginx", "nginx.ingress.kubernetes.io/proxy-buffering", "off"),
        ("nginx", "nginx.ingress.kubernetes.io/proxy-body-size", "33554432"),
        ("alb", "alb.ingress.kubernetes.io/load-balancer-attributes", "idle_timeout.timeout_seconds=3600"),
        ("haproxy", "haproxy.org/timeout-server", "3600s"),
        ("openshift", "haproxy.router.openshift.io/timeout", "3600s"),
    ],
)
def test_ingresses_neither_cut_nor_buffer_streams(controller: str, annotation: str, value: str) -> None:
    ingress = {"enabled": True, "controller": controller, "hosts": ["llm.example.com"]}
    assert minimal({"ingress": ingress}).one("Ingress")["metadata"]["annotations"][annotation] == value


def test_own_annotations_win() -> None:
    key = "nginx.ingress.kubernetes.io/proxy-read-timeout"
    ingress = {"enabled": True, "hosts": ["llm.example.com"], "annotations": {key: "60"}}
    assert minimal({"ingress": ingress}).one("Ingress")["metadata"]["annotations"][key] == "60"


def test_google_load_balancers_get_a_timeout() -> None:
    rendered = minimal({"ingress": {"enabled": True, "controller": "gce", "hosts": ["llm.example.com"]}})
    backend = rendered.one("BackendConfig")
    assert backend["spec"]["timeoutSec"] == 3600
    annotations = rendered.one("Service", suffix="warmroute")["metadata"]["annotations"]
    assert YAML(typ="safe").load(annotations["cloud.google.com/backend-config"]) == {
        "default": backend["metadata"]["name"]
    }


def test_routes_have_no_time_limit() -> None:
    [rule] = example("multi-zone").one("HTTPRoute")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}


# --- network policies ---


def ports(rules: list[Object]) -> set[int]:
    return {port["port"] for rule in rules for port in rule["ports"]}


def test_network_policies_open_what_the_router_uses() -> None:
    policy = example("mooncake-store").one("NetworkPolicy", "router")["spec"]
    assert ports(policy["ingress"]) == {8080, 9480}
    assert ports(policy["egress"]) == {53, 8000, 5557, 5558, 443, 6443, 6380}
    publisher = example("mooncake-store").one("NetworkPolicy", "publisher")["spec"]
    assert ports(publisher["egress"]) == {53, 8000, 5557, 5558, 443, 6443, 6380, 9003}


def test_the_admin_port_is_open_to_monitoring_only() -> None:
    policy = minimal({"networkPolicy": {"enabled": True}}).one("NetworkPolicy")["spec"]
    [rule] = [one for one in policy["ingress"] if ports([one]) == {9480}]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def test_helm_test_may_chat_where_only_some_clients_may() -> None:
    rendered = minimal({"networkPolicy": {"enabled": True, "clients": [{"podSelector": {"matchLabels": {"a": "b"}}}]}})
    [rule] = [one for one in rendered.one("NetworkPolicy")["spec"]["ingress"] if ports([one]) == {8080}]
    tester, client = (peer["podSelector"]["matchLabels"] for peer in rule["from"])
    assert client == {"a": "b"}
    assert tester.items() <= rendered.one("Pod")["metadata"]["labels"].items()


def test_without_discovery_the_api_server_is_closed() -> None:
    policy = minimal({"networkPolicy": {"enabled": True}}).one("NetworkPolicy")["spec"]
    assert ports(policy["egress"]) == {53, 8000, 5557, 5558}


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [(None, 4318), ("http://collector:14318", 14318), ("https://otlp.example.com/otlp", 443), ("http://[fd00::1]", 80)],
)
def test_traces_may_leave_for_their_collector(endpoint: str | None, port: int) -> None:
    """Only if tracing is on."""
    tracing = {"enabled": True, **({"endpoint": endpoint} if endpoint else {})}
    policy = minimal({"networkPolicy": {"enabled": True}, "config": {"tracing": tracing}}).one("NetworkPolicy")
    assert ports(policy["spec"]["egress"]) == {53, 8000, 5557, 5558, port}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://a", {6379}),
        ("rediss://a:7000/2", {7000}),
        ("redis://a:7000,b:7001,c:7000/0", {7000, 7001}),
        ("redis://a,b:7001", {6379, 7001}),
    ],
)
def test_every_port_of_redis_is_open(url: str, expected: set[int]) -> None:
    rendered = minimal({"networkPolicy": {"enabled": True}, "config": {"index": {"redis": {"url": url}}}})
    rule = rendered.one("NetworkPolicy")["spec"]["egress"][-1]
    assert ports([rule]) == expected


# --- engines ---


def test_pools_say_what_their_pods_do() -> None:
    for role in ("prefill", "decode"):
        pod = example("prefill-decode").one("Deployment", "engine", f"-{role}")["spec"]["template"]
        notes = pod["metadata"]["annotations"]
        assert notes == {"warmroute.dev/role": role, "warmroute.dev/handoff": "nixl", "warmroute.dev/engine": "vllm"}


def test_the_chart_finds_its_own_engines() -> None:
    rendered = example("kind")
    [source] = rendered.router_config["discovery"]["kubernetes"]
    wanted = dict(part.split("=") for part in source["selector"].split(","))
    labels = rendered.one("Deployment", "engine")["spec"]["template"]["metadata"]["labels"]
    assert wanted.items() <= labels.items()


def test_a_sidecar_publishes_its_own_pod() -> None:
    rendered = example("lmcache")
    pod = rendered.one("Deployment", "engine")["spec"]["template"]["spec"]
    [sidecar] = [one for one in pod["initContainers"] if one["name"] == "publisher"]
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["args"][-2:] == ["--pod=http://127.0.0.1:8000", "--advertise=http://$(POD_IP):8000"]
    own = YAML(typ="safe").load(rendered.one("ConfigMap", suffix="r-warmroute")["data"]["sidecar.yaml"])
    assert not {"admin", "discovery", "pods"} & own.keys()
    assert own["index"] == rendered.router_config["index"]


# --- what is added ---


def test_commands_in_a_router_s_container_need_no_options() -> None:
    """They find the admin port and its token in the environment."""
    rendered = minimal({"config": {"admin": {"port": 9999}}})
    env = {one["name"]: one["value"] for one in router(rendered)["spec"]["containers"][0]["env"]}
    assert env["WARMROUTE_ADMIN_URL"] == "http://127.0.0.1:9999"
    assert env["WARMROUTE_ADMIN_TOKEN_FILE"] == rendered.router_config["admin"]["bearer_file"]


def test_everything_can_be_extended() -> None:
    rendered = minimal(
        {
            "extraArgs": ["--log-level=debug"],
            "extraEnv": [{"name": "A", "value": "1"}],
            "extraEnvFrom": [{"secretRef": {"name": "b"}}],
            "extraVolumes": [{"name": "c", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "c", "mountPath": "/c"}],
            "extraContainers": [{"name": "d", "image": "d"}],
            "extraInitContainers": [{"name": "e", "image": "e"}],
            "extraObjects": [
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-f"}},
                "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: g}",
            ],
            "podLabels": {"h": "i"},
            "commonLabels": {"j": "k"},
        }
    )
    template = router(rendered)
    first, second = template["spec"]["containers"]
    assert first["args"][-1] == "--log-level=debug"
    assert (first["env"][-1], first["envFrom"]) == ({"name": "A", "value": "1"}, [{"secretRef": {"name": "b"}}])
    assert first["volumeMounts"][-1] == {"name": "c", "mountPath": "/c"}
    assert (second["name"], template["spec"]["initContainers"][0]["name"]) == ("d", "e")
    assert {"h": "i", "j": "k"}.items() <= template["metadata"]["labels"].items()
    assert {"r-f", "g"} <= {one["metadata"]["name"] for one in rendered.all("ConfigMap")}
    assert all("h" not in one["spec"]["selector"] for one in rendered.all("Service"))


# --- examples that are not values ---


def test_the_sidecar_to_copy_is_the_sidecar_of_the_chart() -> None:
    patch = YAML(typ="safe").load((CHART / "examples" / "sidecar" / "patch.yaml").read_text(encoding="utf-8"))
    [copied] = patch["spec"]["template"]["spec"]["initContainers"]
    own = example("lmcache").one("Deployment", "engine")["spec"]["template"]["spec"]["initContainers"][-1]
    different = {"image", "imagePullPolicy", "volumeMounts"}
    assert {key: copied[key] for key in copied.keys() - different} == {key: own[key] for key in own.keys() - different}


def test_the_mutating_policy_is_valid() -> None:
    text = (CHART / "examples" / "sidecar" / "mutating-policy.yaml").read_text(encoding="utf-8")
    assert not [mistake for one in YAML(typ="safe").load_all(text) for mistake in mistakes("1.37", one)]


# --- memory ---


def memory(values: dict[str, Any]) -> str:
    [found] = [one for one in router(minimal(values))["spec"]["containers"] if one["name"] == "router"]
    limit = found["resources"]["limits"]["memory"]
    assert isinstance(limit, str)
    return limit


def test_the_memory_limit_follows_from_models_bodies_and_replica() -> None:
    """Unless the values name one."""
    models = [{"name": f"m{number}", "tokenizer": f"/models/{number}"} for number in range(10)]
    redis = {"index": {"redis": {"url": "redis://redis:6379/0", "max_replica_bytes": 256 * 2**20}}}
    assert memory({}) == "2048Mi"
    assert memory({"config": {"models": models}}) == f"{512 + 1024 + 10 * 228}Mi"
    assert memory({"config": {"models": models, **redis}}) == f"{512 + 1024 + 10 * 228 + 256}Mi"
    assert memory({"resources": {"limits": {"memory": "4Gi"}}, "config": {"models": models}}) == "4Gi"


# --- notes ---


def notes(**values: Any) -> str:
    chart = ("install", "r", CHART, "--dry-run=client", "--namespace", "n")
    return helm(*chart, values=merged(MINIMAL, values)).partition("NOTES:")[2]


def test_notes_say_what_routers_without_a_shared_index_do_not_share() -> None:
    assert "Several routers run without config.index.redis" in notes(replicaCount=2)
    assert "grants every tenant its whole quota" in notes(replicaCount=2, tenants={"existingSecret": "t"})
    assert "Several routers" not in notes()
    assert "Several routers" not in notes(valkey={"enabled": True})


NOTES_AS_OBJECT = """{{ define "notes" }}%s{{ end }}
apiVersion: v1
kind: ConfigMap
metadata: {name: notes}
data: {notes: {{ include "notes" . | toJson }}}
"""


def test_an_upgrade_that_leaves_one_of_two_routers_says_so(tmp_path: Path) -> None:
    """`helm template` knows upgrades and prints no notes, so here they are an object."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    text = (CHART / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "notes.yaml").write_text(NOTES_AS_OBJECT % text)

    def upgraded(**values: Any) -> str:
        asked = ("template", "r", chart, "--is-upgrade", "--show-only", "templates/notes.yaml")
        return helm(*asked, values=merged(MINIMAL, values))

    assert "`replicaCount: 2` keeps the second" in upgraded()
    assert "keeps the second" not in upgraded(replicaCount=1)
    assert "keeps the second" not in upgraded(valkey={"enabled": True})
    assert "keeps the second" not in notes()


def test_notes_name_the_flags_of_engines_that_the_chart_does_not_run() -> None:
    found = notes(config={"discovery": {"kubernetes": [SELECTOR]}})
    flags = ("--kv-events-config", "--enable-prompt-tokens-details")
    assert all(flag in found for flag in flags)


def test_notes_name_the_key_that_the_chat_of_tenants_needs() -> None:
    assert "test.apiKeySecret.name" in notes(tenants={"existingSecret": "t"})
    assert "test.apiKeySecret" not in notes(tenants={"existingSecret": "t"}, test={"apiKeySecret": {"name": "k"}})
