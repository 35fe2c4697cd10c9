"""Builds the discovery sources that ask the Kubernetes API. Imported only where a configuration names one."""

from __future__ import annotations

from collections.abc import Callable

from router.config.pod_schema import KubernetesPods
from router.config.schema import Limits
from router.feeds.discovery.inference_pool import PoolObjectives, PoolPods, PoolTarget
from router.feeds.discovery.kube_api import CONNECT_TIMEOUT_S, QUIET_S, REQUEST_TIMEOUT_S, KubeApi, own_namespace
from router.feeds.discovery.kubernetes_pods import KubernetesSource
from router.feeds.discovery.membership import PodSource, SourceStatus
from router.frontends.http.upstream import UpstreamPool
from router.types import PodTls


def api_server(url: str, tls: PodTls) -> UpstreamPool:
    limits = Limits(connect_timeout_s=CONNECT_TIMEOUT_S, first_byte_timeout_s=REQUEST_TIMEOUT_S, idle_timeout_s=QUIET_S)
    return UpstreamPool(url, url, limits, tls=tls)


def selected_pods(entry: KubernetesPods, status: Callable[[str], SourceStatus]) -> tuple[str, PodSource]:
    """The source of the pods that a selector matches, and its name."""
    namespaces = entry.namespaces or (own_namespace(),)
    statuses = {namespace: status(f"kubernetes {entry.selector} in {namespace}") for namespace in namespaces}
    return statuses[namespaces[0]].source, KubernetesSource(entry, KubeApi(entry.api, api_server), statuses)


def pool_pods(entry: KubernetesPods, status: Callable[[str], SourceStatus]) -> tuple[str, PodSource, PoolObjectives]:
    """The source of the pods of an InferencePool, its name, and the priorities of requests to that pool."""
    namespace, api = (entry.namespaces or (own_namespace(),))[0], KubeApi(entry.api, api_server)
    own = status(f"InferencePool {entry.inference_pool} in {namespace}")
    pods = {namespace: status(f"kubernetes, of InferencePool {entry.inference_pool} in {namespace}")}

    def follow(target: PoolTarget) -> KubernetesSource:
        selecting = entry.model_copy(update={"selector": target.selector})
        return KubernetesSource(selecting, api, pods, target.ports)

    objectives = SourceStatus(f"InferenceObjectives of {entry.inference_pool} in {namespace}")
    source = PoolPods(entry.inference_pool, namespace, api, own, follow)
    return own.source, source, PoolObjectives(entry.inference_pool, namespace, api, objectives)
