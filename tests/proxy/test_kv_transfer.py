"""Two pods for one request, and each failure between them: one test for each row of the failure table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from router.decision import Direct, Pull, Split
from router.engines.engine_catalog import DIALECTS
from router.engines.handoff.dialect import Order
from router.engines.handoff.vllm_connectors import Nixl
from router.errors import RouterError, UpstreamBroken, UpstreamTimeout
from router.fleet.fleet import PodEvent
from router.frontends.http import attempt, kv_transfer, relay
from router.guards import Bound
from router.request.fleet_state import Clock
from router.types import InFlight, Link, Links, PodState
from tests.kit.cores import CHAT
from tests.kit.deadlines import DEADLINE_S
from tests.kit.scripted_pods import Asked, Behaviour, Client, Town, town

pytestmark = [pytest.mark.virtual, pytest.mark.anyio]

PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1, 2]], "remote_port": 5600}
TOKEN = {"choices": [{"index": 0, "delta": {"content": "hello"}}]}


def usage(cached_tokens: int) -> dict[str, Any]:
    details = {"cached_tokens": cached_tokens}
    return {"prompt_tokens": 50, "completion_tokens": 1, "prompt_tokens_details": details}


def answer(text: str = "hello", cached_tokens: int = 0, **fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    return {"id": "chatcmpl-1", "choices": [choice], "usage": usage(cached_tokens), **fields}


def saying(body: Mapping[str, Any], status: int = 200) -> Behaviour:
    """Always the same response."""

    async def behave(asked: Asked) -> None:
        await asked.answer(body, status)

    return behave


async def resetting(asked: Asked) -> None:
    asked.reset()


async def silent(asked: Asked) -> None:
    """Works until the router closes the connection."""
    await asked.hung_up()


async def dying_inside(asked: Asked) -> None:
    """Sends half a response."""
    await asked.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
    asked.reset()


async def streaming(asked: Asked) -> None:
    """One token, and a usage that counts the handed-over tokens as cached."""
    await asked.begin()
    await asked.event(TOKEN)
    await asked.event({"choices": [], "usage": usage(48)})
    await asked.event("[DONE]")
    await asked.end()


async def erring_in_its_stream(asked: Asked) -> None:
    """vLLM after a failed KV load: 200, and an error event instead of the first token."""
    if "kv_transfer_params" not in asked.body:
        return await streaming(asked)
    await asked.begin()
    await asked.event({"error": {"message": "Internal server error", "code": 500}})
    await asked.event("[DONE]")
    await asked.end()
    return None


def refusing_handoffs(status: int) -> Behaviour:
    """Serves requests without a handoff, refuses others."""

    async def behave(asked: Asked) -> None:
        failed = "kv_transfer_params" in asked.body
        await asked.answer({"error": {}} if failed else answer("recomputed"), status if failed else 200)

    return behave


OFFERING = saying(answer("h", 16, kv_transfer_params=PARAMS, prompt_token_ids=[1, 2, 3]))
ANSWERING = saying(answer(cached_tokens=48))


def split(pods: Town) -> Split:
    return Split(pods.pod("p"), pods.pod("d"))


def pair(pods: Town, dialect: str) -> Split:
    return Split(replace(pods.pod("p"), handoff=dialect), replace(pods.pod("d"), handoff=dialect))


def direct(pods: Town) -> Direct:
    return Direct(pods.pod("d"))


# --- success ---


async def test_the_prompt_is_computed_by_one_pod_and_answered_by_another() -> None:
    """The decode pod receives the handoff of the prefill response, the client the decode response."""
    async with town(p=OFFERING, d=ANSWERING) as pods:
        context = pods.context(split(pods), direct(pods))
        client = await pods.serve(context)
        first, second = pods.made["p"].asked[0].body, pods.made["d"].asked[0].body
        assert (first["max_tokens"], first["stream"]) == (1, False)
        assert second == {**CHAT, "kv_transfer_params": {**PARAMS, "prompt_token_ids": [1, 2, 3]}}
        assert client.json["choices"] == answer()["choices"]
        assert client.header(b"x-warmroute-pod") == b"d"
        assert client.header(b"x-warmroute-prefill-pod") == b"p"
        assert len(pods.made["p"].asked) == len(pods.made["d"].asked) == 1
        assert pods.handoffs("ok") == 1
        assert pods.counted("warmroute_pod_requests_total", pod="p", result="ok") == 1
        await pods.left_alone()


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_shows_only_tokens_that_the_prefill_pod_had_cached(stream: bool) -> None:
    """The prefill pod had 16 of the 48 tokens in its cache that the decode pod did not compute; the receipt agrees."""
    async with town(p=OFFERING, d=streaming if stream else ANSWERING) as pods:
        context = pods.context(split(pods), stream=stream)
        client = await pods.serve(context)
        assert b'"cached_tokens": 16' in client.body
        assert b"48" not in client.body
        assert context.cached_tokens == 16
        assert client.finished


async def test_a_streamed_response_is_relayed_as_it_is_generated() -> None:
    """The first token does not wait for the second; the seconds of the handoff are counted."""
    more = asyncio.Event()

    async def slow(asked: Asked) -> None:
        await asked.begin()
        await asked.event(TOKEN)
        await more.wait()
        await asked.event("[DONE]")
        await asked.end()

    async with town(p=OFFERING, d=slow) as pods:
        client = Client()
        serving = asyncio.create_task(pods.serve(pods.context(split(pods), stream=True), client))
        await pods.until(client.wrote.is_set)
        assert b"hello" in client.body
        more.set()
        await serving
        assert client.body.endswith(b"data: [DONE]\n\n")
        assert pods.counted("warmroute_handoff_seconds_count", dialect="nixl") == 1


async def test_a_streamed_handoff_calibrates_its_link() -> None:
    """With its tokens, and the same time as the metric, in milliseconds."""
    async with town(p=OFFERING, d=streaming) as pods:
        seen: list[tuple[Any, ...]] = []
        pods.calibrator.observe_transfer = lambda *facts: seen.append(facts)  # type: ignore[method-assign]
        plan = Split(pods.pod("p"), pods.pod("d"), handoff_tokens=48)
        await pods.serve(pods.context(plan, stream=True))
        ((sender, receiver, tokens, elapsed_ms, concurrent),) = seen
        assert (sender.id, receiver.id, tokens, concurrent) == ("p", "d", 48, 0)
        elapsed_s = pods.counted("warmroute_handoff_seconds_sum", dialect="nixl")
        assert elapsed_ms == pytest.approx(elapsed_s * 1000)
        assert 0 < elapsed_s < DEADLINE_S
        await pods.serve(pods.context(plan))
        assert len(seen) == 1, "an unstreamed response does not show when the KV arrived"


async def test_both_requests_carry_the_clients_headers() -> None:
    """Identity, trace and request id."""
    headers = [(b"x-mine", b"k"), (b"traceparent", b"00-a-b-01"), (b"content-type", b"application/json")]
    async with town(p=OFFERING, d=ANSWERING) as pods:
        await pods.serve(pods.context(split(pods), headers=headers))
        for leg in (pods.made["p"].asked[0], pods.made["d"].asked[0]):
            assert leg.headers["x-mine"] == "k"
            assert leg.headers["traceparent"] == "00-a-b-01"
            assert leg.headers["x-request-id"] == "req-1"
            assert leg.target == "/v1/chat/completions"


async def test_both_requests_name_the_clients_model() -> None:
    """One of several models, or an adapter."""
    async with town(p=OFFERING, d=ANSWERING) as pods:
        for model in ("m", "m-sql"):
            await pods.serve(pods.context(split(pods), model=model))
        for pod in pods.made.values():
            assert [asked.body["model"] for asked in pod.asked] == ["m", "m-sql"]


@pytest.mark.net
async def test_pods_may_have_ipv6_addresses() -> None:
    """Both of them."""
    try:
        async with town(host="::1", p=OFFERING, d=ANSWERING) as pods:
            assert (await pods.serve(pods.context(split(pods)))).status == 200
            assert pods.handoffs("ok") == 1
    except OSError:
        pytest.skip("this machine has no IPv6")


async def test_fields_that_a_prefill_cannot_have_go_only_to_the_decode_pod() -> None:
    """Engines refuse min_tokens above 1, and stream_options without a stream. Tools are part of the prompt."""
    fields: dict[str, Any] = {
        "min_tokens": 5,
        "stop": ["x"],
        "tools": [{"type": "function"}],
        "stream_options": {"include_usage": True},
    }
    async with town(p=OFFERING, d=streaming) as pods:
        await pods.serve(pods.context(split(pods), stream=True, **fields))
        first, second = pods.made["p"].asked[0].body, pods.made["d"].asked[0].body
        assert not {"min_tokens", "stream_options"} & first.keys()
        assert first["tools"] == second["tools"]
        assert {name: second[name] for name in fields} == fields


async def test_leases_are_booked_on_both_pods_before_anything_is_sent() -> None:
    """The prefill counts on the prefill pod until its response; the decode pod has the context."""
    seen: dict[str, Mapping[str, InFlight]] = {}

    async def prefill(asked: Asked) -> None:
        seen["prefill"] = pods.ledger.inflight()
        await OFFERING(asked)

    async def decode(asked: Asked) -> None:
        seen["decode"] = pods.ledger.inflight()
        await ANSWERING(asked)

    async with town(p=prefill, d=decode) as pods:
        await pods.serve(pods.context(split(pods), stream=True))
        assert (seen["prefill"]["p"].prefill_requests, seen["prefill"]["d"].prefill_requests) == (1, 0)
        assert seen["prefill"]["d"].requests == 1
        assert (seen["decode"]["p"].requests, seen["decode"]["p"].pulls) == (0, 1)
        await pods.left_alone()


async def test_without_an_offered_handoff_the_decode_pod_computes() -> None:
    """A short prompt is not worth a transfer: the decode pod receives the client's own body, and its usage is kept."""
    async with town(p=saying(answer("h", 16)), d=ANSWERING) as pods:
        client = await pods.serve(pods.context(split(pods)))
        assert pods.made["d"].asked[0].body == CHAT
        assert client.json["usage"] == usage(48)
        assert pods.handoffs("not_offered") == 1


