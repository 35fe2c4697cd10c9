"""The sources of pods that a configuration names."""

from __future__ import annotations

import pytest

from router.admission.admission_queue import AdmissionConfig
from router.config.load import shipped
from router.config.pod_schema import Discovery, DnsName, KubernetesApi, KubernetesPods, TargetFile
from router.config.schema import PickerListen, RouterConfig
from router.wiring.pod_sources import pod_sources
from router.wiring.router import HTTP_FRONT, Front, build_router, picker_front

API = KubernetesApi(url="http://kube")
POOLS = tuple(KubernetesPods(inference_pool=name, namespaces=("ns",), api=API) for name in ("one", "two"))


def test_each_source_has_a_name_and_a_status() -> None:
    """The second of a kind has a number."""
    kube = KubernetesPods(selector="app=vllm", namespaces=("ns",), api=API)
    names = (DnsName(name="pods.ns", port=8000),)
    files = (TargetFile(path="a.yaml"), TargetFile(path="a.yaml"))
    found = pod_sources(RouterConfig(discovery=Discovery(file=files, dns=names, kubernetes=(kube,))))
    named = ["file a.yaml", "file a.yaml #2", "dns pods.ns", "kubernetes app=vllm in ns"]
    assert list(found.by_name) == ["configuration", *named]
    assert [one.source for one in found.statuses] == named
    assert not found.objectives


def test_requests_to_a_pool_have_the_priorities_of_its_objectives() -> None:
    """0 where no pool has the objective."""
    found = pod_sources(RouterConfig(discovery=Discovery(kubernetes=POOLS)))
    for number, of_pool in enumerate(found.objectives):
        of_pool.priorities = {b"chat": 10 + number, b"own %d" % number: number}
    assert [found.priority(name) for name in (b"chat", b"own 1", b"none")] == [10, 1, 0]


PICKERS = [picker_front(PickerListen(requests=who)) for who in ("gateway", "picker")]


@pytest.mark.parametrize(
    ("front", "admission", "follows"),
    [
        (HTTP_FRONT, AdmissionConfig(), False),
        *((one, AdmissionConfig(), True) for one in PICKERS),
        (PICKERS[0], None, False),
    ],
)
def test_objectives_are_followed_for_a_gateway_with_a_queue(
    front: Front, admission: AdmissionConfig | None, follows: bool
) -> None:
    """They need rights that a router has only there."""
    config = RouterConfig(discovery=Discovery(kubernetes=POOLS), admission=admission)
    built = build_router(config, shipped("policies"), {}, front=front)
    assert ("InferenceObjectives of one in ns" in built.feeds) == follows
