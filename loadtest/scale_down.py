"""Measures what chats lose when a fleet is scaled down, with and without deletion costs.

    python loadtest/scale_down.py [--seeds 1,2,3] [--out scale-down.json]

For each seed two fleets of mock engines run at the same time, each behind a router that finds its pods at an API server
in memory (`tests/feeds/discovery/fake_kubernetes.py`): one router writes deletion costs, the other does not. Both get
the same sessions. Then half of the pods are removed as a ReplicaSet removes them, and the minutes before and after are
compared. All pods have the same age and load of their nodes, so that without costs the choice is an arbitrary one.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from router.addresses import split_url

sys.path.insert(0, str(Path(__file__).parents[1]))

from router.cli.child_processes import (
    FleetPlan,
    all_pods_trusted,
    cancel_on_sigterm,
    child,
    free_port,
    mock_fleet,
    router_config,
    temporary_folder,
)
from router.cli.load_driver import RequestResult, drive
from router.cli.options import writable
from router.feeds.discovery.deletion_costs import ANNOTATION
from router.sim.chat_workload import ChatSession, SessionShape, Shared, mixed_sessions, poisson
from tests.feeds.discovery.fake_kubernetes import PODS, FakeKubernetes
from tests.feeds.discovery.kubernetes_server import served

PLAN = FleetPlan(pods=8, num_blocks=16_384)
KEPT = 4
NODES = 4
DRAIN_S = 10.0
"""From the begin of a pod's termination to its end."""
WINDOW_S = 60.0
SHAPES: Mapping[str, SessionShape] = {
    "chat": SessionShape(
        share=0.75,
        shared=Shared(texts=4, words=(300, 800)),
        turns=(2, 8),
        first_words=(50, 400),
        next_words=(40, 200),
        answer_tokens=(24, 56),
        think_s=(4.0, 12.0),
    ),
    "long": SessionShape(
        share=0.25,
        turns=(4, 14),
        first_words=(2000, 8000),
        next_words=(60, 260),
        answer_tokens=(24, 56),
        think_s=(6.0, 16.0),
    ),
}
"""Many short chats, and a few about long texts, which have most of the cached tokens."""


