"""The examples that scale engines use metrics that exist, and never scale down by what is not known."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ruamel.yaml import YAML

from helm.monitoring.metric_catalog import DECLARED
from router.feeds.discovery.kube_api import KubePod
from router.feeds.discovery.pod_facts import unknown_annotations
from router.fleet.scaling import Arrivals
from tests.helm.charts import CHART, EXAMPLES, example, minimal
from tests.helm.kubernetes_schemas import mistakes
from tests.helm.prometheus_tool import needs_promtool, promtool
from tests.kit.scenes import make_pod

FOLDER = CHART / "examples" / "engine-scaling"
RELEASE = "llm"


def document(name: str) -> Any:
    return YAML(typ="safe").load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def of_keda() -> str:
    [trigger] = document("keda")["spec"]["triggers"]
    return str(trigger["metadata"]["query"])


def of_adapter() -> str:
    """Its template, filled in as for the HPA."""
    [rule] = document("prometheus-adapter")["rules"]["external"]
    matchers = 'namespace="llm",pool="decode"'
    return str(rule["metricsQuery"]).replace("<<.Series>>", rule["seriesQuery"]).replace("<<.LabelMatchers>>", matchers)


QUERIES = {"keda": of_keda(), "adapter": of_adapter()}


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_every_metric_and_label_exists(query: str) -> None:
    used = re.findall(r"(warmroute_\w+)\{([^}]*)\}", query)
    assert {name for name, _ in used} == {"warmroute_pool_desired_replicas", "warmroute_pool_ready_replicas"}
    for name, matchers in used:
        assert set(re.findall(r"(\w+)=", matchers)) <= {*DECLARED[name].labels, "namespace"}
    assert "resource" in DECLARED["warmroute_pool_desired_replicas"].labels


def test_both_autoscalers_ask_the_same() -> None:
    """Only the namespace of `up`, which the adapter does not know, differs."""
    keda, adapter = (" ".join(query.split()).replace("( ", "(") for query in (of_keda(), of_adapter()))
    assert keda.replace('up{namespace="llm",', "up{") == adapter


def test_what_is_not_known_never_scales_to_zero() -> None:
    spec = document("keda")["spec"]
    [trigger] = spec["triggers"]
    assert spec["minReplicaCount"] >= 1
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert spec["fallback"]["replicas"] >= spec["minReplicaCount"]
    assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"
    assert document("hpa")["spec"]["minReplicas"] >= 1


def test_the_metric_is_a_number_of_replicas() -> None:
    """One replica for each."""
    [trigger] = document("keda")["spec"]["triggers"]
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    [metric] = document("hpa")["spec"]["metrics"]
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    [rule] = document("prometheus-adapter")["rules"]["external"]
    assert metric["external"]["metric"]["name"] == rule["seriesQuery"]


def test_the_autoscalers_are_valid_and_scale_a_pool_of_the_chart() -> None:
    assert not mistakes("1.31", document("hpa"))
    pools = {
        one["metadata"]["name"].removeprefix("r-") for one in example("prefill-decode").all("Deployment", "engine")
    }
    for name in ("keda", "hpa"):
        spec = document(name)["spec"]
        assert spec["scaleTargetRef"]["name"].removeprefix(f"{RELEASE}-") in pools
        assert spec["scaleTargetRef"]["name"].endswith("-decode")


def test_the_chart_leaves_the_replicas_of_a_scaled_pool_alone() -> None:
    """Otherwise `helm upgrade` would undo what the autoscaler did."""
    pool = {"name": "decode", "model": "m", "replicas": 3}
    for values, expected in (({}, 3), ({"autoscaled": True}, None)):
        [engine] = minimal({"engines": {"pools": [pool | values]}}).all("Deployment", "engine")
        assert engine["spec"].get("replicas") == expected


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_router_reads_the_pool_of_the_chart(name: str) -> None:
    """From a label with our prefix, which it would report otherwise."""
    for engine in example(name).all("Deployment", "engine"):
        meta = engine["spec"]["template"]["metadata"]
        labels = meta["labels"] | meta["annotations"]
        assert engine["metadata"]["name"].endswith(labels["warmroute.dev/pool"])
        assert unknown_annotations(KubePod(key=("ns", "a"), uid="u", labels=labels)) == []


# --- evaluated by Prometheus itself ---

ROUTERS = ("one", "two")
DESIRED = {"one": {"prefill": 1.5, "kv_cache": 2.0}, "two": {"prefill": 2.5, "kv_cache": 0.5}}
TOGETHER = 4.0
"""The sum of the scarcest resource: prefill."""


def series(ready: int, up: dict[str, int], desired: dict[str, dict[str, float]]) -> list[dict[str, str]]:
    """Series of two routers, and of one of another namespace and pool."""
    own = 'namespace="llm",container="router"'
    found = {f'up{{{own},pod="{router}"}}': value for router, value in up.items()} | {
        f'warmroute_pool_desired_replicas{{{own},pod="{router}",pool="decode",resource="{resource}"}}': value
        for router, needs in desired.items()
        for resource, value in needs.items()
    }
    found |= {f'warmroute_pool_ready_replicas{{{own},pod="{router}",pool="decode"}}': ready for router in desired}
    found |= {
        'up{namespace="other",container="router",pod="one"}': 0,
        'warmroute_pool_desired_replicas{namespace="llm",pod="one",pool="prefill",resource="prefill"}': 99,
        'warmroute_pool_desired_replicas{namespace="other",pod="one",pool="decode",resource="prefill"}': 99,
        'warmroute_pool_ready_replicas{namespace="other",pod="one",pool="decode"}': 1,
    }
    return [{"series": name, "values": str(value)} for name, value in found.items()]


UP = dict.fromkeys(ROUTERS, 1)
ONE_UP = {"one": 1, "two": 0}
FIRST = {"one": DESIRED["one"]}


@needs_promtool
@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
@pytest.mark.parametrize(
    ("ready", "up", "desired", "expected"),
    [
        pytest.param(2, UP, DESIRED, TOGETHER, id="scale up"),
        pytest.param(9, UP, DESIRED, TOGETHER, id="scale down"),
        pytest.param(3, ONE_UP, FIRST, None, id="a router is not scraped: do not scale down"),
        pytest.param(1, ONE_UP, FIRST, 2.0, id="a router is not scraped: scale up"),
        pytest.param(2, {}, {}, None, id="no router is scraped"),
        pytest.param(2, UP, {}, None, id="no router knows its pods' loads"),
        pytest.param(2, UP, {"one": {"prefill": 0.0, "kv_cache": 0.0}}, 0.0, id="idle"),
    ],
)
def test_prometheus_computes_what_the_autoscaler_should_do(
    query: str,
    ready: int,
    up: dict[str, int],
    desired: dict[str, dict[str, float]],
    expected: float | None,
    tmp_path: Path,
) -> None:
    """By Prometheus's own tool."""
    labels = 'result{namespace="llm"}'
    found = [] if expected is None else [{"labels": labels, "value": expected}]
    rules = {"groups": [{"name": "g", "rules": [{"record": "result", "expr": query}]}]}
    case = {
        "input_series": series(ready, up, desired),
        "interval": "15s",
        "promql_expr_test": [{"expr": 'result{namespace="llm"}', "eval_time": "0s", "exp_samples": found}],
    }
    for name, content in {"rules": rules, "test": {"rule_files": ["rules.yaml"], "tests": [case]}}.items():
        with (tmp_path / f"{name}.yaml").open("w", encoding="utf-8") as file:
            YAML(typ="safe").dump(content, file)
    promtool("test", "rules", str(tmp_path / "test.yaml"))


