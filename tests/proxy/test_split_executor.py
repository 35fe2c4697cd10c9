"""Two pods for one request, and everything that can go wrong between them. Each row of the failure table is a test."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from router.decision import Direct, Plan, Split
from router.engines.engine_catalog import DIALECTS
from router.engines.handoff.vllm_connectors import Nixl
from router.errors import MalformedRequest, NoReadyPod, UpstreamBroken, UpstreamTimeout
from router.types import Generation, InFlight, PodState, PromptPrefix
from tests.proxy.pods import CHAT, Asked, Behaviour, Client, Town, town

pytestmark = [pytest.mark.net, pytest.mark.anyio]

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
    """Always the same answer."""

    async def behave(asked: Asked) -> None:
        await asked.answer(body, status)

    return behave


async def resetting(asked: Asked) -> None:
    asked.reset()


async def silent(asked: Asked) -> None:
    """Works until the router hangs up."""
    await asked.hung_up()


async def dying_inside(asked: Asked) -> None:
    """Half an answer."""
    await asked.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
    asked.reset()


async def streaming(asked: Asked) -> None:
    """One token and a usage that counts what was handed over as cached."""
    await asked.begin()
    await asked.event(TOKEN)
    await asked.event({"choices": [], "usage": usage(48)})
    await asked.event("[DONE]")
    await asked.end()


async def erring_in_its_stream(asked: Asked) -> None:
    """What vLLM does where KV cannot be loaded: 200, and an error in place of the first token."""
    if "kv_transfer_params" not in asked.body:
        return await streaming(asked)
    await asked.begin()
    await asked.event({"error": {"message": "Internal server error", "code": 500}})
    await asked.event("[DONE]")
    await asked.end()
    return None


def refusing_handoffs(status: int) -> Behaviour:
    """Serves whatever is not a handoff."""

    async def behave(asked: Asked) -> None:
        failed = "kv_transfer_params" in asked.body
        await asked.answer({"error": {}} if failed else answer("recomputed"), status if failed else 200)

    return behave


OFFERING = saying(answer("h", 16, kv_transfer_params=PARAMS, prompt_token_ids=[1, 2, 3]))
ANSWERING = saying(answer(cached_tokens=48))


def split(pods: Town) -> Split:
    return Split(pods.pod("p"), pods.pod("d"))


def direct(pods: Town) -> Direct:
    return Direct(pods.pod("d"))


# --- what goes well ---


async def test_the_prompt_is_computed_by_one_pod_and_answered_by_another() -> None:
    """The decode pod gets what the prefill pod has answered, the client what the decode pod says."""
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
async def test_the_client_hears_only_of_tokens_that_were_cached_before(stream: bool) -> None:
    """Of 48 that the decode pod did not compute, the prefill pod had 16 in its cache; so says the receipt, too."""
    async with town(p=OFFERING, d=streaming if stream else ANSWERING) as pods:
        context = pods.context(split(pods), stream=stream)
        client = await pods.serve(context)
        assert b'"cached_tokens": 16' in client.body
        assert b"48" not in client.body
        assert context.cached_tokens == 16
        assert client.finished


async def test_a_streamed_answer_comes_as_it_is_made() -> None:
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


async def test_both_legs_carry_the_clients_headers() -> None:
    """Who asks, which trace it is, and one request id."""
    headers = [(b"authorization", b"Bearer k"), (b"traceparent", b"00-a-b-01"), (b"content-type", b"application/json")]
    async with town(p=OFFERING, d=ANSWERING) as pods:
        await pods.serve(pods.context(split(pods), headers=headers))
        for leg in (pods.made["p"].asked[0], pods.made["d"].asked[0]):
            assert leg.headers["authorization"] == "Bearer k"
            assert leg.headers["traceparent"] == "00-a-b-01"
            assert leg.headers["x-request-id"] == "req-1"
            assert leg.target == "/v1/chat/completions"


async def test_both_legs_name_the_model_that_the_client_named() -> None:
    """One of several, or an adapter: pods know which by its name."""
    async with town(p=OFFERING, d=ANSWERING) as pods:
        for model in ("m", "m-sql"):
            await pods.serve(pods.context(split(pods), model=model))
        for pod in pods.made.values():
            assert [asked.body["model"] for asked in pod.asked] == ["m", "m-sql"]


async def test_pods_may_live_at_ipv6_addresses() -> None:
    """Both of them."""
    try:
        async with town(host="::1", p=OFFERING, d=ANSWERING) as pods:
            assert (await pods.serve(pods.context(split(pods)))).status == 200
            assert pods.handoffs("ok") == 1
    except OSError:
        pytest.skip("this machine has no IPv6")


async def test_what_would_spoil_a_prefill_stays_with_the_decode_leg() -> None:
    """min_tokens above the one token is refused by engines, stream_options without a stream, too; tools are prompt."""
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


async def test_places_are_taken_on_both_pods_before_anything_is_sent() -> None:
    """The prefill counts on the prefill pod only, and ends there with its answer; the decode pod has the context."""
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


async def test_afterwards_both_pods_count_as_having_the_prompt() -> None:
    """Until their events say so."""
    prompt = PromptPrefix(Generation(model="m"), array("I", range(32)), [1, 2])
    async with town(p=OFFERING, d=ANSWERING) as pods:
        await pods.serve(pods.context(split(pods), prompt=prompt))
        match = await pods.store.match(prompt, 0.0)
        assert (match.held_blocks("p"), match.held_blocks("d")) == (2, 2)


async def test_a_handoff_that_is_not_offered_leaves_all_to_the_decode_pod() -> None:
    """A short prompt is not worth a transfer: the decode pod gets the client's own body, and its own usage stands."""
    async with town(p=saying(answer("h", 16)), d=ANSWERING) as pods:
        client = await pods.serve(pods.context(split(pods)))
        assert pods.made["d"].asked[0].body == CHAT
        assert client.json["usage"] == usage(48)
        assert pods.handoffs("not_offered") == 1


