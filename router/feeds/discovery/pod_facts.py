"""Builds the definition of a discovered pod from its address and the facts that are known about it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from pydantic import ValidationError

from router.addresses import bracketed, join_address, url_host
from router.config.discovery_schema import DiscoveredPods
from router.config.mistakes import explain_mistakes
from router.config.pod_schema import HOST, KvEvents, PodConfig
from router.engines.engine_catalog import DEFAULT_HANDOFFS
from router.errors import ConfigError
from router.types import Role

Facts: TypeAlias = Mapping[str, Any]
"""Values of fields of a `PodConfig`."""
NO_FACTS: Facts = MappingProxyType({})


def discovered_pod(
    host: str, port: int, group: DiscoveredPods, facts: Facts = NO_FACTS, hints: Facts = NO_FACTS
) -> PodConfig:
    """The pod at an address. Settings of its group override `hints`, and `facts` both. Raises `ConfigError`."""
    scheme = "https" if group.tls else "http"
    return pod_at(f"{scheme}://{join_address(host, port)}", group, facts, hints)


def pod_at(url: str, group: DiscoveredPods, facts: Facts, hints: Facts = NO_FACTS) -> PodConfig:
    """The same for a URL, whose host replaces `{host}` in the endpoints of KV events."""
    known = {**hints, **{name: getattr(group, name) for name in group.model_fields_set}, **facts, "url": url}
    if known.get("role", Role.BOTH) != Role.BOTH and not known.get("handoff"):
        known["handoff"] = DEFAULT_HANDOFFS.get(known.get("engine", "vllm"), "")
    try:
        pod = PodConfig.model_validate(known)
    except ValidationError as error:
        raise ConfigError(explain_mistakes(error, PodConfig, known, lambda _: (url, 0))) from None
    if not isinstance(events := pod.kv_events, KvEvents):
        return pod
    host, replay = bracketed(url_host(url)), events.replay_endpoint
    endpoints = KvEvents(
        endpoint=events.endpoint.replace(HOST, host), replay_endpoint=replay and replay.replace(HOST, host)
    )
    return pod.model_copy(update={"kv_events": endpoints})
