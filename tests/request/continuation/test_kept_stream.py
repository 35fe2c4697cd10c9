"""A broken stream goes on, on another pod, and leaves nothing behind: leases, predictions, memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import pytest
from msgspec import structs

from router.admission.fair_bound import FairBound
from router.decision import Candidate, Cost, Direct, RouteDecision
from router.errors import ConnectFailed, UpstreamBroken, UpstreamError, UpstreamTimeout
from router.fleet.fleet import NOT_READY, PodEvent
from router.hashing import hash_array, token_array
from router.prompt.apis.vllm_messages import VllmMessages
from router.request.attempt_rules import AttemptRules, ContinuationRules
from router.request.context import RequestContext
from router.request.continuation.kept_stream import KeptStream, StreamState
from router.request.continuation.later_pods import SILENT_STEPS, StepTimes
from router.request.effects import Effects
from router.request.response_reader import reader_of
from router.request.tracker import Tracker
from router.types import Endpoint, Generation, PodState, PrefixTrust, PromptPrefix, UsageShown
from tests.kit.cores import EVENT_HEADERS, JSON_HEADERS, CoreOfPods, pods_at
from tests.request.continuation.recorded import Received, body_of, case_named, event, stream, words
from tests.request.continuation.recorded_pod import RecordedPod
from tests.request.continuation.test_repeated_stream import ANSWER, WRITERS, Write, steps_of, without_ids_of_later_pods

T = TypeVar("T")
PODS = {one: f"http://{one}" for one in "abcd"}
PROMPT = PromptPrefix(Generation(model="m"), token_array(range(50)), hash_array([1, 2, 3]))


class Fleet:
    """Pods that answer as recorded, and one request."""

    def __init__(
        self,
        name: str,
        plans: str = "abcd",
        *,
        limit: int = 1_000_000,
        endpoint: Endpoint = Endpoint.CHAT,
        proven: str = "",
        steps: StepTimes | None = None,
        usage: UsageShown = UsageShown.ALL,
        **fields: Any,
    ) -> None:
        self.core = CoreOfPods([replace(pod, version="0.32.0") for pod in pods_at(PODS)])
        for pod in PODS:
            self.core.fleet.learn(pod, continues=frozenset({Endpoint.CHAT}))
        for pod in proven:
            self.core.fleet.learn(pod, converts=frozenset({Endpoint.MESSAGES}), trust=PrefixTrust.TRUSTED)
        self.memory = FairBound(limit, "bytes of request bodies", "limits.max_held_bytes")
        self.case = {**case_named(name), "request": {**case_named(name)["request"], **fields}}
        context = self.core.context(*(Direct(self.core.pod(one)) for one in plans), prompt=PROMPT, stream=True)
        context.request = type(context.request)(
            **{
                **{name: getattr(context.request, name) for name in context.request.__struct_fields__},
                "body": body_of(self.case),
                "endpoint": endpoint,
                "usage": usage,
            }
        )
        context.reader = reader_of(endpoint)
        self.context, self.plans, self.received, self.now_s = context, plans, b"", 0.0
        rules = self.core.core.rules
        assert isinstance(rules, AttemptRules)
        rules = replace(rules, memory=self.memory)
        known = replace(words(), messages=VllmMessages(None))
        options = ContinuationRules(words_of=lambda _model: known, silence_s=5.0, steps=steps or StepTimes())
        self.counted: list[tuple[str, str, str]] = []
        counters = self.core.core.counters
        counters.continued = lambda *labels: self.counted.append(labels)  # type: ignore[method-assign]
        rules = replace(rules, continuation=options)
        self.stream = KeptStream(context, self.core.state, rules, counters, self._decide_again)
        self.tracker = Tracker(context, self.core.state, rules, counters, stream=self.stream)
        self.core.core.counters.requests_began(1)
        self.begin(self.tracker.first(0.0))

    def _decide_again(self, context: RequestContext, now_s: float) -> tuple[None, RouteDecision]:
        assert context.decision is not None
        known = [one for one in context.decision.candidates if self.core.fleet.status(one.pod.id) is not None]
        now = (Candidate(Direct(self.core.pod(one.pod.id)), one.cost, one.cached_tokens) for one in known)
        return None, RouteDecision("scripted", "1", tuple(now))

    def begin(self, candidate: Candidate) -> None:
        self.pod = candidate.pod.id
        self.tracker.begin(candidate, self.now_s)

    def answer(self, share: float, fault: bytes = b"", step_s: float = 0.0) -> None:
        """The pod sends a share of its events, `step_s` after each other, and a fault."""
        self.tracker.head(self.pod, 200, EVENT_HEADERS, self.now_s)
        sent = RecordedPod(self.case, id=f"of-{self.pod}", created=ord(self.pod)).stream(self.tracker.body)
        for piece in [*sent[: round(share * len(sent))], *([fault] if fault else ())]:
            self.now_s += step_s
            self.received += self.tracker.piece(piece, self.now_s)

    def fail(self, error: UpstreamError | None = None) -> bool:
        """Whether another pod continues."""
        candidate = self.tracker.failed(error or UpstreamBroken("cut", pod=self.pod), self.now_s)
        if candidate is not None:
            self.begin(candidate)
        return candidate is not None

    def may_move(self) -> bool:
        """Whether the stream leaves its pod, as a front asks it."""
        self.stream.call()
        with pytest.raises(StopIteration) as found:
            self.stream.moves(lambda: self.now_s, cast(Effects, self)).send(None)
        return bool(found.value.value)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return work()

    def move(self) -> bool:
        return self.may_move() and self.fail()

    def end(self) -> None:
        self.stream.pod_ended(self.pod)
        self.tracker.complete(self.now_s)

    def close(self) -> None:
        """End the request: nothing is left of it."""
        self.tracker.end(self.now_s)
        self.core.core.endings.end(self.context)
        assert self.core.is_idle()
        assert self.memory.used == 0


def whole(received: bytes) -> Any:
    return Received(received).whole


def uncut_stream(name: str, **fields: Any) -> bytes:
    fleet = Fleet(name, **fields)
    fleet.answer(1.0)
    fleet.end()
    fleet.close()
    return fleet.received


def uncut(name: str) -> Any:
    return whole(uncut_stream(name))


@pytest.mark.parametrize("name", ["bytes", "think", "tools, thinking", "stop", "sampled", "json schema"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_other_pod_continues_and_client_reads_one_answer(name: str, share: float) -> None:
    fleet = Fleet(name)
    fleet.answer(share)
    assert fleet.fail()
    assert fleet.pod == "b"
    fleet.answer(1.0)
    fleet.end()
    fleet.close()
    assert whole(fleet.received) == uncut(name)
    assert fleet.counted[0][1:] == ("connection", "joined")


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.9])
@pytest.mark.parametrize("name", ["bytes", "think", "tools, thinking", "stop"])
def test_a_client_that_has_not_asked_for_usage_sees_none_of_two_pods(name: str, share: float) -> None:
    """The router has asked both, and counts what they report; behind the end of the text, usage is not waited for."""
    asked: dict[str, Any] = {"stream_options": {"include_usage": True}}
    fleet = Fleet(name, usage=UsageShown.NONE, **asked)
    fleet.answer(share)
    if fleet.fail():
        fleet.answer(1.0)
        fleet.end()
        assert fleet.context.reader.output_tokens is not None
    fleet.received += fleet.tracker.rest(0.0) + fleet.tracker.last_events
    fleet.close()
    seen, expected = Received(fleet.received), Received(uncut_stream(name, **asked))
    assert expected.usage and not seen.usage and b'"usage":{' not in fleet.received
    assert (seen.texts, seen.finish, seen.calls.keys(), seen.is_done) == (
        expected.texts,
        expected.finish,
        expected.calls.keys(),
        True,
    )


@pytest.mark.parametrize("more", [frozenset({Endpoint.COMPLETIONS}), frozenset[Endpoint]()])
def test_pod_that_has_shown_more_continues_a_chat_and_one_that_has_not_shown_chats_does_not(
    more: frozenset[Endpoint],
) -> None:
    fleet = Fleet("bytes", plans="ab")
    fleet.answer(0.5)
    fleet.core.fleet.learn("b", continues=more | ({Endpoint.CHAT} if more else set()))
    assert fleet.fail() == bool(more)
    fleet.close()


def test_tokens_count_once() -> None:
    fleet, expected = Fleet("bytes"), case_named("bytes")["usage"]
    fleet.answer(0.5)
    assert fleet.fail()
    fleet.answer(1.0)
    fleet.end()
    reader = fleet.context.reader
    assert (reader.prompt_tokens, reader.output_tokens) == (expected["prompt_tokens"], expected["completion_tokens"])
    fleet.close()


def test_missing_end_is_made_without_a_pod() -> None:
    fleet = Fleet("bytes")
    fleet.answer(0.97)
    assert not fleet.fail()
    fleet.received += fleet.tracker.last_events
    fleet.close()
    assert whole(fleet.received) == uncut("bytes")
    assert fleet.context.result == "ok"
    assert fleet.counted == [("finish", "connection", "joined")]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (b'data: {"error": {"message": "EngineCore encountered an issue."}}\n\ndata: [DONE]\n\n', "error event"),
        (b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\ndata: [DONE]\n\n', "aborted"),
        (b"data: [DONE]\n\n", "[DONE] before the end"),
        (b"", "ended without [DONE]"),
    ],
)
def test_clean_ends_that_are_none_are_faults(fault: bytes, cause: str) -> None:
    fleet = Fleet("bytes")
    fleet.answer(0.5, fault)
    with pytest.raises(UpstreamBroken) as caught:
        fleet.stream.pod_ended(fleet.pod)
    assert fleet.fail(caught.value)
    fleet.answer(1.0)
    fleet.end()
    fleet.close()
    assert whole(fleet.received) == uncut("bytes")
    assert fleet.counted[0][1] == cause


def test_no_third_pod_gets_a_body_that_two_pods_died_of() -> None:
    fleet = Fleet("bytes")
    fleet.answer(0.3)
    assert fleet.fail()
    fleet.answer(0.5)
    assert not fleet.fail()
    fleet.close()
    assert fleet.counted[-1] == ("none", "connection", "two pods failed")


def test_rolling_update_moves_a_stream_as_often_as_needed() -> None:
    """No pod has failed: neither the limits of a body nor the retry budget count."""
    fleet = Fleet("bytes")
    while fleet.stream.rules.budget.spend(0.0):
        pass
    for share in (0.2, 0.4, 0.6):
        fleet.answer(share)
        fleet.core.fleet.event(fleet.pod, PodEvent.DRAIN, reason="terminating")
        assert fleet.fail()
    fleet.answer(1.0)
    fleet.end()
    fleet.close()
    assert whole(fleet.received) == uncut("bytes")
    assert fleet.counted == [("ids", "connection", "failed")] * 2 + [("ids", "connection", "joined")]


def test_stream_leaves_a_drained_pod_which_has_not_failed() -> None:
    fleet, doubts = Fleet("bytes"), list[str]()
    fleet.core.state.breaker.doubt = lambda pod, *_: doubts.append(pod)  # type: ignore[method-assign]
    fleet.answer(0.2, step_s=0.1)
    assert fleet.stream.move_ms() is None  # its pod is ready
    fleet.core.fleet.event("a", PodEvent.DRAIN, reason="drained by command")
    assert fleet.stream.move_ms()
    assert fleet.move()
    assert fleet.pod == "b"
    fleet.answer(1.0)
    fleet.end()
    fleet.close()
    assert whole(fleet.received) == uncut("bytes")
    assert fleet.counted == [("ids", "moved", "joined")]
    assert not doubts


def test_pod_that_continues_computes_prompt_and_answer_until_its_first_piece() -> None:
    """Later decisions see all of it, and its time says how fast the pod is."""
    fleet = Fleet("bytes")
    prompt, later = fleet.core.state.ledger.on("a"), partial(fleet.core.state.ledger.on, "b")
    fleet.answer(0.5)
    assert fleet.fail()
    assert later().context_tokens == prompt.context_tokens + 31
    assert later().prefill_tokens == prompt.prefill_tokens + 31
    fleet.answer(0.1)
    assert (later().prefill_tokens, later().decode_tokens) == (0, prompt.context_tokens + 31)
    fleet.close()


def test_move_takes_less_of_the_time_of_other_pods_where_there_are_more() -> None:
    costs = []
    for pods in ("ab", "abcd"):
        fleet = Fleet("bytes", pods)
        fleet.answer(0.2, step_s=0.1)
        fleet.core.fleet.event("a", PodEvent.DRAIN, reason="drained by command")
        costs.append(fleet.stream.move_ms())
        fleet.close()
    assert costs[0] and costs[1] == pytest.approx(costs[0] / 3)


def test_stream_that_would_be_made_again_stays_on_its_drained_pod() -> None:
    """Its grammar begins anew: another pod takes longer for the whole answer than this one for the rest. It is asked
    once."""
    fleet = Fleet("json schema")
    fleet.answer(0.5, step_s=0.1)
    fleet.core.fleet.event("a", PodEvent.DRAIN, reason="drained by command")
    assert fleet.stream.move_ms()
    assert not fleet.move()
    assert fleet.stream.move_ms() is None
    fleet.close()


def test_stream_that_is_called_when_its_pod_fails_is_not_called_away_from_the_next_one() -> None:
    fleet = Fleet("bytes")
    fleet.answer(0.2, step_s=0.1)
    fleet.core.fleet.event("a", PodEvent.DRAIN, reason="drained by command")
    fleet.stream.call()
    assert fleet.fail()
    assert fleet.stream.state is not StreamState.CALLED
    fleet.close()


def test_stream_stays_on_a_pod_that_is_not_drained_any_more_when_it_could_move() -> None:
    fleet = Fleet("bytes")
    fleet.answer(0.2, step_s=0.1)
    assert not fleet.move()
    fleet.close()


def test_stream_comes_back_to_a_pod_that_it_left_and_that_is_another_one_now() -> None:
    """As in the rolling update of a StatefulSet, which keeps the names of its pods."""
    fleet = Fleet("bytes", "ab")
    for share, pod in ((0.2, "a"), (0.4, "b")):
        fleet.answer(share, step_s=0.1)
        fleet.core.fleet.event(pod, PodEvent.DRAIN, reason="terminating")
        assert fleet.move()
    assert fleet.pod == "a"
    fleet.answer(1.0)
    fleet.end()
    fleet.close()
    assert whole(fleet.received) == uncut("bytes")


def test_stream_does_not_leave_its_drained_pod_while_no_other_one_may_go_on() -> None:
    fleet = Fleet("bytes", "ab")
    fleet.answer(0.2, step_s=0.1)
    fleet.core.fleet.event("a", PodEvent.DRAIN, reason="drained by command")
    fleet.core.fleet.sync([pod for pod in pods_at(PODS) if pod.id != "b"])
    assert not fleet.may_move()
    fleet.close()


def test_pods_that_are_drained_because_they_are_not_ready_have_failed() -> None:
    fleet = Fleet("bytes")
    for share in (0.2, 0.4):
        fleet.answer(share)
        fleet.core.fleet.event(fleet.pod, PodEvent.DRAIN, reason=NOT_READY)
        can_go_on = fleet.fail()
    assert not can_go_on
    fleet.close()
    assert fleet.counted[-1] == ("none", "connection", "two pods failed")


def test_pod_that_cannot_be_reached_is_not_the_last_one() -> None:
    fleet = Fleet("bytes")
    fleet.answer(0.3)
    assert fleet.fail()
    assert fleet.fail(ConnectFailed("refused", pod="b"))
    assert fleet.pod == "c"
    fleet.answer(1.0)
    fleet.end()
    fleet.close()
    assert whole(fleet.received) == uncut("bytes")


def test_without_another_pod_the_stream_ends() -> None:
    fleet = Fleet("bytes", plans="ab")
    fleet.answer(0.3)
    fleet.core.fleet.sync([pod for pod in pods_at(PODS) if pod.id != "b"])
    assert not fleet.fail()
    fleet.close()
    assert fleet.counted == [("none", "connection", "no pod")]


def test_a_stream_goes_on_at_a_pod_of_the_same_front_end() -> None:
    """Another one writes other events, and reads other prompts."""
    fleet = Fleet("bytes")
    fleet.answer(0.3)
    fleet.core.fleet.learn("b", front_end="rust")
    assert fleet.fail()
    assert fleet.pod == "c"


def test_client_that_leaves_leaves_nothing() -> None:
    fleet = Fleet("bytes")
    fleet.answer(0.3)
    assert fleet.fail()
    fleet.answer(0.3)
    fleet.tracker.left(fleet.now_s)
    fleet.close()


def test_pod_that_sends_another_answer_ends_the_stream() -> None:
    fleet = Fleet("json schema")
    fleet.answer(0.5)
    assert fleet.fail()
    fleet.case = case_named("json schema, thinking")
    fleet.tracker.head(fleet.pod, 200, EVENT_HEADERS, 0.0)
    for piece in RecordedPod(fleet.case).stream(body_of(fleet.case)):
        fleet.received += fleet.tracker.piece(piece, 0.0)
    with pytest.raises(UpstreamBroken, match="another prompt"):
        fleet.stream.pod_ended(fleet.pod)
    assert not fleet.fail()
    fleet.close()
    assert ("replay", "connection", "differs") in fleet.counted


def test_silent_pod_has_failed_once_it_is_not_ready() -> None:
    fleet = Fleet("bytes")
    fleet.answer(0.3)
    assert not fleet.stream.is_silent(100.0)  # it may compute a long step: nobody else says that it has failed
    fleet.core.fleet.event("a", PodEvent.EJECT)
    assert not fleet.stream.is_silent(1.0)
    assert fleet.stream.is_silent(100.0)


def test_silent_pod_has_failed_once_its_health_checks_fail_although_it_sends_other_things() -> None:
    """It stays ready for new requests: this stream alone goes on elsewhere."""
    fleet = Fleet("bytes")
    fleet.answer(0.3)
    for now_s in range(3):
        fleet.core.fleet.received("a", now_s + 0.5)
        assert not fleet.stream.is_silent(100.0)
        fleet.core.breaker.probe_failed("a", now_s + 1.0, float(now_s))
    status = fleet.core.fleet.status("a")
    assert status is not None and status.state is PodState.READY
    assert not fleet.stream.is_silent(1.0)
    assert fleet.stream.is_silent(100.0)
    fleet.core.breaker.seen_alive("a")
    assert not fleet.stream.is_silent(100.0)
    fleet.close()


def test_silent_pod_is_waited_for_while_no_other_pod_may_go_on() -> None:
    """A machine under load: health checks of all pods time out, and their streams are slow."""
    fleet = Fleet("bytes", "ab")
    fleet.answer(0.3)
    fleet.core.fleet.event("a", PodEvent.EJECT)
    assert fleet.stream.is_silent(100.0)
    for change in (PodEvent.DRAIN, PodEvent.LOST):
        fleet.core.fleet.event("b", change)
    assert not fleet.stream.is_silent(100.0)
    fleet.close()


def test_pod_may_be_silent_for_a_multiple_of_the_steps_that_it_takes_for_such_streams() -> None:
    steps = StepTimes()
    slow = Fleet("bytes", steps=steps)
    slow.answer(1.0, step_s=1.0)
    slow.end()
    slow.close()
    for pods, limit_s in (("abcd", SILENT_STEPS), ("bacd", 5.0)):  # of b nothing is known
        fleet = Fleet("bytes", pods, steps=steps)
        fleet.answer(0.3)
        fleet.core.fleet.event(fleet.pod, PodEvent.EJECT)
        assert not fleet.stream.is_silent(0.9 * limit_s)
        assert fleet.stream.is_silent(1.1 * limit_s)
        fleet.close()


def test_steps_of_streams_that_other_pods_continued_are_not_learnt() -> None:
    steps = StepTimes()
    fleet = Fleet("bytes", steps=steps)
    fleet.answer(0.5, step_s=1.0)
    assert fleet.fail()
    fleet.answer(1.0, step_s=1.0)
    fleet.end()
    fleet.close()
    assert [steps.silence_s(pod, "") for pod in "ab"] == [0.0, 0.0]


def test_step_times_follow_a_pod_and_are_bounded() -> None:
    steps = StepTimes()
    for _ in range(100):
        steps.learn("a", "chat", 1.0)
    assert steps.silence_s("a", "chat") == pytest.approx(SILENT_STEPS)
    for _ in range(100):
        steps.learn("a", "chat", 0.1)
    assert steps.silence_s("a", "chat") == pytest.approx(0.1 * SILENT_STEPS, rel=0.01)
    for number in range(10_000):
        steps.learn(f"{number}", "chat", 1.0)
    assert steps.silence_s("a", "chat") == 0.0
    assert steps.silence_s("9999", "chat") == SILENT_STEPS


def test_pod_that_is_silent_before_its_first_event_is_replaced_once_it_is_not_ready() -> None:
    fleet = Fleet("bytes")
    fleet.tracker.head("a", 200, EVENT_HEADERS, 0.0)
    assert not fleet.stream.is_silent(100.0)
    fleet.core.fleet.event("a", PodEvent.DRAIN)
    assert not fleet.stream.is_silent(1.0)
    assert fleet.stream.is_silent(100.0)
    assert fleet.fail()
    fleet.answer(1.0)
    fleet.end()
    fleet.close()
    assert whole(fleet.received) == uncut("bytes")
    assert not fleet.counted


def test_pod_that_sends_no_head_is_silent_after_the_time_that_its_prompt_takes() -> None:
    fleet = Fleet("bytes")
    fleet.tracker.release(0.0)
    fleet.begin(Candidate(Direct(fleet.core.pod("a")), Cost(("prefill",), (1000.0,), 1000.0), 0))
    fleet.core.fleet.event("a", PodEvent.DRAIN)
    assert not fleet.stream.is_silent(5.1)
    assert fleet.stream.is_silent(6.2)
    fleet.close()


def test_without_memory_the_stream_is_not_continued() -> None:
    fleet = Fleet("bytes", limit=100)
    fleet.answer(0.5)
    assert not fleet.fail()
    fleet.close()
    assert fleet.counted == [("none", "connection", "memory")]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "yes"),
        ({"temperature": 1.0}, "yes"),
        ({"temperature": 1.0, "tools": [{"type": "function"}]}, "until=tool-call"),
        ({"temperature": 1.0, "response_format": {"type": "json_object"}}, "until=content"),
        ({"temperature": 1.0, "seed": 1}, "yes"),
        ({"temperature": 1.0, "presence_penalty": 1.0}, "no; reason=presence penalty"),
        ({"n": 2}, "no; reason=n"),
        ({"return_token_ids": True}, "no; reason=token ids"),
        ({"max_tokens": "many"}, "no; reason=body"),
    ],
)
def test_response_says_until_where_it_may_be_continued(fields: dict[str, Any], said: str) -> None:
    fleet = Fleet("bytes", **fields)
    assert dict(fleet.tracker.headers())[b"x-warmroute-continuable"] == said.encode()
    fleet.close()


@pytest.mark.parametrize(
    ("fields", "why"), [({"n": 2}, "n"), ({"temperature": 1.0, "presence_penalty": 1.0}, "presence penalty")]
)
def test_broken_stream_that_was_refused_from_the_start_is_counted_by_its_reason(
    fields: dict[str, Any], why: str
) -> None:
    fleet = Fleet("bytes", **fields)
    fleet.answer(0.5)
    assert not fleet.fail()
    fleet.close()
    assert fleet.counted == [("none", "connection", why)]


@pytest.mark.parametrize(
    ("plans", "proven", "said"), [("a", Endpoint.CHAT, "one pod"), ("ab", Endpoint.COMPLETIONS, "engine")]
)
def test_response_says_why_its_pods_cannot_continue_it(plans: str, proven: Endpoint, said: str) -> None:
    fleet = Fleet("sampled", plans=plans)
    fleet.core.fleet.learn("a", continues=frozenset({proven}))
    pod = fleet.core.pod("a")
    fleet.tracker.release(0.0)
    fleet.begin(Candidate(Direct(pod), fleet.context.decision.candidates[0].cost, 0))  # type: ignore[union-attr]
    assert dict(fleet.tracker.headers())[b"x-warmroute-continuable"] == f"no; reason={said}".encode()
    assert b"return_token_ids" not in fleet.tracker.body
    fleet.close()


def test_pod_that_makes_another_text_ends_the_stream() -> None:
    fleet = Fleet("json schema")
    fleet.answer(0.5)
    before = fleet.received
    assert fleet.fail()
    fleet.tracker.head(fleet.pod, 200, EVENT_HEADERS, 0.0)
    for sent in (event({"role": "assistant", "content": ""}), event({"content": '{"town": "'}, t=[1])):
        fleet.received += fleet.tracker.piece(sent, 0.0)
    with pytest.raises(UpstreamBroken, match="other text"):
        fleet.stream.pod_ended(fleet.pod)
    assert not fleet.fail()
    assert fleet.received == before
    fleet.close()


def test_stream_with_two_calls_passes_when_there_is_no_memory_for_it() -> None:
    """Nothing is remembered of it, and it stays whole."""
    fleet = Fleet("tools, thinking", limit=10)
    fleet.answer(1.0)
    fleet.end()
    assert fleet.tracker.body == b"", "the body is not needed any more"
    fleet.close()
    assert whole(fleet.received) == uncut("tools, thinking")


def test_completion_with_two_prompts_is_not_recorded() -> None:
    fleet = Fleet("bytes", "ab")
    fleet.context.request = structs.replace(fleet.context.request, prompts=2)
    fleet.tracker.release(0.0)
    fleet.begin(fleet.tracker.first(0.0))
    assert not fleet.stream.is_recorded
    fleet.close()


def test_busy_pod_that_refuses_the_rest_has_not_failed() -> None:
    fleet = Fleet("bytes")
    fleet.answer(0.5)
    assert fleet.fail()
    with pytest.raises(UpstreamBroken) as refused:
        fleet.tracker.head(fleet.pod, 429, JSON_HEADERS, 0.0)
    doubts: list[str] = []
    breaker = fleet.core.state.breaker
    breaker.doubt = lambda pod, *_: doubts.append(pod)  # type: ignore[method-assign]
    breaker.ended = lambda pod, *_, **__: doubts.append(pod)  # type: ignore[method-assign]
    assert fleet.fail(refused.value)
    assert not doubts
    fleet.answer(1.0)
    fleet.end()
    fleet.close()
    assert whole(fleet.received) == uncut("bytes")


def test_connection_that_breaks_behind_the_end_has_lost_nothing() -> None:
    fleet = Fleet("bytes")
    fleet.answer(0.9)
    assert not fleet.stream.is_whole
    fleet.close()
    fleet = Fleet("bytes")
    fleet.answer(1.0)
    assert fleet.stream.is_whole
    fleet.end()
    fleet.close()


def test_no_third_pod_gets_a_body_of_which_one_died_before_its_first_byte() -> None:
    fleet = Fleet("bytes")
    assert fleet.fail()
    fleet.answer(0.5)
    assert not fleet.fail()
    fleet.close()
    assert fleet.counted[-1] == ("none", "connection", "two pods failed")


def test_pod_that_was_busy_or_out_of_reach_before_the_first_byte_has_not_died() -> None:
    fleet = Fleet("bytes")
    with pytest.raises(UpstreamBroken) as busy:
        fleet.tracker.head("a", 503, JSON_HEADERS, 0.0)
    assert fleet.fail(busy.value)
    assert fleet.fail(ConnectFailed("refused", pod="b"))
    fleet.answer(0.5)
    assert fleet.fail()
    assert fleet.pod == "d"
    fleet.answer(1.0)
    fleet.end()
    fleet.close()
    assert whole(fleet.received) == uncut("bytes")


@pytest.mark.parametrize("name", ["bytes", "sampled, tools", "json schema"])
def test_pod_that_only_sent_pings_is_replaced_as_if_nothing_was_sent(name: str) -> None:
    fleet = Fleet(name)
    fleet.tracker.head("a", 200, EVENT_HEADERS, 0.0)
    assert fleet.tracker.piece(b": ping\n\n", 0.0) == b": ping\n\n"
    assert fleet.fail()
    fleet.answer(1.0)
    fleet.end()
    fleet.close()
    assert whole(fleet.received.removeprefix(b": ping\n\n")) == uncut(name)


def test_owner_of_remembered_bytes_is_not_a_name_that_the_client_gives() -> None:
    fleet = Fleet("bytes")
    fleet.context.request = structs.replace(fleet.context.request, tenant="anybody")
    fleet.answer(0.5)
    assert fleet.memory.part(fleet.context.owner) > 0
    assert fleet.memory.part("anybody") == 0
    fleet.close()


def test_event_of_which_the_rest_is_missing_counts_as_memory() -> None:
    fleet = Fleet("bytes")
    fleet.answer(0.5, b'data: {"x":"' + bytes(100_000))
    assert fleet.memory.used > 100_000
    fleet.close()


def test_text_inside_a_call_counts_as_memory() -> None:
    fleet = message_fleet("sampled")
    call = {"index": 0, "id": "one", "function": {"name": "f", "arguments": ""}}
    fleet.answer(0.2, event({"tool_calls": [call]}, t=[1]) + event({"content": "x" * 100_000}, t=[2]))
    fleet.received += fleet.tracker.piece(b": ping" + bytes(5000), 1.0)
    assert fleet.memory.used > 200_000
    fleet.close()


def test_pod_that_has_not_shown_that_it_continues_gets_no_ids() -> None:
    fleet = Fleet("sampled")
    fleet.answer(0.5)
    for pod in "bc":
        fleet.core.fleet.learn(pod, continues=frozenset())
    assert fleet.fail()
    assert fleet.pod == "d"
    fleet.answer(1.0)
    fleet.end()
    fleet.close()
    assert whole(fleet.received) == uncut("sampled")


@pytest.mark.parametrize(("endpoint", "write"), WRITERS)
def test_agents_stream_is_made_again_and_leaves_nothing(endpoint: Endpoint, write: Write) -> None:
    fleet = Fleet("bytes", endpoint=endpoint, temperature=0)
    assert dict(fleet.tracker.headers())[b"x-warmroute-continuable"] == b"yes"
    for number, share in enumerate((0.5, 0.7, 1.0)):
        sent = write(ANSWER, (3 + number,), number)
        fleet.tracker.head(fleet.pod, 200, EVENT_HEADERS, fleet.now_s)
        fleet.received += fleet.tracker.piece(sent[: int(share * len(sent))], fleet.now_s)
        assert fleet.memory.used > 0
        if number < 2:
            with pytest.raises(UpstreamBroken):
                fleet.stream.pod_ended(fleet.pod)
            assert fleet.fail(UpstreamTimeout("silent", pod=fleet.pod))
    fleet.end()
    assert fleet.context.reader.output_tokens == 12
    body = fleet.tracker.body
    assert (b'"request_id":"resp-0"' in body) == (endpoint is Endpoint.RESPONSES)
    fleet.close()
    assert without_ids_of_later_pods(steps_of(fleet.received), 3) == steps_of(write(ANSWER, (3,), 0))
    assert [method for method, _, _ in fleet.counted] == ["replay", "replay"]


@pytest.mark.parametrize(
    ("fields", "why"), [({"temperature": 1.0}, "sampled"), ({"temperature": 0, "store": True}, "not repeatable")]
)
def test_agents_stream_that_cannot_be_made_again_is_refused_by_name(fields: dict[str, Any], why: str) -> None:
    fleet = Fleet("bytes", endpoint=Endpoint.RESPONSES, **fields)
    fleet.context.request = structs.replace(fleet.context.request, prompt=fields)
    fleet.tracker.release(0.0)
    fleet.begin(fleet.tracker.first(0.0))
    assert dict(fleet.tracker.headers())[b"x-warmroute-continuable"] == f"no; reason={why}".encode()
    fleet.close()


def message_fleet(name: str, **more: Any) -> Fleet:
    """One sampled message, which pods answer as the recorded chat."""
    fleet = Fleet(name, proven=more.pop("proven", "abcd"))
    asked = {one: value for one, value in fleet.case["request"].items() if one != "stream_options"}
    asked |= more
    if tools := asked.get("tools"):
        functions = [tool["function"] for tool in tools]
        asked["tools"] = [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]
    request = structs.replace(fleet.context.request, endpoint=Endpoint.MESSAGES, body=json.dumps(asked).encode())
    fleet.context.request, fleet.context.reader = request, reader_of(Endpoint.MESSAGES)
    fleet.tracker.release(0.0)
    assert fleet.context.decision is not None
    fleet.begin(fleet.context.decision.candidates[0])
    return fleet


def blocks_of(received: bytes) -> list[Any]:
    """Types and texts of the blocks, the reason to stop, and the tokens."""
    blocks: list[Any] = []
    for one in received.decode().split("\n\n")[:-1]:
        event = json.loads(one.partition("data: ")[2])
        if event["type"] == "content_block_start":
            blocks.append([event["content_block"]["type"], ""])
        elif event["type"] == "content_block_delta":
            blocks[-1][1] += next((event["delta"][key] for key in ("text", "thinking") if key in event["delta"]), "")
        elif event["type"] == "message_delta":
            blocks += [event["delta"]["stop_reason"], event["usage"]["output_tokens"]]
    return blocks


@pytest.mark.parametrize("name", ["sampled", "sampled, thinking"])
@pytest.mark.parametrize("shares", [(1.0,), (0.4, 1.0), (0.3, 0.6, 1.0)])
def test_sampled_message_goes_on_from_the_ids_of_its_chat(name: str, shares: tuple[float, ...]) -> None:
    fleet = message_fleet(name)
    assert fleet.stream.asked.head.target == b"/v1/chat/completions"
    assert dict(fleet.tracker.headers())[b"x-warmroute-continuable"] == b"yes"
    for share in shares:
        fleet.answer(share)
        if share < 1.0:
            with pytest.raises(UpstreamBroken):
                fleet.stream.pod_ended(fleet.pod)
            assert fleet.fail()
    fleet.end()
    uncut = [{name: one for name, one in event.items() if name != "t"} for event in fleet.case["uncut"]]
    usage, texts = fleet.case["usage"], Received(b"".join(stream(uncut, None))).texts
    reader = fleet.context.reader
    assert (reader.prompt_tokens, reader.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    fleet.close()
    thought = [["thinking", texts["reasoning"]]] if "reasoning" in texts else []
    assert blocks_of(fleet.received) == [*thought, ["text", texts["content"]], "end_turn", usage["completion_tokens"]]
    assert fleet.received.count(b"event: message_start") == fleet.received.count(b"event: message_stop") == 1
    assert [method for method, _, _ in fleet.counted] == ["ids"] * (len(shares) - 1)


def test_pod_that_is_not_known_to_read_messages_alike_is_asked_for_one() -> None:
    fleet = message_fleet("sampled", proven="a")
    assert fleet.stream.asked.message is not None
    assert fleet.fail(ConnectFailed("refused", pod="a", refused=True))
    assert (fleet.pod, fleet.tracker.body) == ("b", fleet.context.request.body)
    assert fleet.stream.asked.head is fleet.context.head
    assert dict(fleet.tracker.headers())[b"x-warmroute-continuable"] == b"no; reason=sampled"
    fleet.close()


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"stop_sequences": ["x"]}, "stop strings and tools"), ({"thinking": {"type": "disabled"}}, "sampled")],
)
def test_message_whose_chat_cannot_go_on_is_asked_for_as_it_came(fields: dict[str, Any], why: str) -> None:
    fleet = message_fleet("sampled, tools", **fields)
    assert (fleet.tracker.body, fleet.stream.asked.message) == (fleet.context.request.body, None)
    assert dict(fleet.tracker.headers())[b"x-warmroute-continuable"] == f"no; reason={why}".encode()
    fleet.close()


@pytest.mark.parametrize("delta", [{"content": {"a": 1}}, {"tool_calls": [7]}, {"reasoning": 7}], ids=str)
def test_message_ends_with_an_event_that_cannot_be_read(delta: dict[str, Any]) -> None:
    fleet = message_fleet("sampled")
    fleet.answer(0.5, event(delta))
    before = fleet.received
    with pytest.raises(UpstreamBroken):
        fleet.stream.pod_ended(fleet.pod)
    assert not fleet.fail()
    assert fleet.tracker.last_events == b"" and fleet.received == before
    assert fleet.counted == [("none", "unreadable event", "unreadable")]
    fleet.close()


def test_pod_that_answers_a_chat_without_a_stream_is_replaced() -> None:
    fleet = message_fleet("sampled")
    with pytest.raises(UpstreamBroken, match="without a stream") as raised:
        fleet.tracker.head("a", 200, JSON_HEADERS, 0.0)
    assert fleet.fail(raised.value)
    fleet.answer(1.0)
    fleet.end()
    fleet.close()
    assert blocks_of(fleet.received)[-2] == "end_turn"


def test_end_of_a_message_is_made_where_only_that_is_missing() -> None:
    fleet = message_fleet("sampled")
    events = len(RecordedPod(fleet.case).stream(fleet.tracker.body))
    fleet.answer((events - 2) / events)
    assert not fleet.fail()
    fleet.received += fleet.tracker.last_events
    fleet.close()
    assert blocks_of(fleet.received)[-2:] == ["end_turn", fleet.case["usage"]["completion_tokens"]]
    assert fleet.counted == [("finish", "connection", "joined")]
