"""Probes the configured pods once, as `serve` does before a pod gets traffic: `config check --probe`.

It also warns of what leaves prompts unmatched: no tokenizer, no chat template, a failed self-test, no KV events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from structlog.testing import capture_logs

from router.config.mistakes import nearest
from router.config.schema import RouterConfig
from router.engines.engine_catalog import ENGINES, OWNERS
from router.errors import UpstreamError
from router.feeds.discovery.membership import configured_pods
from router.feeds.pod_problems import fetch_facts, unusable_reason
from router.feeds.self_test import ParityFeed, ProbeReader, SelfTestTiming
from router.fleet.fleet import Fleet
from router.frontends.http.upstream import UpstreamPools, upstream_pools
from router.frontends.prompt_readers import FleetLookups
from router.observe.metrics import Metrics
from router.stores.prefix_store import LocalStore
from router.types import Links, Pod, PodSpeed, PrefixTrust
from router.wiring.prompts import Prompts
from router.wiring.tokenizer_files import load_tokenizer


@dataclass(frozen=True, slots=True)
class _Probed:
    """What a pod serves, and what would leave its prompts unmatched."""

    models: tuple[str, ...]
    warnings: Sequence[str]

    @property
    def summary(self) -> str:
        return f"ready, serves {', '.join(self.models)}"


def print_probes(config: RouterConfig) -> bool:
    """Print one line for each pod: what it serves, or why it cannot be used; then warnings. True if all can be used."""
    pods = [configured_pods(each, PodSpeed(0, 0, 0))[0] for each in config.pods]  # the first rank of each URL
    with capture_logs():
        results = asyncio.run(_probe_all(pods, config))
    for pod, result in zip(pods, results, strict=True):
        print(f"pod {pod.id}: {result if isinstance(result, str) else result.summary}")
    usable = [result for result in results if isinstance(result, _Probed)]
    for result in usable:
        for warning in result.warnings:
            print(f"warning: {warning}")
    configured = {model.name for model in config.models if not model.is_pattern}
    served = {name for result in usable for name in result.models}
    for name in sorted(configured - served) if served else ():
        print(f"note: no pod here serves model {name}{nearest(name, served)}")
    return len(usable) == len(pods)


async def _probe_all(pods: list[Pod], config: RouterConfig) -> list[_Probed | str]:
    pools = upstream_pools(config.limits)
    prompts = Prompts(config, pools.of, lambda _: pods, Metrics(), load_tokenizer, FleetLookups())
    try:
        return await asyncio.gather(*(_probe(pools, pod, config, prompts) for pod in pods))
    finally:
        pools.close()


async def _probe(pools: UpstreamPools, pod: Pod, config: RouterConfig, prompts: Prompts) -> _Probed | str:
    """What the pod serves, or why it cannot be used."""
    try:
        await pools.fetch(pod, ENGINES[pod.engine].health_path, config.probes.health_timeout_s)
        facts = await fetch_facts(pools.fetch, pod, config.probes.health_timeout_s)
    except UpstreamError as error:
        return unusable_reason(pod, error)
    prompts.add_served(facts.models, frozenset)
    described = replace(pod, models=facts.models, block_size_tokens=facts.block_size_tokens)
    problem = await _unmatched(pools, described, config, prompts)
    warnings = [f"pod {pod.id}: {problem}"] if problem else []
    flag = ENGINES[OWNERS.get(facts.owner, pod.engine)].kv_events_flag
    if flag and facts.kv_events is None and not config.index.redis and _asks_for_events(config, pod):
        warnings.append(f"pod {pod.id}: no KV events: its cache is guessed from its prompts; start it with {flag}")
    return _Probed(facts.models, warnings)


def _asks_for_events(config: RouterConfig, pod: Pod) -> bool:
    return any(each.url == pod.url and each.kv_events == "auto" for each in config.pods)


async def _unmatched(pools: UpstreamPools, pod: Pod, config: RouterConfig, prompts: Prompts) -> str:
    """Why prompts for the pod would be routed by load only; "" if they are matched. Sends it a prompt and generates one
    token, as `serve` does."""
    for model in pod.models:
        if reason := prompts.unread_reason(model):
            return f"{model} is routed by load only: {reason}"
    if not config.probes.self_test:
        return ""
    reader, timing = ProbeReader(prompts.of_probe, prompts.advice), SelfTestTiming()
    feed = ParityFeed(Fleet(Links()), LocalStore(), pools.post, reader, lambda _: False, timing)
    report = await feed.test(pod)
    return (
        "" if report.trust is PrefixTrust.TRUSTED else f"routed by load only: self-test {report.trust}: {report.reason}"
    )
