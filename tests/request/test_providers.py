"""A provider of hosted models serves what no pod can: when, with what, and for how much money."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.admission.names import ModelName, Names
from router.admission.quotas import Quota
from router.admission.tenant import Tenant, allowed_names
from router.config.provider_schema import Provider
from router.errors import ConnectFailed, UpstreamBroken, UpstreamTimeout
from router.fleet.fleet import PodEvent
from router.observe.declared import of_requests
from router.observe.receipts import receipt
from router.request.error_responses import error_body
from router.request.hosted import FAILURES_TO_PAUSE, PAUSE_S, PRIOR_TTFT_MS
from tests.kit.memory_front import TOKEN, USAGE, MemoryExchange, MemoryRouter

PRICE = {"prompt": 2.0, "cached": 1.0, "output": 10.0}
ASKED = "provider/hosted"


def provider(name: str = "hosted", **fields: Any) -> Provider:
    usual = {"url": "https://example.com", "model": "there", "key_file": "/key", "price": PRICE, "budget_per_hour": 1.0}
    return Provider(name=name, **{"max_output_tokens": 100, **usual, **fields})


def rig_of(*fallbacks: str, providers: list[Provider] | None = None, **settings: Any) -> MemoryRouter:
    """Pods `a` and `b` serve the target, `c` another model."""
    names = Names({"chat": ModelName("chat", {"m": 1.0}, (), fallbacks or ("hosted",))}, (), frozenset({"m"}))
    rig = MemoryRouter(names, providers=[provider()] if providers is None else providers, **settings)
    rig.known.fleet.describe("c", models=("n",), version="0.32.0")
    return rig


def without_pods(*fallbacks: str, **settings: Any) -> MemoryRouter:
    rig = rig_of(*fallbacks, **settings)
    for pod in "abc":
        rig.known.fleet.event(pod, PodEvent.EJECT)
    return rig


def answered(served: MemoryExchange, end: bytes = USAGE) -> None:
    served.head()
    served.piece(TOKEN)
    served.piece(end)
    served.end()


def spent(rig: MemoryRouter) -> float:
    (meter,) = rig.known.quotas.money_of(ASKED, rig.known.core.rules.hosted["hosted"].provider.quotas, "hosted")
    return meter.own.total * 1e-9


def test_it_serves_where_no_pod_can_and_says_why_and_for_how_much() -> None:
    """50 tokens of the prompt and 2 of the answer: in the header, the receipt, the bill and metrics."""
    rig = without_pods(records_all=True)
    served = rig.chat(model="chat")
    assert served.asked == [ASKED] and served.tracker is not None
    answered(served)
    headers = dict(served.tracker.headers())
    assert headers[b"x-warmroute-fallback"] == b"no_ready_pod" and headers[b"x-warmroute-model"] == b"hosted"
    money = (50 * 2 + 2 * 10) / 1e6
    (ended,) = rig.known.ended
    found = receipt(ended)
    assert (found.result, found.pod, found.fallback, found.money) == ("ok", ASKED, "no_ready_pod", money)
    bill = msgspec.json.decode(rig.known.usage_lines[0])
    assert (bill["model"], bill["money"], bill["prompt_tokens"], bill["output_tokens"]) == ("hosted", money, 50, 2)
    assert rig.known.metrics[of_requests.PROVIDER_MONEY].labels("hosted").value == money
    assert spent(rig) == pytest.approx(money) and rig.known.is_idle()


def test_it_is_not_asked_while_a_pod_serves() -> None:
    rig = rig_of()
    rig.known.fleet.event("a", PodEvent.EJECT)
    served = rig.chat(model="chat")
    assert served.asked == ["b"]
    answered(served)
    assert spent(rig) == 0


@pytest.mark.parametrize("model", ["hosted", "m", "there"])
def test_nobody_can_ask_for_it(model: str) -> None:
    assert without_pods().chat(model=model).status == (503 if model == "m" else 404)


def test_other_models_before_it_are_asked_first() -> None:
    rig = rig_of("n", "hosted")
    for pod in "ab":
        rig.known.fleet.event(pod, PodEvent.EJECT)
    served = rig.chat(model="chat")
    assert served.asked == ["c"]
    served.fail(ConnectFailed("gone", pod="c"))
    assert served.asked == ["c", ASKED]
    answered(served)
    assert rig.known.ended[0].result == "ok"


def test_it_also_serves_what_two_pods_have_not_survived() -> None:
    """It is not one of them."""
    rig = rig_of()
    served = rig.chat(model="chat")
    for _ in range(2):
        served.fail(UpstreamBroken("cut", pod=served.asked[-1]))
    assert served.asked[2:] == [ASKED]


@pytest.mark.parametrize("error", [UpstreamTimeout, UpstreamBroken, ConnectFailed])
def test_the_next_serves_what_it_does_not(error: type[UpstreamBroken]) -> None:
    """Before the first byte, and with the client's own body again."""
    rig = without_pods("hosted", "other", providers=[provider(), provider("other", model="other-there")])
    served = rig.chat(model="chat", max_tokens=7, top_k=3)
    served.fail(error("no answer", pod=ASKED))
    assert served.asked == [ASKED, "provider/other"] and served.context is not None
    answered(served)
    assert (rig.known.ended[0].model, rig.known.ended[0].result) == ("other", "ok")
    assert rig.known.ended[0].fallback == "no_ready_pod", "why the target does not serve it"


