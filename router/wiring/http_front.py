"""Builds what serves the requests of a core over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from router.config.schema import Edge
from router.frontends.body_edits import UuidRemoval
from router.frontends.http.attempt import Forwarder
from router.frontends.http.headers import HeaderRules
from router.frontends.http.kv_transfer import PullExecutor, SplitExecutor
from router.frontends.http.upstream import UpstreamPools, UpstreamSender
from router.frontends.prompt_readers import NoPromptReader, PromptReader
from router.frontends.response_locator import ResponseLocator
from router.frontends.step_executor import QueueTasks, StepExecutor
from router.observe.declared import of_requests
from router.observe.metrics import Metrics
from router.request.core import Core


def build_steps(
    core: Core,
    readers: Mapping[str, PromptReader],
    responses: ResponseLocator,
    metrics: Metrics,
    next_exchange: Callable[[], Awaitable[None]] | None = None,
    unlisted: PromptReader | None = None,
) -> StepExecutor:
    """What does the work of preparing requests. `next_exchange`: see `StepExecutor`."""
    queues = QueueTasks(core.queues, metrics[of_requests.QUEUED].labels().set) if core.queues is not None else None
    return StepExecutor(
        readers=readers,
        unlisted=unlisted or NoPromptReader(lambda *_: None),
        responses=responses,
        next_exchange=next_exchange,
        queues=queues,
        uuids=UuidRemoval(),
    )


def build_forwarder(
    core: Core,
    steps: StepExecutor,
    pools: UpstreamPools,
    edge: Edge,
    metrics: Metrics,
    kind: Callable[..., Forwarder] = Forwarder,
) -> Forwarder:
    """`kind`: makes one of the parts of a `Forwarder`."""
    rules = HeaderRules(trust_engine_fields=edge.trust_engine_fields, forward=edge.forward_headers)
    sender, facts = UpstreamSender(pools.of, rules), core.requests.rules.handoff_facts
    splits = SplitExecutor(core.state, facts, sender, metrics)
    return kind(core.requests, steps, sender, splits, PullExecutor(core.state.fleet, facts, sender))
