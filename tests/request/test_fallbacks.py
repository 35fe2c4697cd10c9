"""Another model of a name serves what its target cannot: when, and when not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.admission.admission_queue import AdmissionConfig
from router.admission.names import ModelName, Names
from router.admission.quotas import Quota
from router.admission.tenant import Slo, Tenant, allowed_names
from router.errors import ConnectFailed, UpstreamBroken, UpstreamTimeout
from router.fleet.fleet import PodEvent
from router.observe.declared import of_requests
from router.request.context import ttft_of_one_pod
from router.types import PrefixTrust
from tests.kit.memory_front import TOKEN, MemoryExchange, MemoryRouter

NAMES = Names({"chat": ModelName("chat", {"m": 1.0}, (), ("gone", "n"))}, (), frozenset({"m", "n", "gone"}))


def rig_of(**settings: Any) -> MemoryRouter:
    """Pods `a` and `b` serve the target, `c` the fallback."""
    rig = MemoryRouter(NAMES, **settings)
    rig.known.fleet.describe("c", models=("n",), version="0.32.0")
    return rig


def is_served_by_fallback(rig: MemoryRouter, served: MemoryExchange, reason: str) -> bool:
    """Whether `c` has the request, with its model, and the client, receipts and metrics know it."""
    assert served.asked[-1] == "c" and served.context is not None and served.tracker is not None
    assert msgspec.json.decode(served.context.request.body)["model"] == "n"
    served.head()
    served.piece(TOKEN)
    served.end()
    headers = dict(served.tracker.headers())
    assert (headers[b"x-warmroute-model"], headers[b"x-warmroute-fallback"]) == (b"n", reason.encode())
    (ended,) = rig.known.ended
    assert (ended.result, ended.name, ended.model, ended.fallback) == ("ok", "chat", "n", reason)
    (labels, count), *others = rig.known.metrics[of_requests.FALLBACKS].items()
    assert (labels, count.value, others) == (("chat", "n", reason), 1, [])
    return rig.known.is_idle()


def test_pods_that_cannot_be_reached() -> None:
    """Each is tried first."""
    rig = rig_of()
    served = rig.chat(model="chat")
    for _ in range(2):
        served.fail(ConnectFailed("gone", pod=served.asked[-1]))
    assert {*served.asked[:2]} == {"a", "b"}
    assert is_served_by_fallback(rig, served, "connect_failed")


def test_the_time_of_failed_attempts_is_not_that_of_the_fallback() -> None:
    """Its first token is no vote on its pod, and does not correct its prices."""
    rig = rig_of()
    for model in ("chat", "n"):
        served = rig.chat(model=model)
        for _ in range(2 if model == "chat" else 0):
            rig.now_s += 30.0
            served.fail(ConnectFailed("gone", pod=served.asked[-1]))
        assert served.context is not None and served.asked[-1] == "c"
        served.head()
        served.piece(TOKEN)
        assert (ttft_of_one_pod(served.context) is None) == (model == "chat")
        served.end()


def test_pods_that_are_ejected() -> None:
    rig = rig_of()
    for pod in "ab":
        rig.known.fleet.event(pod, PodEvent.EJECT)
    assert is_served_by_fallback(rig, rig.chat(model="chat"), "no_ready_pod")


def test_pods_that_have_left() -> None:
    rig = rig_of()
    rig.known.fleet.sync([status.pod for status in rig.known.fleet.snapshot.pods if status.pod.id == "c"])
    assert is_served_by_fallback(rig, rig.chat(model="chat"), "no_ready_pod")


def test_a_context_that_is_too_short() -> None:
    rig = rig_of()
    for pod in "ab":
        rig.known.fleet.describe(pod, models=("m",), version="0.32.0", max_model_len_tokens=1)
        rig.known.fleet.trust(pod, PrefixTrust.TRUSTED, "tested")
    assert is_served_by_fallback(rig, rig.chat(model="chat"), "context_length_exceeded")


def test_an_slo_that_cannot_be_met() -> None:
    """The queue of the target refuses it."""
    rig = rig_of(admission=AdmissionConfig(max_wait_ms=0.0), slo=Slo(ttft_ms=1.0))
    assert is_served_by_fallback(rig, rig.chat(model="chat"), "overloaded")


# --- or it waits for a pod again ---


def held(rig: MemoryRouter, model: str = "m", **fields: Any) -> MemoryExchange:
    """A request that may wait for pods has been sent to one, with the quota of its tenant."""
    served = rig.chat(Tenant(name="t", quotas=(Quota(requests_per_minute=1),)), model=model, **fields)
    assert served.context is not None
    served.context.held_until_s = 900.0
    return served


@pytest.mark.parametrize("model", ["m", "chat"])
def test_a_request_that_no_pod_has_received_waits_for_the_next_one(model: str) -> None:
    """After fallbacks, if there are any. It counts once, and its time begins when the pod is there."""
    rig = rig_of()
    rig.known.fleet.event("b", PodEvent.EJECT)
    served = held(rig, model)
    while not served.waits_until_s:
        served.fail(ConnectFailed("gone", pod=served.asked[-1]))
    assert served.asked == ["a"] if model == "m" else ["a", "c"]
    rig.now_s += 500.0
    served.resume()
    served.head()
    served.piece(TOKEN)
    served.end()
    (ended,) = rig.known.ended
    assert (ended.result, served.waits_until_s, rig.known.is_idle()) == ("ok", 900.0, True)
    assert ended.failures == () and ended.e2e_ms < 1000 and ended.ttft_ms is not None and ended.ttft_ms < 1000


@pytest.mark.parametrize("error", [UpstreamBroken, UpstreamTimeout])
def test_one_that_a_pod_may_have_received_does_not(error: type[UpstreamBroken]) -> None:
    rig = rig_of(retries=0)
    served = held(rig)
    served.fail(error("cut", pod=served.asked[-1]))
    assert (served.status in (502, 504), served.waits_until_s) == (True, 0)


def test_one_without_a_wait_does_not() -> None:
    rig = rig_of(retries=0)
    served = rig.chat(model="m")
    served.fail(ConnectFailed("gone", pod=served.asked[-1]))
    assert (served.status, served.waits_until_s) == (502, 0)


def test_a_client_with_a_limit_of_its_own_chooses_no_fallback() -> None:
    """No pod could keep it."""
    rig = rig_of(admission=AdmissionConfig())
    body = b'{"model":"chat","messages":[{"role":"user","content":"hi"}],"stream":true}'
    refused = rig.front.receive("/v1/chat/completions", body, headers=[(b"x-request-deadline-ms", b"0")])
    assert (refused.status, refused.asked, rig.known.is_idle()) == (503, [], True)


def test_a_last_pod_that_answers_503() -> None:
    """Its answer is not the client's while a fallback can serve."""
    rig = rig_of()
    rig.known.fleet.event("b", PodEvent.EJECT)
    served = rig.chat(model="chat")
    assert not served.head(503, is_stream=False)
    assert is_served_by_fallback(rig, served, "upstream_broken")