async def test_a_decode_pod_that_was_handed_nothing_fails_like_any_other() -> None:
    """A plain 500 is an answer: another pod would most likely say the same."""
    async with town(p=saying(answer("h", 16)), d=saying({}, 500)) as pods:
        client = await pods.serve(pods.context(split(pods), direct(pods)))
        assert (client.status, len(pods.made["d"].asked)) == (500, 1)


# --- the prefill leg fails ---


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        (saying({}, 500), UpstreamBroken),
        (saying({}, 503), UpstreamBroken),
        (resetting, UpstreamBroken),
        (dying_inside, UpstreamBroken),
        (silent, UpstreamTimeout),
    ],
    ids=["500", "503", "killed before its answer", "killed inside its answer", "timeout"],
)
async def test_a_failed_prefill_is_computed_in_place(behaviour: Behaviour, error: type[Exception]) -> None:
    """The next candidate gets the client's own body. The prefill pod is to blame, the decode pod is not."""
    async with town(first_byte_s=0.2, p=behaviour, d=ANSWERING) as pods:
        client = await pods.serve(pods.context(split(pods), direct(pods)))
        assert client.status == 200
        assert [asked.body for asked in pods.made["d"].asked] == [CHAT]
        assert not client.header(b"x-warmroute-prefill-pod")
        assert (pods.failures("p"), pods.failures("d")) == (1, 0)
        assert pods.handoffs("prefill_failed") == 1
        assert pods.counted("warmroute_pod_requests_total", pod="p", result=error.__name__) == 1
        await pods.left_alone()


async def test_pods_that_may_be_well_are_tried_before_those_that_have_failed() -> None:
    """Other pairs of the prefill pod are passed over."""
    async with town(retries=1, p=resetting, d=ANSWERING, e=ANSWERING) as pods:
        other = Split(pods.pod("p"), pods.pod("e"))
        client = await pods.serve(pods.context(split(pods), other, direct(pods)))
        assert client.status == 200
        assert len(pods.made["p"].asked) == 1
        assert client.header(b"x-warmroute-pod") == b"d"