async def test_a_prefill_pod_makes_no_other_pod_connect_elsewhere() -> None:
    """Its handoff is left out, with one warning, and the decode pod computes."""
    evil = saying(answer("h", 16, kv_transfer_params={**PARAMS, "remote_host": "10.0.0.66"}))
    with capture_logs() as logs:
        async with town(p=evil, d=ANSWERING) as pods:
            for _ in range(2):
                await pods.serve(pods.context(split(pods)))
            assert [asked.body for asked in pods.made["d"].asked] == [CHAT, CHAT]
            assert pods.handoffs("not_offered") == 2
    (warned,) = [line for line in logs if line["log_level"] == "warning"]
    assert (warned["pod"], warned["address"]) == ("p", "remote_host: 10.0.0.66")
    assert "handoff_hosts" in warned["hint"]


async def test_a_decode_pod_without_a_handoff_fails_like_any_pod() -> None:
    """A 500 is relayed: another pod would most likely respond the same."""
    async with town(p=saying(answer("h", 16)), d=saying({}, 500)) as pods:
        client = await pods.serve(pods.context(split(pods), direct(pods)))
        assert (client.status, len(pods.made["d"].asked)) == (500, 1)


# --- the prefill leg fails ---


@pytest.mark.parametrize(
    ("behaviour", "error", "doubtful"),
    [
        (saying({}, 500), UpstreamBroken, True),
        (saying({}, 503), UpstreamBroken, False),
        (resetting, UpstreamBroken, False),
        (dying_inside, UpstreamBroken, False),
        (silent, UpstreamTimeout, False),
    ],
    ids=["500", "503", "killed before its response", "killed inside its response", "timeout"],
)
async def test_after_a_failed_prefill_one_pod_computes(
    behaviour: Behaviour, error: type[RouterError], doubtful: bool
) -> None:
    """The next candidate receives the client's own body. The failure counts for the prefill pod only; a 500 may be due
    to the body."""
    async with town(first_byte_s=0.2, p=behaviour, d=ANSWERING) as pods:
        client = await pods.serve(pods.context(split(pods), direct(pods)))
        assert client.status == 200
        assert [asked.body for asked in pods.made["d"].asked] == [CHAT]
        assert not client.header(b"x-warmroute-prefill-pod")
        assert (pods.failures("p"), pods.doubts("p")) == ((0, 1) if doubtful else (1, 0))
        assert (pods.failures("d"), pods.doubts("d")) == (0, 0)
        assert pods.handoffs("prefill_failed") == 1
        assert pods.counted("warmroute_pod_requests_total", pod="p", result=error.code) == 1
        await pods.left_alone()


