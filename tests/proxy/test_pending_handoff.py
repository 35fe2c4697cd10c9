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
    """Good until 10 s."""
    return PendingHandoff(offered, fleet.snapshot.pods[0].pod, 10.0)


def test_it_may_be_taken_once(fleet: Fleet) -> None:
    """Whoever comes second computes."""
    handoff = held(fleet)
    assert handoff.take(fleet, 9.9) is OFFERED
    assert handoff.take(fleet, 9.9) is None


def test_it_ends_by_our_own_clock(fleet: Fleet) -> None:
    """At the deadline, and for good."""
    handoff = held(fleet)
    assert handoff.take(fleet, 10.0) is None
    assert handoff.take(fleet, 1.0) is None


def test_it_ends_with_the_life_in_which_it_was_made(fleet: Fleet) -> None:
    """A restart empties the cache in which its blocks were."""
    handoff = held(fleet)
    fleet.restarted("p")
    assert handoff.take(fleet, 1.0) is None


def test_it_ends_with_its_pod(fleet: Fleet) -> None:
    """Even if another one comes under the same name."""
    handoff = held(fleet)
    pods = [fleet.snapshot.pods[0].pod]
    fleet.sync([])
    assert held_is_gone(handoff, fleet)
    handoff = PendingHandoff(OFFERED, pods[0], 10.0)
    fleet.sync(pods)
    assert held_is_gone(handoff, fleet)


def held_is_gone(handoff: PendingHandoff, fleet: Fleet) -> bool:
    return handoff.take(fleet, 1.0) is None


def test_none_may_have_been_offered(fleet: Fleet) -> None:
    """That is no handoff that was lost."""
    handoff = held(fleet, None)
    assert (handoff.offered, handoff.take(fleet, 1.0)) == (False, None)
