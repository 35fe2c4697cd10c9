"""The chart as endpoint picker of a gateway: what it renders in place of a proxy, and which values it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.charts import CHART, HelmFailed, Rendered, helm, merged, render

PICKER = {"picker": {"enabled": True, "inferencePool": {"matchLabels": {"app": "vllm"}, "targetPorts": [8000, 8001]}}}


def rendered(**values: Any) -> Rendered:
    return render(merged(PICKER, values))


def test_the_pool_names_the_service_that_leads_to_pickers() -> None:
    found = rendered()
    pool, service = found.one("InferencePool"), found.one("Service", suffix="r-warmroute")
    [port] = service["spec"]["ports"]
    reference = pool["spec"]["endpointPickerRef"]
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert pool["spec"]["selector"] == {"matchLabels": {"app": "vllm"}}
    assert pool["spec"]["targetPorts"] == [{"number": 8000}, {"number": 8001}]
    assert reference == {"name": service["metadata"]["name"], "port": {"number": 9002}, "failureMode": "FailOpen"}
    assert port == {"name": "grpc", "port": 9002, "targetPort": "grpc", "appProtocol": "http2"}


def test_routers_run_the_picker_and_follow_the_pool() -> None:
    found = rendered()
    [router] = found.one("Deployment", "router")["spec"]["template"]["spec"]["containers"]
    config = found.router_config
    assert router["args"][0] == "picker" and router["ports"][0] == {"name": "grpc", "containerPort": 9002}
    assert config["picker"] == {"host": "0.0.0.0", "port": 9002}
    assert config["discovery"]["kubernetes"] == [{"inference_pool": found.one("InferencePool")["metadata"]["name"]}]


@pytest.mark.parametrize("admission", [None, {}])
def test_a_picker_may_read_pools_and_pods_of_its_namespace(admission: dict[str, Any] | None) -> None:
    """And, for the order in its queue, objectives."""
    found = rendered(config={"admission": admission})
    [role] = [one for one in found.all("Role") if one["metadata"]["namespace"] == "llm"]
    allowed = [(rule["resources"], rule["verbs"]) for rule in role["rules"]]
    objectives = [] if admission is None else [(["inferenceobjectives"], ["list"])]
    assert allowed == [(["pods"], ["list", "watch"]), (["inferencepools"], ["get"]), *objectives]


def test_an_own_pool_is_not_created() -> None:
    found = render({"picker": {"enabled": True, "inferencePool": {"create": False, "name": "mine"}}})
    assert not found.all("InferencePool")
    assert found.router_config["discovery"]["kubernetes"] == [{"inference_pool": "mine"}]


def test_the_engines_of_the_chart_are_the_pool_by_default() -> None:
    pools = [{"name": "chat", "model": "Qwen/Qwen3-0.6B"}]
    found = render({"picker": {"enabled": True}, "engines": {"pools": pools}})
    labels = found.one("InferencePool")["spec"]["selector"]["matchLabels"]
    [engine] = found.all("Deployment", "engine")
    assert labels.items() <= engine["spec"]["template"]["metadata"]["labels"].items()
    assert len(found.router_config["discovery"]["kubernetes"]) == 1, "each pod is found once"


def test_a_route_leads_to_the_pool() -> None:
    found = rendered(httpRoute={"enabled": True, "parentRefs": [{"name": "gateway"}]})
    [backend] = found.one("HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    pool = found.one("InferencePool")["metadata"]["name"]
    assert backend == {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool}


def test_only_the_port_for_gateways_is_open_to_clients() -> None:
    policy = rendered(networkPolicy={"enabled": True}).one("NetworkPolicy", "router")
    open_ports = [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
    assert 9002 in open_ports and 8080 not in open_ports


@pytest.mark.parametrize(
    ("pool", "mistake"),
    [
        ({}, r"picker\.inferencePool\.matchLabels"),
        ({"matchLabels": {"app": "vllm"}, "targetPorts": []}, "targetPorts"),
        ({"matchLabels": {"app": "vllm"}, "failureMode": "Open"}, "failureMode"),
    ],
)
def test_what_no_gateway_could_use_is_refused(pool: dict[str, Any], mistake: str) -> None:
    with pytest.raises(HelmFailed, match=mistake):
        render({"picker": {"enabled": True, "inferencePool": pool}})


def test_an_ingress_of_a_picker_is_refused() -> None:
    with pytest.raises(HelmFailed, match=r"ingress\.enabled: a picker gets no requests"):
        rendered(ingress={"enabled": True, "hosts": ["a.example.com"]})


def test_notes_say_how_to_see_that_the_gateway_asks() -> None:
    values = merged(PICKER, {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]}})
    notes = helm("install", "r", CHART, "--dry-run=client", "--namespace", "n", values=values).partition("NOTES:")[2]
    assert "inferencepool/r-warmroute" in notes and "x-warmroute-pod" in notes and "helm test" not in notes


def test_on_gke_the_policies_are_those_of_the_pool() -> None:
    """A policy of the Service would leave the pool at 30 s, and GET / as its health check."""
    found = rendered(httpRoute={"enabled": True, "parentRefs": [{"name": "gke"}], "gcpBackendPolicy": True})
    pool = {"group": "inference.networking.k8s.io", "kind": "InferencePool"}
    pool["name"] = found.one("InferencePool")["metadata"]["name"]
    policy, health = found.one("GCPBackendPolicy")["spec"], found.one("HealthCheckPolicy")["spec"]
    assert policy["targetRef"] == health["targetRef"] == pool
    assert policy["default"]["timeoutSec"] > 300
    assert health["default"]["config"]["httpHealthCheck"] == {"requestPath": "/health", "port": 8000}