async def test_a_prefill_response_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read whole, so one without an end would fill the memory."""
    monkeypatch.setattr(kv_transfer, "RESPONSE", Bound("response", 1000))
    endless = saying(answer("h" * 2000, kv_transfer_params=PARAMS))
    async with town(p=endless, d=ANSWERING) as pods:
        context = pods.context(split(pods), direct(pods))
        assert (await pods.serve(context)).json["choices"][0]["message"]["content"] == "hello"
        (failure,) = context.failures
        assert failure.message.startswith("pod p: response: ") and failure.message.endswith("at most 1000 are read")


async def test_a_successful_handoff_clears_the_failures_of_the_prefill_pod() -> None:
    """Its response alone does not: the KV must be loaded, too."""
    async with town(p=resetting, d=ANSWERING) as pods:
        await pods.serve(pods.context(split(pods), direct(pods)))
        pods.made["p"].behaviour, pods.made["d"].behaviour = OFFERING, refusing_handoffs(500)
        await pods.serve(pods.context(split(pods), direct(pods)))
        assert (pods.failures("p"), pods.doubts("p")) == (1, 1)
        pods.made["d"].behaviour = ANSWERING
        await pods.serve(pods.context(split(pods), direct(pods)))
        assert (pods.failures("p"), pods.doubts("p")) == (0, 0)


async def test_who_is_served_has_a_vote_for_the_prefill_pod() -> None:
    """Else it would have votes against it alone, and one client whose requests fail there could eject it."""
    failing = saying({"error": {}}, 500)
    async with town(p=failing, d=ANSWERING) as pods:
        for owner, behaviour in [("a", failing), *[("b", OFFERING)] * 4, *[("a", failing)] * 3]:
            pods.made["p"].behaviour, context = behaviour, pods.context(split(pods), direct(pods))
            context.owner = owner
            await pods.serve(context)
        assert pods.handoffs("prefill_failed") == pods.handoffs("ok") == 4
        assert (found := pods.fleet.status("p")) and found.state is PodState.READY


@pytest.mark.parametrize("status", [400, 404, 429, 501])
async def test_after_a_refused_prefill_the_clients_own_body_decides(status: int) -> None:
    """The prefill pod refused another body than the client's: the next candidate's response counts, good or bad."""
    for verdict in (ANSWERING, saying({"error": {"message": "mine"}}, 422)):
        async with town(p=saying({"error": {"message": "not mine"}}, status), d=verdict) as pods:
            client = await pods.serve(pods.context(split(pods), direct(pods)))
            assert client.status == (200 if verdict is ANSWERING else 422)
            assert b"not mine" not in client.body
            assert (pods.failures("p"), pods.failures("d")) == (0, 0)
            assert pods.handoffs("prefill_refused") == 1


async def test_the_last_candidates_refused_prefill_reaches_the_client() -> None:
    """SDKs do not retry a 4xx; they would retry a 502."""
    async with town(p=saying({"error": {"message": "too long"}}, 400), d=ANSWERING) as pods:
        client = await pods.serve(pods.context(split(pods)))
        assert (client.status, client.json) == (400, {"error": {"message": "too long"}})
        assert not pods.made["d"].asked
        await pods.left_alone()


# --- the handoff is no longer good ---


def _replace(pods: Town) -> None:
    """Another pod has the id of the prefill pod."""
    both = [pods.pod("p"), pods.pod("d")]
    pods.fleet.sync(both[1:])
    pods.fleet.sync(both)


SPOILED = {
    "a restart": lambda pods: pods.fleet.restarted("p"),
    "its end": lambda pods: pods.fleet.sync([pods.pod("d")]),
    "its replacement": _replace,
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
async def test_a_handoff_of_an_earlier_process_is_never_sent(spoil: Callable[[Town], object]) -> None:
    """Its blocks may hold another prompt by now, so the decode pod computes."""

    async def prefill(asked: Asked) -> None:
        spoil(pods)
        await OFFERING(asked)

    async with town(p=prefill, d=ANSWERING) as pods:
        context = pods.context(split(pods), direct(pods))
        assert (await pods.serve(context)).status == 200
        assert [asked.body for asked in pods.made["d"].asked] == [CHAT]
        assert (pods.handoffs("dropped"), context.handed_over_cached_tokens) == (1, None)


async def test_a_handoff_that_is_too_old_is_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the router's clock, since the prefill response."""

    class Brief(Nixl):
        hold_s = 0.0

    monkeypatch.setitem(DIALECTS, "nixl", Brief())
    async with town(p=OFFERING, d=ANSWERING) as pods:
        assert (await pods.serve(pods.context(split(pods)))).status == 200
        assert [asked.body for asked in pods.made["d"].asked] == [CHAT]
        assert pods.handoffs("dropped") == 1


