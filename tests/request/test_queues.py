"""Requests in front of busy pods, in memory: they wait, go in turn, leave, or are refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.admission.admission_queue import AdmissionConfig
from router.admission.tenant import Slo, Tenant
from router.errors import ConnectFailed, UpstreamBroken, UpstreamError
from tests.kit.memory_front import CHAT, TOKEN, USAGE, MemoryExchange, MemoryRouter

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
SLO = Slo(ttft_ms=60_000.0, tpot_ms=100.0)
FAILURES: list[type[UpstreamError]] = [ConnectFailed, UpstreamBroken]
TENANTS = [Tenant(name="t"), Tenant(name="u", weight=3.0), Tenant(name="vip", band=1)]


def router(**limits: float) -> MemoryRouter:
    return MemoryRouter(admission=AdmissionConfig(**limits), slo=SLO)  # type: ignore[arg-type]


class AnyTraffic(RuleBasedStateMachine):
    """Clients come and leave, pods answer and fail, and time passes, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.router = router(max_wait_ms=1000.0, max_requests=8)
        self.served: list[MemoryExchange] = []

    def going_on(self, *, sent: bool) -> list[MemoryExchange]:
        return [one for one in self.served if not one.is_over and bool(one.asked) == sent]

    @rule(tenant=st.sampled_from(TENANTS), number=st.integers(1, 6))
    def clients_come(self, tenant: Tenant, number: int) -> None:
        self.served += [self.router.chat(tenant) for _ in range(number)]

    @precondition(lambda self: self.going_on(sent=False))
    @rule(at=st.integers(0, 99))
    def a_client_leaves_the_queue(self, at: int) -> None:
        waiting = self.going_on(sent=False)
        waiting[at % len(waiting)].leave()

    @precondition(lambda self: self.going_on(sent=True))
    @rule(at=st.integers(0, 99), pieces=st.integers(0, 2))
    def a_client_leaves_its_answer(self, at: int, pieces: int) -> None:
        one = self.going_on(sent=True)[at % len(self.going_on(sent=True))]
        if pieces and not one.status:
            one.head()
        for _ in range(pieces):
            one.piece(TOKEN)
        one.leave()

    @precondition(lambda self: self.going_on(sent=True))
    @rule(number=st.integers(1, 9))
    def pods_answer(self, number: int) -> None:
        for one in self.going_on(sent=True)[:number]:
            one.head()
            one.piece(TOKEN)
            one.piece(USAGE)
            one.end()

    @precondition(lambda self: self.going_on(sent=True))
    @rule(error=st.sampled_from(FAILURES))
    def a_pod_fails(self, error: type[UpstreamError]) -> None:
        one = self.going_on(sent=True)[0]
        one.fail(error("gone", pod=one.asked[-1]))

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.router.now_s += seconds
        self.router.front.send_waiting()

    @invariant()
    def who_waits_is_counted_and_few(self) -> None:
        waiting = self.going_on(sent=False)
        assert len(waiting) == self.router.known.counted("warmroute_queue_requests") <= 8
        assert {one.status for one in self.served if one.is_over} <= {0, 200, 429, 502, 503}
        refused = [one for one in self.served if one.is_over and not one.asked and not one.disconnected]
        assert {one.status for one in refused} <= {429, 503}

    def teardown(self) -> None:
        """All that is left comes to its end, and nothing stays behind."""
        for _ in range(100):
            if all(one.is_over for one in self.served):
                break
            self.router.now_s += 0.2
            for one in self.going_on(sent=True):
                one.head()
                one.piece(TOKEN)
                one.end()
            self.router.front.send_waiting()
        assert len(self.router.ended()) == len(self.served) and self.router.known.is_idle()


TestAnyTraffic = AnyTraffic.TestCase


@pytest.mark.parametrize(
    ("deadline", "status", "code"),
    [(b"1", 503, "overloaded"), (b"60000", 0, ""), (b"soon", 400, "invalid_request_error")],
)
def test_a_client_may_say_when_its_first_token_is_too_late(deadline: bytes, status: int, code: str) -> None:
    """It is refused at once, with the time to come back."""
    front = router().front
    served = front.receive(CHAT, BODY, headers=[(b"x-request-deadline-ms", deadline)])
    assert served.status == status
    if status:
        error = json.loads(served.received)["error"]
        assert code in (error["code"], error["type"]) and not served.asked
