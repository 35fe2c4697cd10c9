"""Attempts: which candidate is tried next, and what a failure or a success changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from router.decision import Direct, Split
from router.errors import ConnectFailed, UpstreamBroken, UpstreamError, UpstreamTimeout
from router.hashing import hash_array, token_array
from router.policy.prefill_clock import SAME_STEP_S, PrefillObservation
from router.types import Generation, Pod, PodState, PromptPicture, PromptPrefix
from tests.kit.memory_front import MemoryExchange
from tests.kit.scenes import POLICIES
from tests.kit.scripts import LAST, TOKEN, WHOLE, Script, ScriptedPods, failing, responding, serving

BUSY, ERROR, REFUSED = (responding(status, b'{"error": {}}') for status in (503, 500, 413))
BROKEN, SILENT, DOWN = failing(UpstreamBroken), failing(UpstreamTimeout), failing(ConnectFailed)
PROMPT = PromptPrefix(Generation(model="m"), token_array(range(50)), hash_array([1, 2, 3]))


def leaving(exchange: MemoryExchange) -> None:
    """The client disconnects."""
    exchange.leave()


def retries(pods: ScriptedPods, reason: str, refused: str = "") -> float:
    return pods.counted(f"warmroute_retries{refused}_total", reason=reason)


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_busy_pod_is_replaced_by_the_next_candidate(status: int) -> None:
    """Its answer is a failure that the client does not see."""
    pods = ScriptedPods(a=responding(status, b'{"error": {}}'), b=serving)
    served = pods.chat()
    assert (served.status, served.received, served.asked) == (200, WHOLE, ["a", "b"])
    assert served.context is not None and [failure.pod for failure in served.context.failures] == ["a"]
    assert (pods.held_against("ab"), retries(pods, "upstream_broken")) == ([(1, 0), (0, 0)], 1)
    ends = [("a", "upstream_broken"), ("b", "ok")]
    assert [pods.counted("warmroute_pod_requests_total", pod=pod, result=result) for pod, result in ends] == [1, 1]
    assert pods.is_idle()


# --- any results of pods ---

OUTCOMES: dict[str, tuple[Script, int]] = {
    "served": (serving, 200),
    "refused": (REFUSED, 413),
    "error": (ERROR, 500),
    "busy": (BUSY, 503),
    "broken": (BROKEN, 502),
    "silent": (SILENT, 504),
    "down": (DOWN, 502),
}
"""What a pod does with the request, and the status where no other pod is asked."""
NEXT = ("busy", "broken", "silent", "down")
"""Another pod would most likely not do the same."""
MAY_HAVE_BROKEN_IT = ("busy", "broken", "silent", "error")


@given(
    outcomes=st.lists(st.sampled_from([*OUTCOMES]), min_size=1, max_size=6),
    retried=st.integers(0, 5),
    attempts=st.none() | st.integers(1, 6),
    stream=st.booleans(),
)
def test_pods_are_asked_until_one_serves_or_two_may_have_failed_of_the_request(
    outcomes: list[str], retried: int, attempts: int | None, stream: bool
) -> None:
    """Two, since what crashes two engines would crash them all. Who cannot be reached has failed in any case; the
    others have if another pod serves the request, and else are in doubt. The policy limits the attempts, or else
    `limits.retries`."""
    pods = ScriptedPods(retries=retried, **{f"p{at}": OUTCOMES[one][0] for at, one in enumerate(outcomes)})
    context = pods.context(*pods.plans(), stream=stream)
    context.policy = replace(POLICIES["cost_aware"], attempts=attempts)
    served = pods.serve(context)
    asked = outcomes[: attempts or 1 + retried]
    for at, one in enumerate(asked):
        suspects = [each for each in asked[: at + 1] if each in MAY_HAVE_BROKEN_IT]
        if one not in NEXT or len(suspects) == 2:
            asked = asked[: at + 1]
            break
    is_served = asked[-1] == "served"
    assert (served.asked, served.status) == ([f"p{at}" for at in range(len(asked))], OUTCOMES[asked[-1]][1])
    assert served.received == (TOKEN + LAST if stream else WHOLE) or not is_served
    for at, one in enumerate(asked):
        in_doubt = one in MAY_HAVE_BROKEN_IT
        has_failed = one == "down" or (in_doubt and is_served)
        assert pods.held_against([f"p{at}"]) == [(int(has_failed), int(in_doubt and not is_served))]
    assert pods.counted("warmroute_retries_total") == len(asked) - 1
    assert pods.is_idle()


# --- the same as sentences ---

GONE = b'{"error": {"message": "EngineCore encountered an issue. See stack trace", "code": 500}}'
ENDED = b"data: " + GONE + b"\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize(
    ("first", "is_stream"),
    [
        (responding(500, GONE), False),
        (responding(500, GONE[:30], GONE[30:]), True),
        (responding(200, ENDED, is_stream=True), True),
    ],
)
def test_a_pod_whose_engine_is_gone_is_replaced(first: Script, is_stream: bool) -> None:
    """Its server says so in a 500, or at the beginning of a stream, while it still responds."""
    pods = ScriptedPods(a=first, b=serving)
    served = pods.chat(stream=is_stream)
    assert (served.status, served.received) == (200, TOKEN + LAST if is_stream else WHOLE)
    assert (served.asked, pods.held_against("ab")) == (["a", "b"], [(1, 0), (0, 0)])
    assert (retries(pods, "upstream_broken"), pods.is_idle()) == (1, True)


def test_the_last_pod_whose_engine_is_gone_is_relayed() -> None:
    """Two received the request, which may be the cause: a third one does not."""
    pods = ScriptedPods(retries=3, a=responding(500, GONE), b=responding(500, GONE), c=serving)
    served = pods.chat()
    assert (served.status, served.received, served.asked) == (500, GONE, ["a", "b"])


@pytest.mark.parametrize(
    ("first", "is_stream"),
    [
        (responding(200, WHOLE.replace(b"hello", b"EngineCore encountered an issue.")), False),
        (responding(200, TOKEN.replace(b"hello", b"EngineCore encountered an issue."), is_stream=True), True),
        (responding(200, TOKEN, ENDED, is_stream=True), True),
    ],
)
def test_an_answer_about_an_engine_that_is_gone_is_an_answer(first: Script, is_stream: bool) -> None:
    """The words of a model are no failure; nor can a stream be replaced whose client has read of it."""
    pods = ScriptedPods(a=first, b=serving)
    served = pods.chat(stream=is_stream)
    assert (served.status, served.asked) == (200, ["a"]) and b"EngineCore" in served.received


@pytest.mark.parametrize("status", [400, 404, 413, 429, 501, 505])
def test_a_refusal_is_no_failure_of_the_pod(status: int) -> None:
    """Nor does it clear earlier ones: a client could keep a broken pod in the fleet by sending nonsense."""
    pods = ScriptedPods(a=BROKEN)
    assert pods.chat().status == 502
    pods.scripts["a"] = responding(status, b"no")
    assert (pods.chat().status, pods.held_against("a")) == (status, [(0, 1)])
    pods.scripts["a"] = serving
    assert (pods.chat().status, pods.held_against("a")) == (200, [(0, 0)])


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_another_pod_serves_clears_all_doubt(stream: bool) -> None:
    """From the first token on, so that a broken pod is ejected while the streams of others last."""
    seen: list[tuple[int, int]] = []

    def second(exchange: MemoryExchange) -> None:
        exchange.head(is_stream=stream)
        exchange.piece(TOKEN if stream else WHOLE)
        seen.extend(pods.held_against("a"))
        exchange.end()

    pods = ScriptedPods(a=BROKEN, b=second)
    pods.chat(stream=stream)
    assert (seen, pods.held_against("ab")) == ([(1 if stream else 0, 0)], [(1, 0), (0, 0)])


def test_a_stream_without_a_token_clears_all_doubt_at_its_end() -> None:
    pods = ScriptedPods(a=BROKEN, b=responding(200, b"data: [DONE]\n\n"))
    assert pods.chat(stream=True).status == 200
    assert pods.held_against("ab") == [(1, 0), (0, 0)]


def test_a_client_that_leaves_before_the_second_pod_responds_leaves_doubt() -> None:
    """Otherwise impatient clients would keep a broken pod in the fleet."""
    pods = ScriptedPods(a=BROKEN, b=leaving)
    pods.chat()
    assert (pods.held_against("ab"), pods.is_idle()) == ([(0, 1), (0, 0)], True)


def test_after_a_byte_was_sent_a_failure_is_not_retried() -> None:
    """And only in doubt: the client may have sent what broke the pod."""
    pods = ScriptedPods(a=failing(UpstreamBroken, after=TOKEN), b=serving)
    served = pods.chat(stream=True)
    assert (served.received, served.asked, pods.held_against("a")) == (TOKEN, ["a"], [(0, 1)])
    assert pods.is_idle()


def test_without_budget_a_503_is_relayed_and_a_failure_ends_the_request() -> None:
    """After the retries that a quiet router may make; each refusal is counted."""
    pods = ScriptedPods(a=BUSY, b=serving)
    statuses = [pods.chat().status for _ in range(28)]
    # 20 retries, and one for every fifth request
    assert statuses == [200] * 25 + [503] * 3
    assert retries(pods, "upstream_broken", "_refused") == 3
    pods.scripts["a"] = BROKEN
    assert pods.chat().status == 502
    assert retries(pods, "upstream_broken", "_refused") == 4
    pods.now_s += 600.0
    assert pods.chat().status == 200


def test_a_router_that_can_open_no_connection_ejects_no_pod() -> None:
    """It is not the pods' fault."""
    pods = ScriptedPods(a=failing(ConnectFailed, local=True))
    assert [pods.chat().status for _ in range(5)] == [502] * 5
    assert not pods.breaker._failed