async def test_no_handoff_is_sent_twice() -> None:
    """Neither to another candidate nor over another connection; another pod only gives its KV back."""
    async with town(p=OFFERING, d=resetting, e=ANSWERING) as pods:
        client = await pods.serve(pods.context(split(pods), Split(pods.pod("p"), pods.pod("e"))))
        assert client.status == 200
        assert len(pods.made["p"].asked) == 2
        assert ["kv_transfer_params" in asked.body for asked in pods.made["d"].asked] == [True]
        await pods.returned()
        given_back = [asked.body for asked in pods.made["e"].asked if "messages" not in asked.body]
        assert given_back == [Nixl().return_body("m", PARAMS)]
        assert len(pods.made["e"].asked) == 2


async def test_kv_that_was_read_is_not_given_back() -> None:
    async with town(p=OFFERING, d=ANSWERING) as pods:
        assert (await pods.serve(pods.context(split(pods)))).status == 200
        await pods.returned()
        assert len(pods.made["d"].asked) == 1


@pytest.mark.parametrize("last", ["split", "direct"])
async def test_a_request_that_fails_after_two_handoffs_is_not_tried_again(last: str) -> None:
    """Its body may be the cause; the second error is relayed."""
    failing = saying({}, 500)
    async with town(retries=10, p=OFFERING, q=OFFERING, d=failing, e=failing, f=ANSWERING) as pods:
        second = Split(pods.pod("q"), pods.pod("e")) if last == "split" else Direct(pods.pod("e"))
        client = await pods.serve(pods.context(split(pods), second, Direct(pods.pod("f"))))
        assert client.status == 500
        assert not pods.made["f"].asked
        assert [pod for pod in "pqdef" if pods.failures(pod)] == []


