"""Who has a vote against a pod: a tenant or an address, under any names that it makes up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.admission.tenant import Admitted, Tenant
from router.decision import Candidate, Cost, Direct, RouteDecision
from router.frontends.http.exchange import Exchange
from router.request.context import RequestContext
from router.types import PodState
from tests.api.edges import edge_of
from tests.api.test_openai_edge import Client, Forwarder, served
from tests.kit.cores import JSON_HEADERS, CoreOfPods
from tests.kit.scenes import make_pod

NAMES = [f"made-up-{number}" for number in range(20)]
BAD, WELL = "b" * 3 + "a" * 3, "a"
"""The pods that a client asks: 404 at the first one, where it asks for three answers; else it is served."""


def state_after(askers: Sequence[tuple[str, str, str, str]]) -> PodState:
    """The state of the pod `a` after requests with this owner, tenant and name, to each of these pods."""
    pods = [make_pod(name, models=("m",)) for name in "ab"]
    core = CoreOfPods(pods)

    async def forward(context: RequestContext, client: Exchange) -> None:
        asked = client.head.target.decode()
        context.decision = RouteDecision("scripted", "1", (Candidate(Direct(core.pod(asked)), Cost.of([], 1.0), 0),))
        tracker = core.core.tracker(context)
        tracker.begin(tracker.first(0.0), 0.0)
        tracker.head(asked, 404 if asked == "a" and context.head.peer == "evil" else 200, JSON_HEADERS, 0.0)
        tracker.complete(0.0)
        tracker.end(0.0)

    edge = edge_of(core, Forwarder(forward))
    core.breaker.ended("b", "", 0.0, is_served=False)  # so that successes are counted
    for owner, tenant, name, sequence in askers:
        for asked in sequence:
            client = Client(headers=[(b"x-tenant-id", name.encode())])
            client.admitted = Admitted(owner, Tenant(name=tenant))
            served(edge, client, peer="evil" if sequence == BAD else "good", target=asked.encode())
    status = core.fleet.status("a")
    assert status is not None
    return status.state


@pytest.mark.parametrize("owner", ["10.0.0.1", ""], ids=["one address", "one proxy"])
def test_made_up_names_of_one_client_have_one_vote(owner: str) -> None:
    """Where there are no keys."""
    assert state_after([("10.0.0.2", "", "", WELL), *((owner, "", name, BAD) for name in NAMES)]) is PodState.READY


@pytest.mark.parametrize(
    ("owner", "tenant"), [("10.0.0.{}", ""), ("tenant-{}", "tenant-{}")], ids=["by address", "by key"]
)
def test_clients_that_differ_have_a_vote_each(owner: str, tenant: str) -> None:
    bad = [(owner.format(number), tenant.format(number), "", BAD) for number in range(3, 9)]
    assert state_after([("10.0.0.2", "", "", WELL), *bad]) is PodState.EJECTED