# --- what a pod lacks ---

LACKING = responding(501, b"not yet")


def test_what_a_pod_lacks_is_asked_of_the_next_one() -> None:
    """Its answer is neither a failure nor a vote against it, and takes nothing from the budget of retries."""
    pods = ScriptedPods(a=LACKING, b=serving)
    for owner in range(40):
        context = pods.context(*pods.plans())
        context.owner = f"client {owner}"
        served = pods.serve(context)
        assert (served.status, served.received, served.asked) == (200, WHOLE, ["a", "b"])
    assert pods.held_against("ab") == [(0, 0), (0, 0)]
    assert pods.counted("warmroute_pod_requests_total", pod="a", result="not_served") == 40
    assert (states(pods), pods.is_idle()) == ([PodState.READY] * 2, True)


def test_pods_of_another_kind_are_asked_first() -> None:
    """One of the same engine, version and front end would say the same; one that is known to lack it is not asked."""
    pods = ScriptedPods(retries=1, a=LACKING, b=LACKING, c=LACKING, d=serving)
    pods.fleet.learn("d", front_end="rust")
    assert pods.chat().asked == ["a", "d"]
    pods.fleet.learn("d", front_end="")
    pods.fleet.learn("b", lacks=frozenset({"/v1/chat/completions"}))
    assert pods.chat().asked == ["a", "c"]