# --- the decode leg fails ---


async def test_the_failure_of_a_decode_pod_that_is_down_is_its_own() -> None:
    """The next candidate serves; nothing is held against the prefill pod."""
    async with town(p=OFFERING, d=resetting, e=ANSWERING) as pods:
        client = await pods.serve(pods.context(split(pods), Direct(pods.pod("e"))))
        assert client.header(b"x-warmroute-pod") == b"e"
        assert (pods.failures("p"), pods.failures("d")) == (0, 1)
        assert pods.handoffs("decode_failed") == 1
        await pods.left_alone()


@pytest.mark.parametrize(
    ("status", "failures", "doubts"), [(500, "", "p"), (501, "", ""), (503, "d", ""), (400, "", "")]
)
async def test_after_a_decode_pods_error_the_next_candidate_serves_without_handoff(
    status: int, failures: str, doubts: str
) -> None:
    """A failed load is a 500 and may be due to the pod that had the KV, or to the body."""
    async with town(p=OFFERING, d=refusing_handoffs(status), e=saying(answer("recomputed"))) as pods:
        client = await pods.serve(pods.context(split(pods), Direct(pods.pod("e"))))
        assert client.json["choices"][0]["message"]["content"] == "recomputed"
        assert [pod for pod in "pde" if pods.failures(pod)] == list(failures)
        assert [pod for pod in "pde" if pods.doubts(pod)] == list(doubts)
        assert pods.handoffs("decode_failed") == 1
        await pods.left_alone()


async def test_an_error_event_instead_of_the_first_token_is_retried() -> None:
    """Nothing was sent to the client yet: the next candidate begins the stream."""
    async with town(p=OFFERING, d=erring_in_its_stream) as pods:
        client = await pods.serve(pods.context(split(pods), direct(pods), stream=True))
        assert b"hello" in client.body
        assert b"error" not in client.body
        assert pods.handoffs("decode_failed") == 1


async def test_the_last_candidates_error_is_relayed() -> None:
    """No candidate is left."""
    async with town(p=OFFERING, d=refusing_handoffs(500)) as pods:
        assert (await pods.serve(pods.context(split(pods)))).status == 500
        await pods.left_alone()


async def test_a_decode_pod_that_dies_after_the_first_byte_ends_the_response() -> None:
    """Bytes were sent, so no retry is possible; the failure counts for the decode pod."""

    async def dying(asked: Asked) -> None:
        await asked.begin()
        await asked.event(TOKEN)
        await pods.until(client.wrote.is_set)
        asked.reset()

    async with town(p=OFFERING, d=dying) as pods:
        client = Client()
        with pytest.raises(UpstreamBroken):
            await pods.serve(pods.context(split(pods), direct(pods), stream=True), client)
        assert len(pods.made["d"].asked) == 1
        assert (pods.doubts("p"), pods.doubts("d")) == (0, 1)
        await pods.left_alone()


# --- a leg hangs ---


