"""Label values of metrics are names of the router, its configuration and its pods; no client adds one."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from prometheus_client.samples import Sample

from helm.monitoring.metric_catalog import DECLARED
from router import __version__, errors
from router.admission.meter import Dimension
from router.apis.chat_rules import PLAIN, RULES
from router.config.policy_files import load_classes
from router.engines.engine_catalog import DIALECTS, ENGINES
from router.fleet.scaling import Resource
from router.observe.class_metrics import NAMED_TENANTS
from router.observe.fast_metrics import OTHER
from router.phases import PHASES
from router.policy.calibration import class_key
from router.prompt.conversation import UnreadReason
from router.types import Endpoint, Matching, PodSpeed, PodState, PrefixTrust, Role, Tier
from tests.stories.conftest import Deploy, Deployment

pytestmark = [pytest.mark.net, pytest.mark.anyio]

ERRORS = {
    error.code for error in vars(errors).values() if isinstance(error, type) and issubclass(error, errors.RouterError)
}
RESULTS = ERRORS | {"ok", "pod_refused", "pod_error", "client_gone", "refused", "equal", "differs"}
BY_THE_ROUTER: dict[str, set[str]] = {
    "endpoint": {endpoint.value for endpoint in Endpoint},
    "result": RESULTS,
    "reason": ERRORS | {reason.value for reason in UnreadReason} | {"prefix", "price", "cold"},
    "placement": {"chosen", "round_robin"},
    "plan": {"direct", "pull", "split"},
    "stage": {"all", "available", "captured", "delivered"},
    "engine": set(ENGINES),
    "tier": {tier.name.lower() for tier in Tier} | {"peer"},
    "phase": set(PHASES),
    "state": {state.value for state in PodState},
    "role": {role.value for role in Role},
    "resource": {resource.value for resource in Resource},
    "matching": {matching.value for matching in Matching},
    "rule": {rule.name for rule in RULES} | {PLAIN},
    "trust": {trust.value for trust in PrefixTrust},
    "dialect": set(DIALECTS),
    "by": {"prior", "learnt"},
    "cause": {"connect", "connection", "error event", "silence", "status"},
    "method": {"ids", "replay", "retry", "finish", "none"},
    "outcome": {"joined", "left", "differs", "failed"},
    "met": {"true", "false"},
    "kind": {"prompt", "cached", "computed", "output"},
    "tokens": {"computed", "again"},
    "limit": {dimension.name.lower() for dimension in Dimension},
    "class": set(load_classes(None).names) | {""},
    "coefficient": {field.name for field in fields(PodSpeed)[:6]} | {"t0_ms", "bytes_per_ms"},
}
BY_THE_FLEET = {
    "model",
    "name",
    "pod",
    "pool",
    "provider",
    "holder",
    "subject",
    "policy",
    "version",
    "link",
    "set_version",
    "source",
}
"""Names in the configuration, of pods and what they serve, of policy files and of discovery's sources."""
ROUNDS = 5


def hostile(tag: str) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """Requests (path, body, headers) with `tag` in every place where a client can put a string."""
    headers = {"x-tenant-id": tag, "x-session-id": tag, "x-workload-class": tag, "x-request-id": tag, "user-agent": tag}
    chat: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": tag}], "max_tokens": 1}
    for changes in (
        {"user": tag, "cache_salt": tag, "session_id": tag, "x" + tag: tag},
        {"model": tag},
        {"stream": True, "stop": [tag]},
        {"max_tokens": tag},
        {"chat_template": tag},
        {"chat_template_kwargs": {"x" + tag: tag}},
        {"tools": [{"type": tag}]},
        {"messages": [{"role": tag, "content": tag}]},
        {"messages": [{"role": "user", "name": tag, "content": [{"type": tag}]}]},
        {"messages": [*chat["messages"] * len(tag), {"role": "user", "content": ["x", {"type": "image_url"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"type": tag}]}]},
    ):
        yield "/v1/chat/completions", chat | changes, headers
    yield "/v1/completions", {"model": "demo", "prompt": "hi", "suffix": tag}, headers
    yield "/v1/completions", {"model": "demo", "prompt": {tag: tag}}, headers
    yield "/v1/embeddings", {"model": "demo", "input": tag}, headers
    yield f"/v1/{tag}", {"model": "demo"}, headers
    yield f"/{tag}", {}, headers


async def send_all(deployment: Deployment, tag: str) -> None:
    for path, body, headers in hostile(tag):
        await deployment.client.post(path, json=body, headers=headers)
        await deployment.client.request(tag[:1].upper() + "X", path, headers=headers)


def samples(deployment: Deployment) -> list[Sample]:
    return [sample for family in deployment.program.metrics.registry.collect() for sample in family.samples]


def series(found: list[Sample]) -> Counter[str]:
    """Series by name, without those of calibrations, which begin with the first observed times."""
    return Counter(sample.name for sample in found if "subject" not in sample.labels)


async def test_no_client_makes_a_series(deploy: Deploy) -> None:
    """The busiest tenants have a label, which others take over in time; all others are counted together."""
    async with deploy(pods=2) as deployment:
        for number in range(NAMED_TENANTS + 1):
            await send_all(deployment, f"tenant-{number}")
        await deployment.admin.get("/metrics")
        before = series(samples(deployment))
        for number in range(ROUNDS):
            await send_all(deployment, f"{'x' * number}-{number}")
        await deployment.admin.get("/metrics")
        found = samples(deployment)
        assert series(found) == before
        assert_bounded(deployment, found)


def assert_bounded(deployment: Deployment, found: list[Sample]) -> None:
    """Every label value is from a known set."""
    program = deployment.program
    pods = [status.pod for status in program.fleet.snapshot.pods]
    policies = program.policies.current()
    known: dict[str, set[str]] = BY_THE_ROUTER | {
        "model": {"", "demo"},
        "pod": {"", *(pod.id for pod in pods)},
        "pool": {pod.pool for pod in pods},
        "subject": {class_key(pod) for pod in pods},
        "policy": {policy.name for policy in policies.active},
        "version": {policy.version for policy in policies.active} | {__version__, *(pod.version for pod in pods)},
        "python_version": {platform.python_version()},
        "set_version": {policies.version},
    }
    tenants = {sample.labels["tenant"] for sample in found if "tenant" in sample.labels}
    assert len(tenants) <= NAMED_TENANTS + 1 and OTHER in tenants
    known["tenant"] = tenants
    strange = {
        (sample.name, label, value)
        for sample in found
        for label, value in sample.labels.items()
        if label != "le" and value not in known[label]
    }
    assert not strange


def test_every_label_has_a_known_set_of_values() -> None:
    """A new label needs a line here: where do its values come from, and what bounds them?"""
    declared = {label for one in DECLARED.values() for label in one.labels}
    assert declared == BY_THE_ROUTER.keys() | BY_THE_FLEET | {"tenant", "python_version"}