def test_the_answer_of_the_last_pod_that_lacks_it_passes_unchanged() -> None:
    """Nor is that one blamed."""
    pods = ScriptedPods(a=LACKING, b=LACKING)
    for owner in range(40):
        context = pods.context(*pods.plans())
        context.owner = f"client {owner}"
        served = pods.serve(context)
        assert (served.status, served.received, served.asked) == (501, b"not yet", ["a", "b"])
    assert (pods.held_against("ab"), states(pods)) == ([(0, 0)] * 2, [PodState.READY] * 2)


# --- ejections ---


def states(pods: ScriptedPods) -> list[PodState]:
    return [status.state for status in pods.fleet.snapshot.pods]


def ask(pods: ScriptedPods, client: object, *, stream: bool = False) -> MemoryExchange:
    return pods.chat(headers=[(b"authorization", str(client).encode())], stream=stream)


@pytest.mark.parametrize("script", [BROKEN, SILENT, ERROR])
def test_the_requests_of_one_client_eject_no_pod(script: Script) -> None:
    """However often it sends a body that kills engines: the whole fleet would follow."""
    pods = ScriptedPods(retries=10, a=script, b=script, c=script, d=script)
    for _ in range(20):
        ask(pods, "mine")
        pods.now_s += 10.0
    assert states(pods) == [PodState.READY] * 4


@pytest.mark.parametrize("script", [ERROR, failing(UpstreamBroken, after=TOKEN)])
def test_a_client_with_many_names_ejects_no_pod_that_serves_others(script: Script) -> None:
    """It makes up credentials and sends bodies that break engines, many of them between two good requests."""
    pods = ScriptedPods(a=script, b=serving)
    for burst in range(3):
        pods.scripts["a"] = script
        for number in range(10):
            ask(pods, (burst, number), stream=True)
            pods.now_s += 0.1
        pods.scripts["a"] = serving
        ask(pods, "theirs")
    assert states(pods) == [PodState.READY] * 2