def test_nothing_is_asked_again_after_the_first_piece() -> None:
    rig = without_pods("hosted", "other", providers=[provider(), provider("other")])
    served = rig.chat(model="chat")
    served.head()
    served.piece(TOKEN)
    served.fail(UpstreamBroken("cut", pod=ASKED))
    assert served.asked == [ASKED] and served.received == TOKEN and rig.known.is_idle()


def test_without_another_the_client_gets_its_error() -> None:
    rig = without_pods()
    served = rig.chat(model="chat")
    served.fail(UpstreamBroken("status 429", pod=ASKED))
    assert served.status == 502 and rig.known.is_idle()


def test_it_gets_the_fields_that_it_knows_and_its_own_name_of_the_model() -> None:
    rig = without_pods()
    tenant = Tenant(name="t", salt="s")
    served = rig.chat(tenant, model="chat", top_k=3, chat_template_kwargs={"a": 1}, temperature=0.5)
    assert served.context is not None
    body = msgspec.json.decode(served.context.request.body)
    assert body == {
        "model": "there",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
    }


@pytest.mark.parametrize(
    ("path", "kinds", "kept"),
    [
        ("/v1/chat/completions", ["function", "web_search"], ["function"]),
        ("/v1/responses", ["custom", "code_interpreter", "mcp"], ["custom"]),
        ("/v1/responses", ["web_search"], None),
        ("/v1/messages", ["bash_20250124", "web_search_20250305"], ["bash_20250124"]),
    ],
)
def test_tools_that_it_would_run_itself_stay_here(path: str, kinds: list[str], kept: list[str] | None) -> None:
    """They cost more than their tokens. Without any tool left, none can be chosen."""
    api = "anthropic" if path == "/v1/messages" else "openai"
    rig = without_pods(providers=[provider(api=api)])
    body = {"model": "chat", "max_tokens": 9, "tool_choice": "auto", "tools": [{"type": kind} for kind in kinds]}
    said = {"input" if path == "/v1/responses" else "messages": [{"role": "user", "content": "hi"}]}
    served = rig.front.receive(path, msgspec.json.encode({**body, **said}))
    assert served.asked == [ASKED] and served.context is not None
    sent = msgspec.json.decode(served.context.request.body)
    assert (sent.get("tools") and [tool["type"] for tool in sent["tools"]]) == kept
    assert ("tool_choice" in sent) is (kept is not None)


def test_a_client_sees_no_usage_that_it_has_not_asked_for() -> None:
    rig = without_pods()
    served = rig.chat(model="chat")
    answered(served)
    assert b"usage" not in served.received and b"[DONE]" in served.received


