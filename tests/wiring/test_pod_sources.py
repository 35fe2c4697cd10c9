"""The sources of pods that a configuration names."""

from __future__ import annotations

from router.config.pod_schema import Discovery, DnsName, KubernetesApi, KubernetesPods, TargetFile
from router.config.schema import RouterConfig
from router.wiring.pod_sources import pod_sources

API = KubernetesApi(url="http://kube")


def test_each_source_has_a_name_and_a_status() -> None:
    """Two of one kind are told apart."""
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
    pools = tuple(KubernetesPods(inference_pool=name, namespaces=("ns",), api=API) for name in ("one", "two"))
    found = pod_sources(RouterConfig(discovery=Discovery(kubernetes=pools)))
    for number, of_pool in enumerate(found.objectives):
        of_pool.priorities = {b"chat": 10 + number, b"own %d" % number: number}
    assert [found.priority(name) for name in (b"chat", b"own 1", b"none")] == [10, 1, 0]
