"""The facts of a pod from annotations, labels, images and ports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from router.config.pod_schema import DiscoveredPods, KubernetesPods, KvEvents, PodConfig
from router.errors import ConfigError
from router.feeds.discovery.kube_api import KubePod
from router.feeds.discovery.pod_facts import (
    CONVENTIONS,
    MAX_UNKNOWN,
    NodePlace,
    label_facts,
    pod_configs,
    read_keys,
    unknown_annotations,
)
from router.types import Role

ENGINES = Path(__file__).parents[3] / "helm/templates/engines.yaml"
PLACE = NodePlace("z1", "r1")


def found(labels: dict[str, str], *, entry: dict[str, Any] | None = None, **pod: Any) -> list[PodConfig]:
    keys = {"selector": "app=x", **(entry or {})}
    kube = KubePod(key=("ns", "a"), uid="u", address="10.0.0.7", node="n1", labels=labels, **pod)
    return pod_configs(kube, KubernetesPods(**keys), PLACE, "a")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"llm-d.ai/role": "prefill"}, {"role": Role.PREFILL, "handoff": "nixl"}),
        ({"llm-d.ai/role": "decode"}, {"role": Role.DECODE, "handoff": "nixl"}),
        ({"llm-d.ai/role": "prefill-decode"}, {"role": Role.BOTH}),
        ({"llm-d.ai/role": "something new"}, {"role": Role.BOTH}),
        ({"llm-d.ai/engine-type": "SGLang", "llm-d.ai/role": "decode"}, {"engine": "sglang", "handoff": "bootstrap"}),
        ({"llm-d.ai/active-ports": "8200"}, {"url": "http://10.0.0.7:8200"}),
        ({"app.kubernetes.io/component": "llminferenceservice-workload-prefill"}, {"role": Role.PREFILL}),
        ({"role-name": "decode", "model.aibrix.ai/engine": "vllm"}, {"role": Role.DECODE}),
        ({"model.aibrix.ai/port": "8001"}, {"url": "http://10.0.0.7:8001"}),
        ({"sglang.ai/bootstrap-port": "9001"}, {"handoff_port": 9001}),
        ({"smg.ai/worker-ports": "30000"}, {"url": "http://10.0.0.7:30000"}),
        ({"topology.kubernetes.io/zone": "z9"}, {"zone": "z9"}),
        ({"warmroute.dev/role": "decode", "llm-d.ai/role": "prefill"}, {"role": Role.DECODE}),
        ({"warmroute.dev/dp-size": "4", "warmroute.dev/hardware": "h100x8"}, {"dp_size": 4, "hardware": "h100x8"}),
        ({"warmroute.dev/zone": "z2", "warmroute.dev/rack": "r2"}, {"zone": "z2", "rack": "r2"}),
        ({"warmroute.dev/pool": "decode"}, {"pool": "decode"}),
        ({"warmroute.dev/kv-events": "off"}, {"kv_events": "off"}),
        (
            {"warmroute.dev/kv-events-port": "5557", "warmroute.dev/kv-replay-port": "5558"},
            {"kv_events": KvEvents(endpoint="tcp://10.0.0.7:5557", replay_endpoint="tcp://10.0.0.7:5558")},
        ),
        ({}, {"zone": "z1", "rack": "r1", "host": "n1", "engine": "vllm", "role": Role.BOTH, "id": "a"}),
    ],
)
def test_annotations_and_conventions_of_charts_are_read(labels: dict[str, str], expected: dict[str, Any]) -> None:
    """An own annotation wins over a convention."""
    (pod,) = found(labels)
    assert {name: getattr(pod, name) for name in expected} == expected


def test_the_configuration_wins_over_conventions_and_annotations_win_over_it() -> None:
    """An operator who cannot label pods corrects them there."""
    entry = {"port": 8100, "pod": DiscoveredPods(role=Role.DECODE, handoff="mooncake")}
    (pod,) = found({"llm-d.ai/role": "prefill", "model.aibrix.ai/port": "8001"}, entry=entry)
    assert (pod.role, pod.handoff, pod.url) == (Role.DECODE, "mooncake", "http://10.0.0.7:8100")
    (pod,) = found({"warmroute.dev/role": "both", "warmroute.dev/ports": "8300"}, entry=entry)
    assert (pod.role, pod.url) == (Role.BOTH, "http://10.0.0.7:8300")


@pytest.mark.parametrize(
    ("images", "engine", "port"),
    [
        (("istio/proxyv2", "lmsysorg/sglang:v1"), "sglang", 30000),
        (("vllm/vllm-openai:v1", "busybox"), "vllm", 1),
        (("nvcr.io/nvidia/tensorrt-llm/release:1",), "trtllm", 1),
        (("ghcr.io/ggml-org/llama.cpp:server",), "llamacpp", 1),
        (("registry/own:1",), "vllm", 1),
    ],
)
def test_engine_and_port_come_from_the_container_of_the_engine(images: tuple[str, ...], engine: str, port: int) -> None:
    """Pods have sidecars. Of its ports the one named http is used, else the first."""
    ports = ((("metrics", 1),), (("zmq", 5557), ("http", 30000)))
    (pod,) = found({}, images=images, ports=ports)
    assert (pod.engine, pod.url) == (engine, f"http://10.0.0.7:{port}")


def test_each_port_of_a_pod_is_a_pod() -> None:
    """Duplicates count once."""
    pods = found({"smg.ai/worker-ports": "8000, 8001,8000"})
    assert [(pod.id, pod.url) for pod in pods] == [
        ("a:8000", "http://10.0.0.7:8000"),
        ("a:8001", "http://10.0.0.7:8001"),
    ]


@pytest.mark.parametrize(
    "labels",
    [
        {"llm-d.ai/role": "encode"},
        {"app.kubernetes.io/component": "llminferenceservice-router-scheduler"},
        {"sleeping": "true"},
    ],
)
def test_a_pod_that_takes_no_requests_is_not_used(labels: dict[str, str]) -> None:
    """Unless its own annotation says otherwise."""
    assert not found(labels)
    assert len(found({**labels, "warmroute.dev/role": "both"})) == 1


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"warmroute.dev/role": "prefil"}, "role: must be 'both', 'prefill' or 'decode'"),
        ({"warmroute.dev/ports": "80000"}, "'80000' is not a port"),
        ({"smg.ai/worker-ports": "http"}, "'http' is not a port"),
        ({"warmroute.dev/dp-size": "two"}, "dp_size: must be an integer"),
        ({"warmroute.dev/ports": ",".join(map(str, range(1, 100)))}, "more than 64 ports"),
        ({"warmroute.dev/engine": "llamacpp", "warmroute.dev/role": "decode"}, "needs a handoff dialect"),
    ],
)
def test_a_wrong_value_is_refused(labels: dict[str, str], message: str) -> None:
    """The message names the field."""
    with pytest.raises(ConfigError, match=message):
        found(labels)


def test_labels_that_the_chart_gives_its_engines_are_not_reported() -> None:
    labels = dict.fromkeys(re.findall(r"^ *(warmroute\.dev/[a-z-]+):", ENGINES.read_text(), re.MULTILINE), "x")
    assert labels
    assert unknown_annotations(KubePod(key=("ns", "a"), uid="u", labels=labels)) == []


def test_unknown_own_annotations_are_reported_and_only_known_labels_are_kept() -> None:
    """Other labels of a pod cost no memory."""
    pod = KubePod(key=("ns", "a"), uid="u", labels={"warmroute.dev/rol": "prefill", "warmroute.dev/role": "both"})
    assert unknown_annotations(pod) == ["warmroute.dev/rol"]
    keys = read_keys(KubernetesPods(selector="a=b", rack_label="my/rack"))
    assert keys == {"my/rack", *(row.label for row in CONVENTIONS)}


@pytest.mark.parametrize(
    "labels",
    [
        {"warmroute.dev/kv-events-port": ","},
        {"warmroute.dev/kv-events-port": "5557,5558"},
        {"warmroute.dev/kv-events-port": "5557", "warmroute.dev/kv-replay-port": " , "},
        {"warmroute.dev/kv-events-port": "0"},
        {"warmroute.dev/kv-events": "ipc:///run/x"},
        {"warmroute.dev/dp-size": "1000000000"},
        {"warmroute.dev/handoff-port": "70000"},
        {"warmroute.dev/ports": "1," * 100_000},
    ],
)
def test_an_annotation_that_makes_no_sense_is_a_mistake_of_its_pod(labels: dict[str, str]) -> None:
    """`pod rejected`: it does not end the discovery of the others, nor take long."""
    with pytest.raises(ConfigError):
        found(labels)


@pytest.mark.parametrize("name", ["engine", "role", "handoff", "pulls", "kv-events"])
def test_a_long_annotation_is_a_short_mistake(name: str) -> None:
    with pytest.raises(ConfigError) as mistake:
        found({f"warmroute.dev/{name}": "x" * 250_000})
    assert len(str(mistake.value)) < 1000


def test_few_of_many_unknown_annotations_are_reported() -> None:
    labels = {f"warmroute.dev/rol{number}": "" for number in range(10_000)}
    assert len(unknown_annotations(KubePod(key=("ns", "a"), uid="u", labels=labels))) == MAX_UNKNOWN


def test_a_pod_does_not_decide_which_models_it_may_serve() -> None:
    """Neither by an annotation nor by a label of a target file."""
    (pod,) = found({"warmroute.dev/models": "*"}, entry={"pod": DiscoveredPods(models=("m",))})
    assert pod.models == ("m",)
    assert label_facts({"models": "*"}) == {}