@pytest.fixture
def virtual_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop times each leg."""
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(kv_transfer, "time", clock)


@pytest.mark.usefixtures("virtual_clock")
async def test_a_prefill_leg_that_hangs_is_tried_elsewhere() -> None:
    """Long before the timeout of a first byte. The request may be the cause, so one client alone proves nothing."""
    async with town(p=silent, d=streaming) as pods:
        client = await pods.serve(pods.context(split(pods), direct(pods), stream=True))
        assert client.finished and not client.header(b"x-warmroute-prefill-pod")
        assert (pods.doubts("p"), pods.handoffs("prefill_failed")) == (1, 1)
        await pods.left_alone()


@pytest.mark.usefixtures("virtual_clock")
@pytest.mark.parametrize("slow", ["p", "d"])
async def test_the_last_candidate_has_more_time(slow: str) -> None:
    """A grammar, or a picture from a slow server, may take longer than what was expected."""

    def taking_long(behaviour: Behaviour) -> Behaviour:
        async def behave(asked: Asked) -> None:
            await asyncio.sleep(5 * kv_transfer.DECODE_LIMIT_S)
            await behaviour(asked)

        return behave

    p, d = (taking_long(OFFERING), streaming) if slow == "p" else (OFFERING, taking_long(streaming))
    async with town(p=p, d=d) as pods:
        client = await pods.serve(pods.context(split(pods), stream=True))
        assert client.finished and pods.handoffs("ok") == 1


@pytest.mark.usefixtures("virtual_clock")
async def test_the_leg_of_a_last_candidate_ends_once_its_pod_has_been_silent_for_long() -> None:
    async with town(p=silent, d=streaming) as pods:
        with pytest.raises(UpstreamTimeout):
            await pods.serve(pods.context(split(pods), stream=True))


@pytest.mark.usefixtures("virtual_clock")
@pytest.mark.parametrize("dialect", ["nixl", "mooncake"])
async def test_a_decode_leg_that_hangs_is_tried_elsewhere(dialect: str) -> None:
    """Where the engine knows how, its KV is given back."""
    async with town(p=OFFERING, d=silent, e=streaming) as pods:
        pods.facts = {"engine_id": "e"}
        client = await pods.serve(pods.context(pair(pods, dialect), Direct(pods.pod("e")), stream=True))
        assert client.header(b"x-warmroute-pod") == b"e" and client.finished
        assert pods.handoffs("decode_failed", dialect) == 1
        await pods.left_alone()
        given_back = [asked.body for asked in pods.made["e"].asked if "messages" not in asked.body]
        assert given_back == ([Nixl().return_body("m", PARAMS)] if dialect == "nixl" else [])


async def test_an_unstreamed_decode_leg_fails_with_its_prefill_pod() -> None:
    """Nobody knows how long its response takes; but without the prefill pod, its KV does not come."""

    async def waiting(asked: Asked) -> None:
        if "kv_transfer_params" in asked.body:
            pods.fleet.event("p", PodEvent.EJECT)
            await asked.hung_up()
        await ANSWERING(asked)

    async with town(p=OFFERING, d=waiting) as pods:
        client = await pods.serve(pods.context(split(pods), direct(pods)))
        assert client.status == 200 and [asked.body for asked in pods.made["d"].asked][1:] == [CHAT]
        assert (pods.failures("d"), pods.handoffs("prefill_failed")) == (0, 1)
        await pods.left_alone()


@pytest.mark.usefixtures("virtual_clock")
async def test_a_response_that_comes_just_after_the_limit_gives_its_kv_back() -> None:
    """The pod had sent it before it saw that the router has closed the connection."""

    async def late(asked: Asked) -> None:
        await asked.hung_up()
        await OFFERING(asked)

    async with town(p=late, d=ANSWERING) as pods:
        context = pods.context(split(pods), direct(pods))
        assert (await pods.serve(context)).status == 200
        await pods.left_alone()
        assert [asked.body for asked in pods.made["d"].asked] == [CHAT, Nixl().return_body("m", PARAMS)]
        assert context.handed_over_cached_tokens is None


# --- both requests at once ---


def rooms(pods: Town) -> Split:
    """A pair with SGLang's dialect."""
    return pair(pods, "bootstrap")


async def test_both_requests_may_be_sent_at_once() -> None:
    """Each pod responds only after both were sent to; both receive the same room, and the prefill response is read."""

    def meeting(other: str, behaviour: Behaviour) -> Behaviour:
        async def behave(asked: Asked) -> None:
            await pods.until(lambda: pods.made[other].asked)
            await behaviour(asked)

        return behave

    async with town(p=meeting("d", saying(answer("h", 16))), d=meeting("p", ANSWERING)) as pods:
        context = pods.context(rooms(pods))
        client = await pods.serve(context)
        first, second = pods.made["p"].asked[0].body, pods.made["d"].asked[0].body
        assert first["bootstrap_room"] == second["bootstrap_room"]
        assert (client.json["usage"], context.cached_tokens) == (usage(16), 16)
        assert pods.handoffs("ok", "bootstrap") == 1
        await pods.left_alone()


