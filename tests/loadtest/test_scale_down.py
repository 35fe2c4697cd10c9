"""Which pods the script removes, and what it counts."""

from __future__ import annotations

import pytest

from loadtest.scale_down import add_pods, chosen_by_replica_set, cost_of_pods, sessions_of, summary
from router.cli.load_driver import RequestResult
from router.feeds.discovery.deletion_costs import ANNOTATION
from tests.feeds.discovery.fake_kubernetes import FakeKubernetes

URLS = [f"http://127.0.0.1:{9000 + number}" for number in range(8)]


def fleet(seed: int, **costs: int) -> FakeKubernetes:
    cluster = FakeKubernetes()
    add_pods(cluster, URLS, seed)
    for name, cost in costs.items():
        cluster.put_pod(name.replace("_", "-"), annotations={ANNOTATION: str(cost)})
    return cluster


def test_the_pods_with_the_lowest_cost_are_removed() -> None:
    cluster = fleet(1, **{f"pod_{number}": 100 * (number * 3 % 8 + 1) for number in range(8)})
    assert cost_of_pods(cluster)["pod-3"] == 200
    assert chosen_by_replica_set(cluster, 4) == ["pod-0", "pod-3", "pod-6", "pod-1"]


def test_without_costs_the_newest_pods_are_removed() -> None:
    """Which pods these are depends on the seed alone."""
    cluster = fleet(1)
    created = {name: pod["metadata"]["creationTimestamp"] for (_, _, name), pod in cluster.objects.items()}
    assert chosen_by_replica_set(cluster, 4) == sorted(created, key=lambda name: created[name], reverse=True)[:4]
    assert chosen_by_replica_set(fleet(2), 4) != chosen_by_replica_set(cluster, 4)


def test_a_pod_on_a_shared_node_goes_before_one_that_is_alone() -> None:
    cluster = FakeKubernetes()
    for name, node in (("a", "one"), ("b", "one"), ("c", "two")):
        cluster.put_pod(name, node=node)
    assert chosen_by_replica_set(cluster, 1) == ["b"]


def test_a_seed_always_has_the_same_sessions() -> None:
    assert sessions_of(1, 0.5, 60.0) == sessions_of(1, 0.5, 60.0) != sessions_of(2, 0.5, 60.0)


def test_requests_count_in_the_minute_in_which_they_were_due() -> None:
    def result(due_s: float, cached_tokens: int, error: str = "") -> RequestResult:
        roles = ("user", "assistant", "user") if due_s == 100 else ("user",)
        return RequestResult(
            "chat",
            {"messages": [{"role": role} for role in roles]},
            due_s + 1,
            1.0,
            prompt_tokens=100,
            cached_tokens=cached_tokens,
            ttft_s=due_s / 1000,
            error=error,
        )

    results = [result(39, 1), result(40, 90), result(99, 80), result(100, 50), result(159, 70, "cut"), result(160, 1)]
    found = summary(1, results, 100.0, ["a"], {"a": 5}, costs=True)
    assert (found.before, found.after) == pytest.approx((0.85, 0.6))
    assert found.continued_after == 0.5
    assert (found.computed_tokens, found.requests, found.errors) == (80, 2, 1)
    assert (found.ttft_p50_ms, found.ttft_p99_ms) == pytest.approx((129.5, 159))
