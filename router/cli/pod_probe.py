"""Probes the configured pods once, as `serve` does before a pod gets traffic: `config check --probe`."""

from __future__ import annotations

import asyncio

from router.config.mistakes import nearest
from router.config.model_names import ModelNames
from router.config.schema import RouterConfig
from router.engines.adapter import PodFacts
from router.engines.engine_catalog import ENGINES
from router.errors import UpstreamError
from router.feeds.discovery.membership import configured_pods
from router.feeds.pod_problems import Fetch, fetch_facts, unusable_reason
from router.frontends.http.upstream import upstream_pools
from router.types import Pod, PodSpeed


def print_probes(config: RouterConfig) -> bool:
    """Print one line for each pod: what it serves, or why it cannot be used. True if all can be used."""
    pods = [configured_pods(each, PodSpeed(0, 0, 0))[0] for each in config.pods]  # the first rank of each URL
    results = asyncio.run(_probe_all(pods, config))
    names = ModelNames(config.models)
    configured = {model.name for model in config.models if not model.is_pattern}
    for pod, result in zip(pods, results, strict=True):
        print(f"pod {pod.id}: {result if isinstance(result, str) else _summary(result, names)}")
    served = {name for result in results if not isinstance(result, str) for name in result.models}
    for name in sorted(configured - served) if served else ():
        print(f"note: no pod here serves model {name}{nearest(name, served)}")
    return not any(isinstance(result, str) for result in results)


async def _probe_all(pods: list[Pod], config: RouterConfig) -> list[PodFacts | str]:
    pools, timeout_s = upstream_pools(config.limits), config.probes.health_timeout_s
    try:
        return await asyncio.gather(*(_probe(pools.fetch, pod, timeout_s) for pod in pods))
    finally:
        pools.close()


async def _probe(fetch: Fetch, pod: Pod, timeout_s: float) -> PodFacts | str:
    """What the pod serves, or why it cannot be used."""
    try:
        await fetch(pod, ENGINES[pod.engine].health_path, timeout_s)
        return await fetch_facts(fetch, pod, timeout_s)
    except UpstreamError as error:
        return unusable_reason(pod, error)


def _summary(facts: PodFacts, names: ModelNames) -> str:
    served = f"ready, serves {', '.join(facts.models)}"
    if not any(map(names.entry_of, facts.models)):
        return f"{served}; no tokenizer for it: add the model under `models`, or it is routed by load only"
    return served