def test_without_a_ready_fallback_the_last_pods_own_answer_is_relayed() -> None:
    rig = rig_of()
    for pod in "bc":
        rig.known.fleet.event(pod, PodEvent.EJECT)
    served = rig.chat(model="chat")
    assert served.head(503, is_stream=False) and served.status == 503


def test_a_request_that_two_pods_have_not_survived_reaches_no_third() -> None:
    rig = rig_of()
    served = rig.chat(model="chat")
    for _ in range(2):
        served.fail(UpstreamBroken("cut", pod=served.asked[-1]))
    assert (served.status, len(served.asked), rig.known.is_idle()) == (502, 2, True)


def test_a_pod_that_works_for_too_long_is_not_worked_for_again() -> None:
    rig = rig_of(retries=0)
    served = rig.chat(model="chat")
    served.fail(UpstreamTimeout("silent", pod=served.asked[-1]))
    assert (served.status, len(served.asked)) == (504, 1)


def test_nothing_is_served_again_after_the_first_piece() -> None:
    rig = rig_of()
    served = rig.chat(model="chat")
    served.head()
    served.piece(TOKEN)
    served.fail(UpstreamBroken("cut", pod=served.asked[-1]))
    assert (len(served.asked), served.received) == (1, TOKEN)


@pytest.mark.parametrize("model", ["m", "n"])
def test_who_asks_for_the_model_gets_no_other(model: str) -> None:
    rig = rig_of()
    for pod in "abc":
        if model == ("n" if pod == "c" else "m"):
            rig.known.fleet.event(pod, PodEvent.EJECT)
    assert rig.chat(model=model).status == 503