async def test_a_pod_that_has_failed_once_is_better_than_none() -> None:
    """Where every way left needs it."""
    failed_once = asyncio.Event()

    async def recovering(asked: Asked) -> None:
        if failed_once.is_set():
            return await ANSWERING(asked)
        failed_once.set()
        asked.reset()
        return None

    async with town(p=OFFERING, d=recovering) as pods:
        client = await pods.serve(pods.context(split(pods), direct(pods)))
        assert (client.status, pods.made["d"].asked[-1].body) == (200, CHAT)


async def test_a_prefill_pod_that_keeps_failing_is_ejected() -> None:
    """It, and not the decode pod that served all the while."""
    async with town(p=resetting, d=ANSWERING) as pods:
        for _ in range(3):
            await pods.serve(pods.context(split(pods), direct(pods)))
        states = {status.pod.id: status.state for status in pods.fleet.snapshot.pods}
        assert states == {"p": PodState.EJECTED, "d": PodState.READY}


async def test_a_handoff_that_goes_well_settles_what_was_held_against_the_prefill_pod() -> None:
    """Its answer alone does not: KV that nobody can load is no help."""
    async with town(p=resetting, d=ANSWERING) as pods:
        await pods.serve(pods.context(split(pods), direct(pods)))
        pods.made["p"].behaviour, pods.made["d"].behaviour = OFFERING, refusing_handoffs(500)
        await pods.serve(pods.context(split(pods), direct(pods)))
        assert pods.failures("p") == 2
        pods.made["d"].behaviour = ANSWERING
        await pods.serve(pods.context(split(pods), direct(pods)))
        assert pods.failures("p") == 0


@pytest.mark.parametrize("status", [400, 404, 429])
async def test_a_refused_prefill_is_judged_by_the_clients_own_body(status: int) -> None:
    """What the prefill pod refused was not what the client sent: the next candidate's word counts, good or bad."""
    for verdict in (ANSWERING, saying({"error": {"message": "mine"}}, 422)):
        async with town(p=saying({"error": {"message": "not mine"}}, status), d=verdict) as pods:
            client = await pods.serve(pods.context(split(pods), direct(pods)))
            assert client.status == (200 if verdict is ANSWERING else 422)
            assert b"not mine" not in client.body
            assert (pods.failures("p"), pods.failures("d")) == (0, 0)
            assert pods.handoffs("prefill_refused") == 1


async def test_a_refused_prefill_reaches_the_client_where_nobody_else_can_judge() -> None:
    """A 4xx tells SDKs not to try again, a 502 would not."""
    async with town(p=saying({"error": {"message": "too long"}}, 400), d=ANSWERING) as pods:
        client = await pods.serve(pods.context(split(pods)))
        assert (client.status, client.json) == (400, {"error": {"message": "too long"}})
        assert not pods.made["d"].asked
        await pods.left_alone()


# --- the handoff is no longer good ---


async def stale(pods: Town, spoil: Any) -> Client:
    """Serve while `spoil` happens between the prefill and its answer."""

    async def prefill(asked: Asked) -> None:
        spoil()
        await OFFERING(asked)

    pods.made["p"].behaviour = prefill
    return await pods.serve(pods.context(split(pods), direct(pods)))


@pytest.mark.parametrize("spoiled_by", ["a restart", "its end"])
async def test_the_handoff_of_another_life_is_never_sent(spoiled_by: str) -> None:
    """Its blocks may hold another prompt by now: the decode pod computes."""
    async with town(p=OFFERING, d=ANSWERING) as pods:
        gone = [pods.pod("d")]
        client = await stale(
            pods, (lambda: pods.fleet.restarted("p")) if spoiled_by == "a restart" else (lambda: pods.fleet.sync(gone))
        )
        assert client.status == 200
        assert [asked.body for asked in pods.made["d"].asked] == [CHAT]
        assert pods.handoffs("dropped") == 1


async def test_a_handoff_that_is_too_old_is_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """By our own clock, since the prefill pod's answer."""

    class Brief(Nixl):
        hold_s = 0.0

    monkeypatch.setitem(DIALECTS, "nixl", Brief())
    async with town(p=OFFERING, d=ANSWERING) as pods:
        assert (await pods.serve(pods.context(split(pods)))).status == 200
        assert [asked.body for asked in pods.made["d"].asked] == [CHAT]
        assert pods.handoffs("dropped") == 1