BROKEN_PREFILLS = {"500": saying({}, 500), "400": saying({}, 400), "killed": resetting, "killed inside": dying_inside}


@pytest.mark.parametrize("behaviour", BROKEN_PREFILLS.values(), ids=BROKEN_PREFILLS)
@pytest.mark.parametrize("dialect", sorted(DIALECTS))
async def test_a_failed_prefill_costs_no_request_in_any_dialect(behaviour: Behaviour, dialect: str) -> None:
    """A decode pod that waits for its KV would wait for minutes; the next candidate serves."""

    async def prefill(asked: Asked) -> None:
        if DIALECTS[dialect].order is Order.TOGETHER:
            await pods.until(lambda: pods.made["d"].asked)
        await behaviour(asked)

    async def waiting(asked: Asked) -> None:
        await (ANSWERING if asked.body == CHAT else silent)(asked)

    async with town(p=prefill, d=waiting) as pods:
        pods.facts = {"engine_id": "e"}
        client = await pods.serve(pods.context(pair(pods, dialect), direct(pods)))
        assert (client.status, pods.failures("d")) == (200, 0)
        await pods.left_alone()


async def test_a_prefill_pod_that_dies_after_its_response_ends_the_attempt() -> None:
    """The KV is lost, and the decode pod would wait for minutes."""

    async def prefill(asked: Asked) -> None:
        await pods.until(lambda: pods.made["d"].asked)
        await saying(answer("h", 16))(asked)
        pods.fleet.restarted("p")

    async def waiting(asked: Asked) -> None:
        await (silent if "bootstrap_room" in asked.body else ANSWERING)(asked)

    async with town(p=prefill, d=waiting) as pods:
        client = await pods.serve(pods.context(rooms(pods), direct(pods)))
        assert client.status == 200
        assert pods.failures("d") == 0
        assert pods.handoffs("prefill_failed", "bootstrap") == 1
        await pods.left_alone()


async def test_a_failed_decode_aborts_the_waiting_prefill() -> None:
    """No pod would load its KV."""

    async def dying(asked: Asked) -> None:
        await pods.until(lambda: pods.made["p"].asked)
        asked.reset()

    async with town(p=silent, d=dying, e=ANSWERING) as pods:
        client = await pods.serve(pods.context(rooms(pods), Direct(pods.pod("e"))))
        assert client.header(b"x-warmroute-pod") == b"e"
        assert (pods.failures("p"), pods.failures("d")) == (0, 1)
        await pods.left_alone()


# --- the client leaves ---


async def leave_once(pods: Town, context: Any, holds: Any) -> None:
    """Disconnect as soon as a condition holds."""
    serving = asyncio.create_task(pods.serve(context))
    await pods.until(holds)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    await pods.left_alone()
    assert pods.failures("p") == pods.failures("d") == 0


async def test_a_client_that_disconnects_during_the_prefill_ends_it() -> None:
    """Nothing is sent to the decode pod."""
    async with town(p=silent, d=ANSWERING) as pods:
        await leave_once(pods, pods.context(split(pods), direct(pods)), lambda: pods.made["p"].working)
        assert not pods.made["d"].asked
        assert pods.handoffs("client_gone") == 1


async def test_a_client_that_disconnects_before_the_first_token_ends_the_decode() -> None:
    """The decode pod then releases the KV of the prefill pod."""
    async with town(p=OFFERING, d=silent) as pods:
        await leave_once(pods, pods.context(split(pods), direct(pods)), lambda: pods.made["d"].working)
        assert pods.handoffs("client_gone") == 1


async def test_a_client_that_disconnects_in_mid_stream_ends_the_decode() -> None:
    """The handoff counts as successful."""

    async def endless(asked: Asked) -> None:
        await asked.begin()
        await asked.event(TOKEN)
        await asked.hung_up()

    async with town(p=OFFERING, d=endless) as pods:
        context = pods.context(split(pods), stream=True)
        await leave_once(pods, context, lambda: context.first_token_s is not None)
        assert pods.handoffs("ok") == 1


async def test_a_client_that_disconnects_ends_both_requests() -> None:
    """Where both are in progress."""
    async with town(p=silent, d=silent) as pods:
        both = [pods.made["p"], pods.made["d"]]
        await leave_once(pods, pods.context(rooms(pods)), lambda: all(pod.working for pod in both))


async def test_an_unfinished_prefill_ends_with_the_response() -> None:
    """The prefill pod stops working, and its lease is released."""
    async with town(p=silent, d=ANSWERING) as pods:
        assert (await pods.serve(pods.context(rooms(pods)))).status == 200
        await pods.left_alone()