def test_a_pod_that_fails_several_clients_is_ejected() -> None:
    """Its queue is always empty, so that it would attract all requests."""
    pods = ScriptedPods(a=ERROR, b=serving)
    for client in ("x", "x", "y"):
        assert ask(pods, client).status == 500
        pods.now_s += 2.0
    assert states(pods) == [PodState.EJECTED, PodState.READY]


def test_requests_never_eject_the_last_ready_pod() -> None:
    """However many fail, for any number of clients; the pod serves as soon as it can."""
    pods = ScriptedPods(a=ERROR)
    for client in range(20):
        assert ask(pods, client).status == 500
        pods.now_s += 1.0
    assert states(pods) == [PodState.READY]
    pods.scripts["a"] = serving
    assert ask(pods, "x").status == 200


def test_a_pod_with_very_late_first_tokens_is_ejected() -> None:
    """No request fails; only its TTFT is bad."""

    def late(exchange: MemoryExchange) -> None:
        pods.now_s += 60.0
        serving(exchange)

    pods = ScriptedPods(a=late, b=serving)
    for client in range(8):
        pods.chat(prompt=PROMPT, stream=True, headers=[(b"authorization", b"%d" % client)])
    assert states(pods) == [PodState.EJECTED, PodState.READY]


BODIES = {
    "nothing": b"",
    "a token": WHOLE,
    "usage": b'{"usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 99}}}',
    "an error event": b'data: {"error": {"message": "KV load failed", "code": 500}}\n\n',
    "another status": b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n",
    "a large one": b'{"error": "' + b"x" * 5_000_000 + b'"}',
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_the_body_of_a_refusal_ejects_no_pod(body: bytes, stream: bool) -> None:
    """Engines repeat parts of the request in it, so a client can choose its text. Only the status counts."""
    pods = ScriptedPods(a=serving, b=serving)
    for status in (400, 413, 422, 429, 499, 505):
        pods.scripts["a"] = responding(status, body, is_stream=stream)
        for client in range(3):
            served = ask(pods, client, stream=stream)
            assert (served.status, served.received) == (status, body)
            assert served.context is not None
            assert served.context.first_token_s is None and served.context.result != "ok"
            pods.now_s += 1.0
    assert not pods.breaker._failed


CUT = failing(UpstreamBroken, after=TOKEN)


@pytest.mark.parametrize("script", [responding(404, b"{}"), responding(400, b"{}"), responding(500, b"{}"), CUT])
def test_a_pod_that_fails_one_client_whom_another_serves_is_ejected(script: Script) -> None:
    """Also by a status that says nothing about a pod by itself, and where no second client is there to see it."""
    pods = ScriptedPods(a=script, b=serving)
    for _ in range(4):
        pods.serve(pods.context(Direct(pods.pod("a")), stream=True))
        pods.serve(pods.context(Direct(pods.pod("b")), stream=True))
    assert states(pods) == [PodState.EJECTED, PodState.READY]


def test_a_client_that_sends_bad_requests_ejects_no_pod() -> None:
    """They fail at every pod alike."""
    pods = ScriptedPods(a=responding(400, b"{}"), b=responding(400, b"{}"))
    for _ in range(20):
        for pod in "ab":
            pods.serve(pods.context(Direct(pods.pod(pod)), stream=True))
    assert states(pods) == [PodState.READY] * 2


# --- requests that may not be repeated ---


@pytest.mark.parametrize(("method", "repeated"), [("POST", 0), ("PATCH", 0), ("GET", 1), ("PUT", 1), ("DELETE", 1)])
@pytest.mark.parametrize("script", [BROKEN, SILENT, BUSY])
def test_an_unread_request_is_repeated_only_if_it_is_idempotent(script: Script, method: str, repeated: int) -> None:
    """A second POST to /v1/responses would create a second response; a 503 is relayed instead."""
    pods = ScriptedPods(a=script, b=serving)
    served = pods.serve(pods.unread(method, *pods.plans()))
    assert served.asked == ["a", "b"][: 1 + repeated]
    assert served.status == (200 if repeated else {BROKEN: 502, SILENT: 504, BUSY: 503}[script])


def test_an_unread_request_that_was_not_sent_is_tried_elsewhere() -> None:
    """The first pod accepts no connection."""
    pods = ScriptedPods(a=DOWN, b=serving)
    served = pods.serve(pods.unread("POST", *pods.plans()))
    assert (served.status, served.asked) == (200, ["a", "b"])


# --- requests that some plans cannot serve ---


def test_a_request_without_a_usable_candidate_is_refused() -> None:
    """No pod has failed."""
    pods = ScriptedPods(a=serving)
    context = pods.context(Direct(replace(pods.pod("a"), serves_alone=False)))
    assert (pods.serve(context).asked, pods.is_idle()) == ([], True)
    assert context.error == "Pod a serves no request on its own."


def test_a_request_that_cannot_be_split_is_served_by_one_pod() -> None:
    """Several choices would each need the KV. The skipped plan counts as no attempt."""
    pods = ScriptedPods(retries=0, p=serving, d=serving)
    split, alone = Split(pods.pod("p"), pods.pod("d")), Direct(pods.pod("d"))
    assert pods.serve(pods.context(split, alone, n=2)).asked == ["d"]
    refused = pods.serve(pods.context(split, n=2))
    assert (refused.status, b"Several choices" in refused.received) == (400, True)


def test_a_pod_without_handoff_facts_is_not_used_for_prefill() -> None:
    """Its bootstrap server has not responded yet."""
    pods = ScriptedPods(p=serving, d=serving)
    split, alone = Split(pods.pod("p"), pods.pod("d")), Direct(pods.pod("d"))
    pods.facts = None
    served = pods.serve(pods.context(split, alone))
    assert served.context is not None and served.context.candidate is not None
    assert (served.status, served.context.candidate.plan) == (200, alone)
    context = pods.context(split)
    assert (pods.serve(context).status, context.error) == (503, "Handoff facts of pod p are not known yet.")


@pytest.mark.parametrize("error", [UpstreamBroken, ConnectFailed])
def test_pods_without_a_failure_are_tried_first(error: type[UpstreamError]) -> None:
    """Other pairs with the failed prefill pod come later: they are the last resort."""

    def first(exchange: MemoryExchange) -> None:
        exchange.fail(error("gone", pod="p"))

    pods = ScriptedPods(p=serving, d=first, e=serving)
    pair, other, alone = (
        Split(pods.pod("p"), pods.pod("d")),
        Split(pods.pod("p"), pods.pod("e")),
        Direct(pods.pod("e")),
    )
    for plans, expected in (((pair, other, alone), alone), ((pair, other), other)):
        context = pods.context(*plans)
        assert pods.serve(context).status == 200
        assert context.candidate is not None and context.candidate.plan == expected


def test_a_pod_that_serves_the_second_attempt_did_not_fail_the_request() -> None:
    """Its failure is over; a pod that had no part in the second attempt has failed."""
    pods = ScriptedPods(p=serving, d=lambda exchange: exchange.fail(UpstreamBroken("gone", pod="p")), e=serving)
    pair, other = Split(pods.pod("p"), pods.pod("d")), Split(pods.pod("p"), pods.pod("e"))
    assert pods.serve(pods.context(pair, other, stream=True)).status == 200
    assert pods.held_against("pde") == [(0, 0)] * 3


# --- what a response changes ---


def test_a_streamed_prompt_calibrates_its_pod() -> None:
    """By the tokens that were computed, which differ from the expected ones where the engine had more cached."""
    seen: list[tuple[str, PrefillObservation]] = []

    def computing(exchange: MemoryExchange) -> None:
        pods.now_s += 2 * SAME_STEP_S
        serving(exchange)

    def record(pod: Pod, observation: PrefillObservation, now_s: float) -> None:
        seen.append((pod.id, observation))

    pods = ScriptedPods(a=computing)
    pods.calibrator.observe_prefill = record  # type: ignore[method-assign, assignment]
    pods.chat(stream=True)
    assert not seen, "the length of a prompt that was not read is only estimated"
    pods.chat(prompt=PROMPT, stream=True)
    ((pod, observation),) = seen
    # 7 cached tokens are expected, 48 of 50 are reported
    assert (pod, observation.tokens) == ("a", 2)
    assert observation.elapsed_ms == pytest.approx(2000 * SAME_STEP_S)


def test_an_error_that_repeats_the_prompt_has_no_first_token() -> None:
    """It would count as a prompt that was computed in no time, and clear the doubts about other pods."""
    pods = ScriptedPods(a=BROKEN, b=responding(422, b'{"detail": [{"input": {"role": "user", "content": "hi"}}]}'))
    pods.calibrator.observe_prefill = NotImplemented  # type: ignore[method-assign]
    served = pods.chat(prompt=PROMPT, stream=True)
    assert served.context is not None
    assert (served.status, served.context.first_token_s, pods.held_against("a")) == (422, None, [(0, 1)])


def test_a_first_token_shows_that_a_pod_is_alive() -> None:
    """It may be too busy for its health check while it streams."""

    def long(exchange: MemoryExchange) -> None:
        exchange.head()
        exchange.piece(TOKEN)
        pods.breaker.probe_failed("a", pods.now_s)
        exchange.piece(LAST)
        exchange.end()

    pods = ScriptedPods(a=long)
    pods.breaker.probe_failed("a", pods.now_s)
    pods.breaker.probe_failed("a", pods.now_s)
    pods.chat(stream=True)
    assert states(pods) == [PodState.READY]


@pytest.mark.parametrize("stream", [True, False])
def test_parts_of_answers_show_that_a_pod_is_alive(stream: bool) -> None:
    """Also those that the router holds."""

    def long(exchange: MemoryExchange) -> None:
        exchange.head()
        for piece in (TOKEN, TOKEN, TOKEN, LAST):
            sent_s, pods.now_s = pods.now_s, pods.now_s + 1.0
            exchange.piece(piece)
            pods.now_s += 1.0
            pods.breaker.probe_failed("a", pods.now_s, sent_s)
        exchange.end()

    pods = ScriptedPods(a=long, b=serving)
    pods.chat(stream=stream)
    assert states(pods) == [PodState.READY, PodState.READY]


def test_the_prompt_is_dropped_after_the_first_token_of_a_stream() -> None:
    """Not before, because a retry needs it."""
    pods = ScriptedPods(a=serving)
    context = pods.context(*pods.plans(), prompt=PROMPT, stream=True)
    exchange = MemoryExchange(pods.core, context)
    exchange.attempt_decided()
    exchange.head()
    assert context.request.body
    exchange.piece(TOKEN)
    assert (context.request.body, context.prompt_tokens) == (b"", 50)


def test_route_headers_name_pods_policy_and_cached_tokens() -> None:
    """And the request id."""
    pods = ScriptedPods(a=serving, b=serving)
    for plan, prefill_pod in ((Direct(pods.pod("a")), None), (Split(pods.pod("b"), pods.pod("a")), b"b")):
        exchange = pods.serve(pods.context(plan))
        assert exchange.tracker is not None
        headers = dict(exchange.tracker.headers())
        names = (b"x-request-id", b"x-warmroute-pod", b"x-warmroute-policy", b"x-warmroute-cached-tokens")
        assert [headers[name] for name in names] == [b"req-1", b"a", b"scripted", b"7"]
        assert headers.get(b"x-warmroute-prefill-pod") == prefill_pod


SHORT = PromptPrefix(Generation(model="m"), token_array(range(32)), hash_array([1, 2]))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [REFUSED, ERROR, BUSY, BROKEN, DOWN])
def test_a_prompt_that_was_not_computed_is_not_cached(script: Script, stream: bool) -> None:
    """What an earlier request left there still is."""
    pods = ScriptedPods(a=serving)
    for pods.scripts["a"], prompt in ((serving, SHORT), (script, PROMPT)):
        pods.chat(prompt=prompt, stream=stream)
        match = pods.store.match(PROMPT, pods.now_s)
        assert {pod: match.held_blocks(pod) for pod in match.blocks} == {"a": 2}


def test_a_pod_has_seen_the_pictures_of_the_prompts_that_it_computed() -> None:
    """Not of those that it refused."""
    picture = PromptPicture(1, 40, 8)
    pods = ScriptedPods(a=serving, b=REFUSED)
    for plan in pods.plans():
        pods.serve(pods.context(plan, prompt=structs.replace(PROMPT, pictures=(picture,))))
    (found,) = pods.pictures.seen([picture], pods.fleet.snapshot)
    assert found.pods == ("a",)


def test_a_pod_without_events_keeps_the_predicted_blocks_that_fit_its_capacity() -> None:
    """Its reported capacity, or else the configured one of 1,000 tokens."""
    pods = ScriptedPods(a=serving)
    pods.publishes_events = False
    for capacity_tokens in (None, 64):
        plan = Direct(replace(pods.pod("a"), capacity_tokens=capacity_tokens))
        pods.serve(pods.context(plan, prompt=PROMPT))
    assert pods.store.capacities_blocks == [62, 4]