def test_an_endpoint_that_it_does_not_have_is_refused_with_the_reason() -> None:
    body = b'{"model":"chat","max_tokens":9,"messages":[{"role":"user","content":"hi"}]}'
    gone = rig_of()
    gone.known.fleet.sync([])
    for rig in (without_pods(), gone):
        served = rig.front.receive("/v1/messages", body)
        assert served.status == 503 and b"Provider hosted does not serve /v1/messages." in served.received


def test_the_data_of_a_tenant_can_stay() -> None:
    """Its clients get 503 with the reason, also where pods were asked and failed."""
    tenant = Tenant(name="t", data_stays=True)
    rig = without_pods()
    reached = rig_of()
    gone = rig_of()
    gone.known.fleet.sync([])
    failed = reached.chat(tenant, model="chat")
    for _ in range(2):
        failed.fail(ConnectFailed("gone", pod=failed.asked[-1]))
    for served in (rig.chat(tenant, model="chat"), failed, gone.chat(tenant, model="chat")):
        assert served.status == 503 and b"data: stay" in served.received
        assert served.error is not None and b"data: stay" in error_body(served.error, names_pods=False)
    assert rig.known.metrics[of_requests.PROVIDER_REFUSALS].labels("hosted", "data_stays").value == 1


def test_a_tenant_gets_none_that_it_may_not_use() -> None:
    rig = without_pods()
    assert rig.chat(Tenant(name="t", models=allowed_names(["chat", "m"])), model="chat").status == 503


def test_names_without_pods_of_their_target_are_served() -> None:
    """Whether any pod has ever served the target."""
    rig = rig_of()
    rig.known.fleet.sync([])
    served = rig.chat(model="chat")
    assert served.asked == [ASKED]


# --- money ---


def test_the_most_that_requests_can_cost_is_counted_until_they_end() -> None:
    """So that any number of them at once keeps the budget."""
    most = 100 * 10 / 1e6
    rig = without_pods(providers=[provider(budget_per_hour=2.5 * most)])
    found = [rig.chat(model="chat") for _ in range(3)]
    assert [one.status for one in found] == [0, 0, 503] and b"its budget of this hour is used" in found[2].received
    answered(found[0])
    assert rig.chat(model="chat").asked == [ASKED]


def test_a_tenants_own_budget_is_kept() -> None:
    rig = without_pods()
    tenant = Tenant(name="t", quotas=(Quota(money_per_hour=0.0015),))
    assert [rig.chat(tenant, model="chat").status for _ in range(2)] == [0, 503]
    assert rig.chat(model="chat").asked == [ASKED]


def test_a_budget_is_free_again_after_an_hour() -> None:
    rig = without_pods(providers=[provider(budget_per_hour=0.0011)])
    answered(rig.chat(model="chat"))
    for later_s, status in ((3500.0, 503), (200.0, 0)):
        rig.now_s += later_s
        assert rig.chat(model="chat").status == status


def test_a_usage_that_cannot_be_true_costs_no_more_than_the_most() -> None:
    rig = without_pods()
    lie = b'data: {"choices":[],"usage":{"prompt_tokens":900000000,"completion_tokens":900000000}}\n\ndata: [DONE]\n\n'
    answered(rig.chat(model="chat"), lie)
    assert spent(rig) == pytest.approx((50 * 2 + 100 * 10) / 1e6, abs=1e-5)


def test_what_it_may_have_computed_stays_counted() -> None:
    rig = without_pods()
    for error in (UpstreamTimeout, UpstreamBroken):
        rig.chat(model="chat").fail(error("no answer", pod=ASKED))
    assert spent(rig) == pytest.approx((50 * 2 + 100 * 10) / 1e6, rel=0.1)


def test_one_that_fails_in_a_row_is_left_out_for_a_while() -> None:
    rig = without_pods()
    for number in range(FAILURES_TO_PAUSE):
        rig.chat(Tenant(name=f"t{number % 2}"), model="chat").fail(UpstreamBroken("cut", pod=ASKED))
    refused = rig.chat(model="chat")
    assert refused.asked == [] and b"failed 3 times in a row" in refused.received
    rig.now_s += PAUSE_S
    assert rig.chat(model="chat").asked == [ASKED]