# --- a response that is complete after the prefill ---


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_of_one_token_needs_no_decode_pod(stream: bool) -> None:
    """As a stream where the client wants one."""
    whole = answer("h", 16)
    whole["choices"][0]["finish_reason"] = "stop"
    async with town(p=saying(whole), d=ANSWERING) as pods:
        context = pods.context(pair(pods, "trtllm"), stream=stream)
        client = await pods.serve(context)
        assert not pods.made["d"].asked
        assert context.cached_tokens == 16
        if stream:
            assert client.header(b"content-type").startswith(b"text/event-stream")
            assert client.body.endswith(b"data: [DONE]\n\n")
            assert json.loads(client.body.split(b"\n\n")[0][6:])["choices"][0]["delta"]["content"] == "h"
        else:
            assert client.json == whole
        assert pods.handoffs("answered", "trtllm") == 1
        await pods.left_alone()


# --- pulls ---

PULL = Pull("holder", 32)


async def test_the_request_names_the_holder_of_the_prefix() -> None:
    """In the pod's dialect. The holder receives no request, but counts as sending until the first token."""
    sending: list[int] = []

    async def serving(asked: Asked) -> None:
        sending.append(pods.ledger.inflight()["holder"].pulls)
        await ANSWERING(asked)

    async with town(a=serving, holder=ANSWERING) as pods:
        client = await pods.serve(pods.context(Direct(pods.pod("a"), PULL), stream=True))
        source = pods.made["a"].asked[0].body["kv_transfer_params"]["remote_kv_source"]
        assert client.status == 200
        assert source["remote_host"] == "holder"
        assert sending == [1]
        assert not pods.made["holder"].asked
        await pods.left_alone()


@pytest.mark.parametrize("status", [400, 500])
async def test_a_pull_that_is_refused_is_not_the_clients_error(status: int) -> None:
    """The next candidate receives the client's own body; no pod has failed."""
    async with town(a=refusing_handoffs(status), holder=ANSWERING) as pods:
        client = await pods.serve(pods.context(Direct(pods.pod("a"), PULL), Direct(pods.pod("a"))))
        assert client.json["choices"][0]["message"]["content"] == "recomputed"
        assert pods.failures("a") == pods.failures("holder") == 0
        await pods.left_alone()
        await pods.until(lambda: pods.made["a"].connected == 1)


async def test_a_server_error_to_a_pull_counts_for_the_pod() -> None:
    """As for any request."""
    async with town(a=resetting, holder=ANSWERING) as pods:
        client = await pods.serve(pods.context(Direct(pods.pod("a"), PULL), Direct(pods.pod("holder"))))
        assert client.header(b"x-warmroute-pod") == b"holder"
        assert (pods.failures("a"), len(pods.made["a"].asked)) == (1, 1)


async def test_the_last_candidates_refusal_is_relayed() -> None:
    """No candidate is left."""
    async with town(a=refusing_handoffs(500), holder=ANSWERING) as pods:
        assert (await pods.serve(pods.context(Direct(pods.pod("a"), PULL)))).status == 500


async def test_without_its_holder_a_pod_receives_the_clients_own_body() -> None:
    """The holder was removed after the decision, or its facts are unknown."""
    async with town(a=ANSWERING, holder=ANSWERING) as pods:
        await pods.serve(pods.context(Direct(pods.pod("a"), Pull("gone", 32))))
        pods.facts = None
        await pods.serve(pods.context(Direct(pods.pod("a"), PULL)))
        assert [asked.body for asked in pods.made["a"].asked] == [CHAT, CHAT]


async def test_a_pull_calibrates_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its time without computing the rest of the prompt, and the transferred KV."""
    milliseconds = count()
    clock = Clock(lambda: next(milliseconds) / 1000, lambda: 0.0)
    for module in (attempt, relay):
        monkeypatch.setattr(module, "monotonic", clock.now_s)
    async with town(a=ANSWERING, holder=ANSWERING) as pods:
        pods.core.clock = clock
        pods.calibrator.links = Links(elsewhere=Link(500.0, 1e6, "slow"))
        plan = Direct(replace(pods.pod("a"), kv_bytes_per_token=1000), Pull("holder", 32, 32))
        for _ in range(3):
            await pods.serve(pods.context(plan, stream=True, expected_ms=0.0))
        known = pods.calibrator.calibration.link("slow", Link(500.0, 1e6, "slow"))
        assert known.t0_ms < 500.0