@dataclass(frozen=True, slots=True)
class ScaleDown:
    """One fleet of one seed. Shares are of the prompt tokens of requests due in the minute."""

    seed: int
    costs: bool
    before: float
    after: float
    continued_before: float
    """The same of requests that continue a chat."""
    continued_after: float
    computed_tokens: int
    """Prompt tokens of the minute after that were not cached."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    errors: int
    requests: int
    removed: tuple[str, ...]
    cost_of_pods: Mapping[str, int]


def main(
    seeds: Annotated[str, typer.Option(help="Seeds of the sessions.")] = "1,2,3",
    sessions_per_s: Annotated[float, typer.Option()] = 0.6,
    warm_s: Annotated[float, typer.Option(help="Seconds of load before pods are removed.")] = 150.0,
    out: Annotated[Path | None, typer.Option(help="Write all figures as JSON.", callback=writable)] = None,
) -> None:
    """Print one table."""
    results = asyncio.run(_all([int(seed) for seed in seeds.split(",")], sessions_per_s, warm_s))
    Console().print(_table(results))
    if out is not None:
        settings = {"sessions_per_s": sessions_per_s, "warm_s": warm_s, **asdict(PLAN)}
        out.write_text(json.dumps({"settings": settings, "runs": [asdict(one) for one in results]}, indent=1) + "\n")


async def _all(seeds: Sequence[int], sessions_per_s: float, warm_s: float) -> list[ScaleDown]:
    cancel_on_sigterm()
    results: list[ScaleDown] = []
    for seed in seeds:
        load = sessions_of(seed, sessions_per_s, warm_s + WINDOW_S)
        results += await asyncio.gather(*(_run(seed, load, warm_s, costs=costs) for costs in (False, True)))
    return results


def sessions_of(seed: int, per_s: float, duration_s: float) -> list[ChatSession]:
    """The sessions of a seed."""
    return mixed_sessions(Random(seed), SHAPES, poisson(Random(f"{seed} arrivals"), duration_s, per_s))


async def _run(seed: int, load: Sequence[ChatSession], warm_s: float, *, costs: bool) -> ScaleDown:
    cluster, results = FakeKubernetes(), list[RequestResult]()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(temporary_folder("warmroute-scale-down-"))
        add_pods(cluster, await stack.enter_async_context(mock_fleet(PLAN, folder)), seed)
        config = _config(await stack.enter_async_context(served(cluster)), costs=costs)
        url = await _router(stack, config, folder)
        driving = asyncio.create_task(drive(url, PLAN.model, load, results.append))
        await asyncio.sleep(warm_s)
        found = cost_of_pods(cluster)
        removed = chosen_by_replica_set(cluster, PLAN.pods - KEPT)
        for name in removed:
            cluster.terminate(name)
        await asyncio.sleep(DRAIN_S)
        for name in removed:
            cluster.delete(name)
        await asyncio.sleep(WINDOW_S - DRAIN_S)
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)
    return summary(seed, results, warm_s, removed, found, costs=costs)


def add_pods(cluster: FakeKubernetes, urls: Sequence[str], seed: int) -> None:
    """The fleet as pods, two on a node. They are created in an order that depends on the seed."""
    for number in Random(seed).sample(range(len(urls)), len(urls)):
        place = split_url(urls[number])
        ports = {"warmroute.dev/ports": str(place.port)}
        cluster.put_pod(f"pod-{number}", ip=place.hostname, annotations=ports, node=f"node-{number % NODES}")


def cost_of_pods(cluster: FakeKubernetes) -> dict[str, int]:
    """The deletion cost of each pod, 0 without one."""
    return {
        name: int((pod["metadata"]["annotations"] or {}).get(ANNOTATION, "0"))
        for (resource, _, name), pod in cluster.objects.items()
        if resource == PODS
    }


def chosen_by_replica_set(cluster: FakeKubernetes, removed: int) -> list[str]:
    """The pods that a ReplicaSet removes first. All are running and ready: those with the lowest cost, then those that
    share their node with the most others, then the newest. Source: Kubernetes, `ActivePodsWithRanks`."""
    costs = cost_of_pods(cluster)
    pods = [(name, pod) for (resource, _, name), pod in cluster.objects.items() if resource == PODS]
    nodes = [pod["spec"]["nodeName"] for _, pod in pods]
    by_age = sorted(pods, key=lambda pod: str(pod[1]["metadata"]["creationTimestamp"]), reverse=True)
    order = sorted(by_age, key=lambda pod: (costs[pod[0]], -nodes.count(pod[1]["spec"]["nodeName"])))
    return [name for name, _ in order[:removed]]


def _config(api: str, *, costs: bool) -> dict[str, Any]:
    source = {
        "selector": "app=vllm",
        "namespaces": ["ns"],
        "node_labels": False,
        "deletion_cost": costs,
        "api": {"url": api},
    }
    return {**router_config([], PLAN), "discovery": {"kubernetes": source}}


async def _router(stack: AsyncExitStack, config: Mapping[str, Any], folder: Path) -> str:
    """Start a router and wait until it trusts all pods."""
    path, port, admin_port = folder / "router.yaml", free_port(), free_port()
    path.write_text(json.dumps(config))
    arguments = ["serve", "--config", str(path), "--port", str(port), "--admin-port", str(admin_port)]
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin_port}", trust_env=False)
    await stack.enter_async_context(client)
    router = stack.enter_context(child("router", arguments, folder))

    async def ready() -> bool | None:
        return await all_pods_trusted(client, PLAN.pods) or None

    await router.until(ready)
    return f"http://127.0.0.1:{port}"


def summary(
    seed: int,
    results: Sequence[RequestResult],
    down_s: float,
    removed: Sequence[str],
    cost_of: Mapping[str, int],
    *,
    costs: bool,
) -> ScaleDown:
    """The figures of a run in which pods were removed at `down_s`."""
    before = [one for one in results if down_s - WINDOW_S <= one.due_s < down_s]
    after = [one for one in results if down_s <= one.due_s < down_s + WINDOW_S]
    ttfts_ms = [one.ttft_s * 1000 for one in after if one.ttft_s is not None] or [float("nan")]
    return ScaleDown(
        seed=seed,
        costs=costs,
        before=_cached_share(before),
        after=_cached_share(after),
        continued_before=_cached_share(list(filter(_continues, before))),
        continued_after=_cached_share(list(filter(_continues, after))),
        computed_tokens=sum(one.prompt_tokens - one.cached_tokens for one in after),
        ttft_p50_ms=statistics.median(ttfts_ms),
        ttft_p99_ms=sorted(ttfts_ms)[int(0.99 * len(ttfts_ms))],
        errors=sum(bool(one.error) for one in results),
        requests=len(after),
        removed=tuple(removed),
        cost_of_pods=cost_of,
    )


def _continues(result: RequestResult) -> bool:
    return any(message["role"] == "assistant" for message in result.asked.get("messages", ()))


def _cached_share(results: Sequence[RequestResult]) -> float:
    prompts = sum(one.prompt_tokens for one in results)
    return sum(one.cached_tokens for one in results) / prompts if prompts else float("nan")


def _table(results: Sequence[ScaleDown]) -> Table:
    columns = (
        "seed",
        "costs",
        "cached, %",
        "next turns, %",
        "computed tokens",
        "TTFT p50, p99 ms",
        "requests",
        "errors",
    )
    shown = Table(*columns, title=f"{PLAN.pods} to {KEPT} pods: the minutes before and after")
    for one in results:
        cached = (_percents(one.before, one.after), _percents(one.continued_before, one.continued_after))
        times = f"{one.ttft_p50_ms:,.0f}, {one.ttft_p99_ms:,.0f}"
        counts = (f"{one.computed_tokens:,}", times, str(one.requests), str(one.errors))
        shown.add_row(str(one.seed), "yes" if one.costs else "no", *cached, *counts)
    return shown


def _percents(before: float, after: float) -> str:
    return f"{100 * before:.1f} → {100 * after:.1f}"


if __name__ == "__main__":
    typer.run(main)