# --- the chart's own ScaledObjects, from and to zero ---

SCALED = {"target": {"name": "vllm"}, "models": ["qwen2.5-7b", "lora"], "pool": "chat", "maxReplicas": 8}


def scaler(**values: object) -> Any:
    """The spec of its only ScaledObject."""
    limits = {"config": {"limits": {"hold_s": 300}}}
    return minimal(limits | {"engineScaling": [SCALED | values]}).one("ScaledObject")["spec"]


def query_of(spec: Any, number: int) -> str:
    return str(spec["triggers"][number]["metadata"]["query"])


def test_the_chart_scales_what_it_is_told_to() -> None:
    spec = scaler(target={"name": "qwen", "kind": "LeaderWorkerSet", "apiVersion": "leaderworkerset.x-k8s.io/v1"})
    assert spec["scaleTargetRef"] == {
        "name": "qwen",
        "kind": "LeaderWorkerSet",
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
    }
    assert (spec["minReplicaCount"], spec["maxReplicaCount"], len(spec["triggers"])) == (1, 8, 1)
    assert spec["fallback"] == {"failureThreshold": 3, "replicas": 1, "behavior": "currentReplicasIfHigher"}
    assert scaler(minReplicas=2)["fallback"]["replicas"] == 2


def test_the_example_scales_a_pool_of_the_chart() -> None:
    """Its name is that of release `llm`; the tests render release `r`."""
    [spec] = [one["spec"] for one in example("from-zero").all("ScaledObject")]
    [engine] = example("from-zero").all("Deployment", "engine")
    assert spec["scaleTargetRef"]["name"].removeprefix("llm-") == engine["metadata"]["name"].removeprefix("r-")
    assert (spec["minReplicaCount"], spec["cooldownPeriod"], "replicas" in engine["spec"]) == (0, 900, False)


