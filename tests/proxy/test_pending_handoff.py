"""Whether a handoff may still be used."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.decision import Split
from router.engines.handoff.dialect import Handoff, Pair
from router.engines.handoff.vllm_connectors import Nixl
from router.fleet.fleet import Fleet
from router.frontends.http.kv_transfer import SplitAttempt
from router.types import Endpoint, Pod, PodSpeed

OFFERED = Handoff({"remote_engine_id": "e"})
BODY = b'{"model": "m"}'


@pytest.fixture
def fleet() -> Fleet:
    """One prefill pod."""
    fleet = Fleet()
    fleet.sync([Pod(id="p", url="http://p", engine="vllm", speed=PodSpeed(1.0, 0.01, 0.0))])
    return fleet


def held(fleet: Fleet, age_s: float = 0.0) -> SplitAttempt:
    """An attempt whose transfer began `age_s` ago."""
    pod, request = fleet.snapshot.pods[0].pod, SimpleNamespace(endpoint=Endpoint.CHAT, body=BODY)
    context = cast(Any, SimpleNamespace(request=request, handed_over_cached_tokens=3))
    plan, pair = Split(pod, pod), Pair(pod, pod, 1)
    tracker = cast(Any, SimpleNamespace(context=context))
    return SplitAttempt(tracker, plan, Nixl(), pair, last=False, began_s=time.monotonic() - age_s)


def is_sent(attempt: SplitAttempt, fleet: Fleet, offered: Handoff | None = OFFERED) -> bool:
    return attempt.decode_body(offered, fleet, attempt.body_after(offered)) != BODY


def test_a_handoff_is_sent_once(fleet: Fleet) -> None:
    """A second request has the client's own body."""
    attempt = held(fleet)
    assert (is_sent(attempt, fleet), attempt.result) == (True, "ok")
    assert (is_sent(attempt, fleet), attempt.result) == (False, "dropped")


def test_a_handoff_expires_by_the_routers_clock(fleet: Fleet) -> None:
    """After `hold_s` of the dialect; its cached tokens are not reported."""
    assert is_sent(held(fleet, Nixl.hold_s - 1), fleet)
    attempt = held(fleet, Nixl.hold_s)
    assert (is_sent(attempt, fleet), attempt.result, attempt.sent_handoff) == (False, "dropped", False)
    assert attempt.context.handed_over_cached_tokens is None


def test_a_handoff_ends_with_the_process_of_its_pod(fleet: Fleet) -> None:
    """A restart empties the cache."""
    attempt = held(fleet)
    fleet.restarted("p")
    assert not is_sent(attempt, fleet)


def test_a_handoff_ends_with_its_pod(fleet: Fleet) -> None:
    """Also if another pod has the same id."""
    attempt, pods = held(fleet), [fleet.snapshot.pods[0].pod]
    fleet.sync([])
    assert not is_sent(attempt, fleet)
    fleet.sync(pods)
    assert not is_sent(attempt, fleet)


def test_a_missing_offer_is_not_a_dropped_handoff(fleet: Fleet) -> None:
    """The metric distinguishes them."""
    attempt = held(fleet)
    assert (is_sent(attempt, fleet, None), attempt.result) == (False, "not_offered")
