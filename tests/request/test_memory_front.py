"""A front without HTTP serves requests with the same core, and leaves nothing behind."""

from __future__ import annotations

import json

import pytest

from router.admission.admission_queue import AdmissionConfig
from router.admission.quotas import Quota
from router.admission.tenant import Slo, Tenant
from router.types import PrefixTrust
from tests.kit.memory_front import CHAT, TOKEN, USAGE, MemoryRouter


def test_a_stream_passes_byte_for_byte() -> None:
    """And is booked on its pod until it ends."""
    rig = MemoryRouter()
    served = rig.chat(stream_options={"include_usage": True})
    assert set(rig.known.ledger.inflight()) == {served.asked[0]}
    served.head()
    for piece in (TOKEN, TOKEN, USAGE):
        rig.now_s += 0.1
        served.piece(piece)
    served.end()
    assert (served.status, served.received) == (200, TOKEN + TOKEN + USAGE)
    assert (rig.ended(), rig.known.is_idle()) == ([("ok", 1)], True)


def test_the_next_request_with_the_prompt_goes_to_the_same_pod() -> None:
    """Its prefix is predicted there."""
    rig = MemoryRouter()
    for pod in "abc":
        rig.known.fleet.trust(pod, PrefixTrust.TRUSTED, "tested")
    first = rig.chat()
    first.head()
    first.piece(TOKEN)
    second = rig.chat()
    assert second.asked == first.asked
    assert second.context is not None and second.context.candidate is not None
    assert second.context.candidate.cached_tokens > 0
    for served in (first, second):
        served.leave()
    assert rig.known.is_idle()


@pytest.mark.parametrize("events", range(4))
def test_a_client_that_leaves_at_any_time_leaves_nothing(events: int) -> None:
    rig = MemoryRouter()
    served = rig.chat()
    if events > 0:
        served.head()
    for piece in (TOKEN, USAGE)[: max(events - 1, 0)]:
        served.piece(piece)
    served.leave()
    assert (rig.ended(), rig.known.is_idle()) == ([("client_gone", 1)], True)


def test_a_body_that_cannot_be_read_is_refused() -> None:
    """In the API's own shape; no prompt is read."""
    rig = MemoryRouter()
    served = rig.front.receive(CHAT, b'{"model": "unknown", "messages": [{}]}')
    assert (served.status, json.loads(served.received)["error"]["code"]) == (404, "model_not_found")
    assert (rig.read, rig.ended()) == ([], [("model_not_found", 0)])


def test_a_tenants_quota_refuses_before_the_prompt_is_read() -> None:
    rig, tenant = MemoryRouter(), Tenant(name="t", quotas=(Quota(requests_per_minute=1),))
    rig.chat(tenant).leave()
    assert rig.chat(tenant).status == 429
    assert (len(rig.read), rig.known.is_idle()) == (1, True)


def test_requests_wait_for_a_place_and_go_in_turn() -> None:
    """With the queue on, in front of pods that are busy."""
    rig = MemoryRouter(admission=AdmissionConfig(max_wait_ms=60_000.0), slo=Slo(ttft_ms=60_000.0, tpot_ms=100.0))
    served = [rig.chat(messages=[{"role": "user", "content": str(number)}]) for number in range(40)]
    assert any(not one.asked and not one.is_over for one in served)
    for _ in range(2000):
        rig.now_s += 0.01
        for one in served:
            if one.asked and not one.is_over:
                one.head()
                one.piece(TOKEN)
                one.end()
        rig.front.send_waiting()
    assert all(one.is_over for one in served)
    assert rig.known.is_idle()
    turns = [one.decision.scene.turn for one in rig.known.ended if one.decision]
    assert max(turns) <= len(served) + 1, "a request that is decided again is no more traffic"
