"""Requests by class, policy and tenant; few labels for any traffic."""

from __future__ import annotations

from typing import Any

from router.decision import Candidate, Cost, Direct
from router.observe.class_metrics import (
    NAMED_TENANTS,
    RENEW_EVERY_REQUESTS,
    BusiestTenants,
    ClassMetrics,
)
from router.observe.ended import Ended
from router.observe.fast_metrics import OTHER, Registry
from router.policy.recording import RecordedScene, record
from tests.kit.scenes import pod, policy, prompt, request, scene

SERVED = Candidate(Direct(pod("a")), Cost((), (), 0.0))
MINE = policy()


def value(registry: Registry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def ended(tenant: str = "acme", **facts: Any) -> Ended:
    usual: dict[str, Any] = {"id": "r", "at_s": 0.0, "model": "m", "endpoint": "chat", "result": "ok", "served": SERVED}
    return Ended(**(usual | {"tenant": tenant, "workload": "chat", "policy": MINE.name} | facts))


def decided(workload: str, tenant: str, *, prompt_tokens: int | None = None) -> RecordedScene:
    """The scene of a request of that class and tenant, with no holder; `prompt_tokens`: None if it is unread."""
    read = None if prompt_tokens is None else prompt(prompt_tokens)
    return record(scene(request=request(tenant=tenant), prompt=read), workload)


def test_a_request_is_counted_by_class_policy_and_tenant() -> None:
    """SLOs only where it has one; tokens of served requests only."""
    registry = Registry()
    metrics = ClassMetrics(registry)
    for one in (
        ended(prompt_tokens=100, cached_tokens=60, ttft_ms=400.0, ttft_limit_ms=500.0),
        ended(prompt_tokens=100, ttft_ms=600.0, ttft_limit_ms=500.0),
        ended(prompt_tokens=100, ttft_ms=600.0, result="client_gone"),
    ):
        metrics.settle(one, decided("chat", "acme", prompt_tokens=100))
    labels = {"model": "m", "policy": "mine"}
    assert value(registry, "warmroute_slo_requests_total", **labels, met="true") == 1
    assert value(registry, "warmroute_slo_requests_total", **labels, met="false") == 1
    assert value(registry, "warmroute_tenant_prompt_tokens_total", tenant="acme", stage="all") == 200
    requests = {result: {"class": "chat", "tenant": "acme", "result": result} for result in ("ok", "client_gone")}
    assert value(registry, "warmroute_class_requests_total", **requests["ok"]) == 2
    assert value(registry, "warmroute_class_requests_total", **requests["client_gone"]) == 1


def test_prompt_tokens_in_flight_have_few_labels() -> None:
    """Those of the busiest tenants, and of those with the most tokens."""
    registry = Registry()
    metrics = ClassMetrics(registry)
    metrics.settle(ended(), decided("chat", "acme"))
    metrics.observe_in_flight({"acme": 1} | {f"invented-{number}": 1000 - number for number in range(300)})
    name = "warmroute_tenant_in_flight_prompt_tokens"
    assert value(registry, name, tenant="acme") == 1
    assert value(registry, name, tenant="invented-0") == 1000
    assert value(registry, name, tenant=OTHER) == sum(1000 - number for number in range(NAMED_TENANTS, 300))
    metrics.observe_in_flight({})
    assert value(registry, name, tenant="acme") is None


def test_any_number_of_tenants_makes_few_labels() -> None:
    """Invented names count as `other`; the busiest tenant gets its own label in time."""
    registry = Registry()
    metrics = ClassMetrics(registry)
    for number in range(3 * RENEW_EVERY_REQUESTS):
        tenant = f"invented-{number}" if number % 2 or number < 99 else "late but busy"
        metrics.settle(ended(tenant), decided("chat", tenant, prompt_tokens=1))
    for name in ("warmroute_class_requests", "warmroute_tenant_prompt_tokens"):
        (metric,) = [one for one in registry.collect() if one.name == name]
        tenants = {one.labels["tenant"] for one in metric.samples if one.name.endswith("_total")}
        assert len(tenants) <= NAMED_TENANTS + 1
        assert {OTHER, "late but busy"} <= tenants


def test_a_tenant_that_is_no_longer_busy_loses_its_label() -> None:
    """It is listed once, so that its series can be removed."""
    tenants = BusiestTenants()
    for number in range(NAMED_TENANTS):
        assert tenants.label(f"first-{number}") == f"first-{number}"
    while not tenants.unnamed:
        for number in range(NAMED_TENANTS):
            tenants.label(f"second-{number}")
    assert set(tenants.unnamed) == {f"first-{number}" for number in range(NAMED_TENANTS)}
    assert tenants.label("first-0") == OTHER
