"""Builds what serves the requests of a core through a gateway."""

from __future__ import annotations

from functools import partial

from router.config.edge_schema import Edge
from router.config.listen_schema import PickerListen
from router.frontends.extproc.picks import PickForwarder
from router.frontends.http.headers import HeaderRules
from router.frontends.http.kv_transfer import PullExecutor, SplitExecutor
from router.frontends.http.upstream import UpstreamPools, UpstreamSender
from router.frontends.step_executor import StepExecutor
from router.observe.metrics import Metrics
from router.request.core import Core
from router.wiring.http_front import build_forwarder
from router.wiring.program import Front


def picker_front(picker: PickerListen) -> Front:
    """Serves gateways: names the pods of requests, or sends requests to them."""
    if picker.requests == "picker":
        return Front(build_forwarder, has_objectives=True)
    return Front(partial(build_pick_forwarder, picker), hands_over=True, has_objectives=True)


def build_pick_forwarder(
    picker: PickerListen,
    core: Core,
    steps: StepExecutor,
    pools: UpstreamPools,
    edge: Edge,
    metrics: Metrics,
) -> PickForwarder:
    rules = HeaderRules(trust_engine_fields=edge.trust_engine_fields, forward=edge.forward_headers)
    sender, facts = UpstreamSender(pools.of, rules), core.requests.rules.handoff_facts
    splits = SplitExecutor(core.state, facts, sender, metrics)
    return PickForwarder(core.requests, steps, sender, splits, PullExecutor(core.state.fleet, facts, sender), picker)