def test_a_tenant_gets_no_model_that_it_may_not_use() -> None:
    rig = rig_of()
    for pod in "ab":
        rig.known.fleet.event(pod, PodEvent.EJECT)
    served = rig.chat(Tenant(name="t", models=allowed_names(["chat", "m"])), model="chat")
    assert (served.status, rig.known.ended[0].fallback) == (503, "")


def test_a_tenants_salt_goes_with_the_request() -> None:
    """Its prefixes stay its own."""
    rig = rig_of()
    rig.known.fleet.event("a", PodEvent.EJECT)
    rig.known.fleet.event("b", PodEvent.EJECT)
    served = rig.chat(Tenant(name="t", salt="s"), model="chat")
    assert served.context is not None and msgspec.json.decode(served.context.request.body)["cache_salt"] == "s"


def test_quotas_of_the_fallback_count_and_the_request_counts_once() -> None:
    rig = rig_of()
    quotas = (Quota(requests_per_minute=2), Quota(model="n", requests_per_minute=1))
    for pod in "ab":
        rig.known.fleet.event(pod, PodEvent.EJECT)
    tenant = Tenant(name="t", quotas=quotas)
    found = [rig.chat(tenant, model="chat") for _ in range(2)]
    assert [one.status for one in found] == [0, 429] and found[0].asked == ["c"]
    found[0].leave()
    assert rig.chat(Tenant(name="t", quotas=quotas[:1]), model="n").asked == ["c"]


def test_two_pods_are_the_most_that_may_fail_a_request_of_all_its_models() -> None:
    """The request may be the cause: one pod of the target and one of the fallback."""
    rig = rig_of()
    rig.known.fleet.describe("b", models=("n",), version="0.32.0")
    served = rig.chat(model="chat")
    for _ in range(2):
        served.fail(UpstreamBroken("cut", pod=served.asked[-1]))
    assert (served.status, len(served.asked), rig.known.is_idle()) == (502, 2, True)


def test_what_a_client_leaves_at_a_fallback_costs_the_time_on_its_pod() -> None:
    """The failures of the target's pods are none of this attempt."""
    rig = rig_of(records_all=True)
    served = rig.chat(model="chat", stream=False)
    for _ in range(2):
        served.fail(ConnectFailed("gone", pod=served.asked[-1]))
    rig.now_s += 10.0
    served.leave()
    bill = msgspec.json.decode(rig.known.usage_lines[0])
    assert (served.asked[-1], bill["prompt_tokens"]) == ("c", 50) and bill["output_tokens"] > 0


def test_a_decision_is_not_in_flight_once_a_quota_refuses_its_request_after_the_wait() -> None:
    rig = rig_of()
    rig.known.fleet.event("b", PodEvent.EJECT)
    served = held(rig)
    served.fail(ConnectFailed("gone", pod="a"))
    rig.chat(Tenant(name="t", quotas=(Quota(requests_per_minute=1),)), model="n").leave()
    served.resume()
    assert (served.status, rig.known.recent.in_flight_tokens()) == (429, {})