async def test_no_handoff_is_ever_sent_twice() -> None:
    """Neither to another candidate nor over another connection: each is given out once."""
    async with town(p=OFFERING, d=resetting, e=resetting) as pods:
        plans: list[Plan] = [split(pods), Split(pods.pod("p"), pods.pod("e")), direct(pods)]
        with pytest.raises(UpstreamBroken):
            await pods.serve(pods.context(*plans))
        assert len(pods.made["p"].asked) == 2
        assert ["kv_transfer_params" in asked.body for asked in pods.made["d"].asked] == [True, False]
        assert len(pods.made["e"].asked) == 1


# --- the decode leg fails ---


async def test_a_decode_pod_that_is_down_is_to_blame_itself() -> None:
    """The next candidate serves; the prefill pod has done its part."""
    async with town(p=OFFERING, d=resetting, e=ANSWERING) as pods:
        client = await pods.serve(pods.context(split(pods), Direct(pods.pod("e"))))
        assert client.header(b"x-warmroute-pod") == b"e"
        assert (pods.failures("p"), pods.failures("d")) == (0, 1)
        assert pods.handoffs("decode_failed") == 1
        await pods.left_alone()


@pytest.mark.parametrize(("status", "blamed"), [(500, "p"), (503, "d"), (400, "")])
async def test_what_a_decode_pod_refuses_is_asked_again_without_the_handoff(status: int, blamed: str) -> None:
    """A load that failed is a 500: of the pod whose KV it was, as far as anybody knows."""
    async with town(p=OFFERING, d=refusing_handoffs(status)) as pods:
        blames: list[str] = []
        pods.breaker.failure = lambda pod_id, now_s: blames.append(pod_id)  # type: ignore[method-assign]
        client = await pods.serve(pods.context(split(pods), direct(pods)))
        assert client.json["choices"][0]["message"]["content"] == "recomputed"
        assert blames == ([blamed] if blamed else [])
        assert pods.handoffs("decode_failed") == 1
        await pods.left_alone()


async def test_an_error_in_place_of_the_first_token_is_not_the_clients() -> None:
    """Nothing has gone downstream yet: the next candidate begins the stream."""
    async with town(p=OFFERING, d=erring_in_its_stream) as pods:
        client = await pods.serve(pods.context(split(pods), direct(pods), stream=True))
        assert b"hello" in client.body
        assert b"error" not in client.body
        assert pods.handoffs("decode_failed") == 1


async def test_the_last_candidates_failure_is_passed_on_as_it_is() -> None:
    """There is nobody to ask instead."""
    async with town(p=OFFERING, d=refusing_handoffs(500)) as pods:
        assert (await pods.serve(pods.context(split(pods)))).status == 500
        await pods.left_alone()


async def test_a_decode_pod_that_dies_after_the_first_byte_ends_the_answer() -> None:
    """Bytes have gone out, so that nobody can take over; the decode pod is to blame."""

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
        assert (pods.failures("p"), pods.failures("d")) == (0, 1)
        await pods.left_alone()


# --- both legs at once ---


def rooms(pods: Town) -> Split:
    """A pair that meets in SGLang's rooms."""
    return Split(replace(pods.pod("p"), handoff="bootstrap"), replace(pods.pod("d"), handoff="bootstrap"))


async def test_both_legs_may_start_at_once() -> None:
    """Neither pod answers before both have been asked; both are told of one room, and the prefill's answer is read."""

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


@pytest.mark.parametrize("behaviour", [saying({}, 500), resetting, saying({}, 400)], ids=["500", "killed", "400"])
async def test_a_failed_prefill_aborts_the_waiting_decode(behaviour: Behaviour) -> None:
    """It would wait for minutes; then the next candidate serves."""

    async def prefill(asked: Asked) -> None:
        await pods.until(lambda: pods.made["d"].asked)
        await behaviour(asked)

    async def waiting(asked: Asked) -> None:
        await (silent if "bootstrap_room" in asked.body else ANSWERING)(asked)

    async with town(p=prefill, d=waiting) as pods:
        client = await pods.serve(pods.context(rooms(pods), direct(pods)))
        assert client.status == 200
        assert pods.failures("d") == 0
        await pods.left_alone()