def test_a_rate_that_never_ends_keeps_no_pod() -> None:
    """The mean rate of arrivals falls by e in a minute. Without requests it is below the threshold within ten."""
    [threshold, _] = [float(one["metadata"]["activationThreshold"]) for one in scaler(minReplicas=0)["triggers"]]
    pods, utilization = [make_pod("p", models=("m",))], 0.6
    busy = Arrivals(0.0, 3600.0, {"p": 0.0}).advanced({"p": 3_600_000.0}, pods, 3600.0)
    [rate] = busy.advanced({"p": 3_600_000.0}, pods, 4200.0).rates.values()
    assert 0 < rate / utilization < threshold


class Case(NamedTuple):
    """What is scraped, and what the two triggers of a pool that may be at zero ask for. `ready`: None without a pod."""

    up: dict[str, int]
    ready: int | None
    desired: dict[str, dict[str, float]]
    waiting: dict[str, int]
    expected: tuple[float | None, float | None]


CASES = {
    "idle at zero": Case(UP, None, {}, {"one": 0, "two": 0}, (0.0, 0.0)),
    "nobody has ever waited": Case(UP, None, {}, {}, (0.0, 0.0)),
    "requests wait at one router": Case(UP, None, {}, {"one": 0, "two": 3}, (0.0, 3.0)),
    "requests wait at both": Case(UP, None, {}, {"one": 2, "two": 3}, (0.0, 5.0)),
    "a router is not scraped": Case(ONE_UP, None, {}, {"one": 1}, (0.0, 1.0)),
    "no router is scraped": Case({}, None, {}, {}, (None, 0.0)),
    "the pod has started, its load is unknown": Case(UP, 0, {}, {"one": 2}, (None, 2.0)),
    "scale up": Case(UP, 2, DESIRED, {}, (TOGETHER, 0.0)),
    "scale down": Case(UP, 9, DESIRED, {}, (TOGETHER, 0.0)),
    "do not scale down while a router is not scraped": Case(ONE_UP, 3, FIRST, {}, (None, 0.0)),
}


def scraped(metric: str, router: str, **labels: str) -> str:
    """A series of a router of the release, or of another one."""
    pod = router if router.startswith("other-") else f"r-warmroute-{router}"
    found = {"namespace": "llm", "container": "router", "pod": pod, **labels}
    return metric + "{" + ",".join(f'{name}="{value}"' for name, value in found.items()) + "}"


@needs_promtool
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_prometheus_computes_what_starts_and_stops_the_first_pod(case: Case, tmp_path: Path) -> None:
    """What waits for an adapter at any router counts; other models and releases do not."""

    pool = {"pool": "chat", "model": "qwen2.5-7b"}
    found: dict[str, float] = {scraped("up", router): one for router, one in case.up.items()}
    for router in case.up if case.ready is not None else ():
        found[scraped("warmroute_pool_ready_replicas", router, **pool)] = case.ready or 0
    for router, needs in case.desired.items():
        for resource, value in needs.items():
            found[scraped("warmroute_pool_desired_replicas", router, **pool, resource=resource)] = value
    for router, count in case.waiting.items():
        found[scraped("warmroute_requests_waiting_for_pods", router, model="lora")] = count
        found[scraped("warmroute_requests_waiting_for_pods", router, model="qwen2x5-7b")] = 99
    for name in ("requests_waiting_for_pods", "pool_ready_replicas"):
        found[scraped(f"warmroute_{name}", "other-one", **pool)] = 99
    spec = scaler(minReplicas=0)
    tests = [
        {"expr": query_of(spec, number), "eval_time": "0s", "exp_samples": [] if one is None else [{"value": one}]}
        for number, one in enumerate(case.expected)
    ]
    series = [{"series": name, "values": str(value)} for name, value in found.items()]
    content = {"tests": [{"input_series": series, "interval": "15s", "promql_expr_test": tests}]}
    with (tmp_path / "test.yaml").open("w", encoding="utf-8") as file:
        YAML(typ="safe").dump(content, file)
    promtool("test", "rules", str(tmp_path / "test.yaml"))