def test_a_client_that_leaves_does_not_keep_it_left_out() -> None:
    """Its time is over, and how often it failed before counts no more."""
    rig = without_pods()
    for number in range(FAILURES_TO_PAUSE):
        rig.chat(Tenant(name=f"t{number}"), model="chat").fail(UpstreamBroken("cut", pod=ASKED))
    rig.now_s += PAUSE_S
    rig.chat(Tenant(name="evil"), model="chat").leave()
    assert rig.chat(Tenant(name="good"), model="chat").asked == [ASKED]


def test_requests_of_one_client_do_not_take_it_from_others() -> None:
    """They may be the cause, such as those whose answers take too long; not of a connection that is refused."""
    for error, asked in ((UpstreamTimeout, [ASKED]), (UpstreamBroken, [ASKED]), (ConnectFailed, [])):
        rig = without_pods()
        for _ in range(FAILURES_TO_PAUSE):
            rig.chat(Tenant(name="evil"), model="chat", stream=False).fail(error("no answer", pod=ASKED))
        assert rig.chat(Tenant(name="good"), model="chat").asked == asked


def test_an_answer_without_a_usage_costs_what_its_length_allows() -> None:
    """One that is no stream has no events that would be counted."""
    for words in (5, 100):
        rig = without_pods()
        served = rig.chat(model="chat", stream=False)
        served.head(is_stream=False)
        answer = b'{"choices":[{"message":{"content":"%b"}}]}' % (b"w " * words)
        served.piece(answer)
        served.end()
        assert spent(rig) == pytest.approx((50 * 2 + min(len(answer), 100) * 10) / 1e6)


def test_an_error_of_its_own_is_no_reason_not_to_ask_it() -> None:
    """Also where it is the one after which it is left out for a while."""
    rig = without_pods()
    for _ in range(FAILURES_TO_PAUSE):
        served = rig.chat(model="chat")
        served.fail(ConnectFailed("gone", pod=ASKED))
    assert served.status == 502 and not rig.known.metrics[of_requests.PROVIDER_REFUSALS].series()


def test_a_decision_about_pods_that_failed_is_not_in_flight_once_a_provider_has_served() -> None:
    """Nor do shadow caches follow it."""
    rig = rig_of(records_all=True)
    served = rig.chat(model="chat")
    for _ in range(2):
        served.fail(ConnectFailed("gone", pod=served.asked[-1]))
    assert rig.known.shadows is not None and rig.known.recent.in_flight_tokens() != {}
    [*rig.known.shadows.follow()]
    assert rig.known.shadows._placed
    answered(served)
    [*rig.known.shadows.follow()]
    assert (rig.known.recent.in_flight_tokens(), rig.known.shadows._placed) == ({}, {})
    assert not any(one.tokens for one in rig.known.shadows._outstanding.values())


@pytest.mark.parametrize("rig", [without_pods(), rig_of()])
def test_what_it_served_is_explained(rig: MemoryRouter) -> None:
    """With its price and the reason, whether pods failed before or none was ready."""
    served = rig.chat(model="chat")
    while served.asked[-1] != ASKED:
        served.fail(ConnectFailed("gone", pod=served.asked[-1]))
    answered(served)
    found = rig.known.recent.explained("req-1")
    assert found is not None and found.explanation.why == "Provider hosted served it." and found.receipt.fallback
    (column,) = found.explanation.columns
    assert column.plan.money == found.receipt.money == (50 * 2 + 2 * 10) / 1e6


def test_its_first_token_is_learnt() -> None:
    rig = without_pods()
    hosted = rig.known.core.rules.hosted["hosted"]
    for _ in range(40):
        served = rig.chat(model="chat")
        rig.now_s += 0.2
        answered(served)
    assert hosted.ttft_ms == pytest.approx(200, rel=0.01) and PRIOR_TTFT_MS == 1000


# --- the file ---


def test_a_key_goes_to_no_server_without_encryption(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="https"):
        provider(url="http://example.com")
    assert provider(url="http://127.0.0.1:1").pod.bearer_file == ""
