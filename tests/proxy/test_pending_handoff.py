"""Whether a handoff may still be used."""

from __future__ import annotations

import pytest

from router.engines.handoff.dialect import Handoff
from router.fleet.fleet import Fleet
from router.proxy.split_executor import PendingHandoff
from router.types import Pod, PodSpeed

OFFERED = Handoff({"remote_engine_id": "e"})


@pytest.fixture
def fleet() -> Fleet:
    """One prefill pod."""
    fleet = Fleet()
    fleet.sync([Pod(id="p", url="http://p", engine="vllm", speed=PodSpeed(1.0, 0.01, 0.0))])
    return fleet


def held(fleet: Fleet, offered: Handoff | None = OFFERED) -> PendingHandoff:
    """Expires at 10 s."""
    return PendingHandoff(offered, fleet.snapshot.pods[0].pod, 10.0)


def test_a_handoff_is_taken_once(fleet: Fleet) -> None:
    """A second taker receives None."""
    handoff = held(fleet)
    assert handoff.take(fleet, 9.9) is OFFERED
    assert handoff.take(fleet, 9.9) is None


def test_a_handoff_expires_by_the_routers_clock(fleet: Fleet) -> None:
    """At the deadline, permanently."""
    handoff = held(fleet)
    assert handoff.take(fleet, 10.0) is None
    assert handoff.take(fleet, 1.0) is None


def test_a_handoff_ends_with_the_process_of_its_pod(fleet: Fleet) -> None:
    """A restart empties the cache."""
    handoff = held(fleet)
    fleet.restarted("p")
    assert handoff.take(fleet, 1.0) is None


def test_a_handoff_ends_with_its_pod(fleet: Fleet) -> None:
    """Also if another pod has the same id."""
    handoff = held(fleet)
    pods = [fleet.snapshot.pods[0].pod]
    fleet.sync([])
    assert held_is_gone(handoff, fleet)
    handoff = PendingHandoff(OFFERED, pods[0], 10.0)
    fleet.sync(pods)
    assert held_is_gone(handoff, fleet)


def held_is_gone(handoff: PendingHandoff, fleet: Fleet) -> bool:
    return handoff.take(fleet, 1.0) is None


def test_a_missing_offer_is_not_a_dropped_handoff(fleet: Fleet) -> None:
    """The metric distinguishes them."""
    handoff = held(fleet, None)
    assert (handoff.offered, handoff.take(fleet, 1.0)) == (False, None)
