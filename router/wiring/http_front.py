"""Builds what serves the requests of a core over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from router.config.schema import Edge
from router.frontends.http.attempt import Forwarder
from router.frontends.http.headers import HeaderRules
from router.frontends.http.kv_transfer import PullExecutor, SplitExecutor
from router.frontends.http.upstream import UpstreamPools, UpstreamSender
from router.frontends.prompt_readers import NoPromptReader, PromptReader
from router.frontends.response_locator import ResponseLocator
from router.observe.metrics import Metrics
from router.request.life import Core


def build_forwarder(
    core: Core,
    pools: UpstreamPools,
    edge: Edge,
    metrics: Metrics,
    readers: Mapping[str, PromptReader],
    responses: ResponseLocator,
    next_exchange: Callable[[], Awaitable[None]] | None = None,
    unlisted: PromptReader | None = None,
    kind: Callable[..., Forwarder] = Forwarder,
) -> Forwarder:
    """`next_exchange`, `unlisted`: see `Waits`. `kind`: makes one of the parts of a `Forwarder`."""
    rules = HeaderRules(trust_engine_fields=edge.trust_engine_fields, forward=edge.forward_headers)
    sender, facts = UpstreamSender(pools.of, rules), core.rules.handoff_facts
    return kind(
        core=core,
        readers=readers,
        unlisted=unlisted or NoPromptReader(lambda *_: None),
        responses=responses,
        next_exchange=next_exchange,
        sender=sender,
        splits=SplitExecutor(core.state, facts, sender, metrics),
        pulls=PullExecutor(core.state.fleet, facts, sender),
    )