async def test_a_prefill_pod_that_dies_after_its_answer_is_not_waited_for() -> None:
    """The KV is gone with it, and the decode pod would wait for minutes."""

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
    """Which nobody would come for."""

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
    """Go away as soon as something holds."""
    serving = asyncio.create_task(pods.serve(context))
    await pods.until(holds)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    await pods.left_alone()
    assert pods.failures("p") == pods.failures("d") == 0


async def test_a_client_that_leaves_during_the_prefill_ends_it() -> None:
    """The decode pod is never asked."""
    async with town(p=silent, d=ANSWERING) as pods:
        await leave_once(pods, pods.context(split(pods), direct(pods)), lambda: pods.made["p"].working)
        assert not pods.made["d"].asked
        assert pods.handoffs("client_gone") == 1


async def test_a_client_that_leaves_before_the_first_token_ends_the_decode() -> None:
    """Which tells the prefill pod by itself."""
    async with town(p=OFFERING, d=silent) as pods:
        await leave_once(pods, pods.context(split(pods), direct(pods)), lambda: pods.made["d"].working)
        assert pods.handoffs("client_gone") == 1


async def test_a_client_that_leaves_in_mid_stream_ends_the_decode() -> None:
    """The handoff itself went well."""

    async def endless(asked: Asked) -> None:
        await asked.begin()
        await asked.event(TOKEN)
        await asked.hung_up()

    async with town(p=OFFERING, d=endless) as pods:
        context = pods.context(split(pods), stream=True)
        await leave_once(pods, context, lambda: context.first_token_s is not None)
        assert pods.handoffs("ok") == 1


async def test_a_client_that_leaves_ends_both_legs_at_once() -> None:
    """Where both are under way."""
    async with town(p=silent, d=silent) as pods:
        both = [pods.made["p"], pods.made["d"]]
        await leave_once(pods, pods.context(rooms(pods)), lambda: all(pod.working for pod in both))


async def test_a_prefill_that_is_not_done_when_the_answer_is_ends_with_it() -> None:
    """Nothing is left behind on the prefill pod, and its place is given back."""
    async with town(p=silent, d=ANSWERING) as pods:
        assert (await pods.serve(pods.context(rooms(pods)))).status == 200
        await pods.left_alone()


# --- requests that cannot be split ---


async def test_a_request_that_cannot_be_split_is_served_by_one_pod() -> None:
    """Several choices would each need the KV; that costs none of the tries."""
    async with town(retries=0, p=OFFERING, d=ANSWERING) as pods:
        assert (await pods.serve(pods.context(split(pods), direct(pods), n=2))).status == 200
        assert not pods.made["p"].asked


async def test_a_request_that_can_only_be_split_and_cannot_be_is_refused_in_words() -> None:
    """The client can do something about it."""
    async with town(p=OFFERING, d=ANSWERING) as pods:
        with pytest.raises(MalformedRequest, match="Several choices"):
            await pods.serve(pods.context(split(pods), n=2))


async def test_a_pod_of_which_too_little_is_known_hands_nothing_over() -> None:
    """Its bootstrap server has not answered yet."""
    async with town(p=OFFERING, d=ANSWERING) as pods:
        pods.facts = None
        assert (await pods.serve(pods.context(split(pods), direct(pods)))).status == 200
        assert not pods.made["p"].asked
        with pytest.raises(NoReadyPod, match="pod p are not known yet"):
            await pods.serve(pods.context(split(pods)))


# --- an answer that is whole after the prefill ---


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_of_one_token_needs_no_decode_pod(stream: bool) -> None:
    """Whoever asked for a stream gets one."""
    whole = answer("h", 16)
    whole["choices"][0]["finish_reason"] = "stop"
    async with town(p=saying(whole), d=ANSWERING) as pods:
        plan = Split(replace(pods.pod("p"), handoff="trtllm"), replace(pods.pod("d"), handoff="trtllm"))
        context = pods.context(plan, stream=stream)
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
