"""The attempts of a request, in virtual time: any order of events leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from router.admission.fair_bound import FairBound
from router.decision import Direct, Plan, Pull, Split
from router.errors import ConnectFailed, HandoffFailed, RouterError, UpstreamBroken, UpstreamError, UpstreamTimeout
from router.hashing import hash_array, token_array
from router.request.fleet_state import Clock
from router.request.inbound import HeaderList
from router.request.response_reader import reader_of
from router.request.tracker import MAX_HELD_BYTES, UNARY_PREFILL_SLACK, UNCOUNTED_BYTES, Tracker
from router.types import AttentionKind, BlocksStored, Endpoint, Generation, LayerType, PromptPrefix
from tests.kit.cores import EVENT_HEADERS, JSON_HEADERS, CoreOfPods, pods_at

TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":50,"prompt_tokens_details":{"cached_tokens":3}}}\n\n'
PREAMBLE = b"event: response.created\ndata: {}\n\n"
PROMPT = PromptPrefix(Generation(model="m"), token_array(range(50)), hash_array([1, 2, 3]))
PLANS: dict[str, Callable[[CoreOfPods], Plan]] = {
    "direct a": lambda core: Direct(core.pod("a")),
    "direct b": lambda core: Direct(core.pod("b")),
    "pull": lambda core: Direct(core.pod("b"), Pull("a", 16, 16)),
    "split": lambda core: Split(core.pod("c"), core.pod("a")),
}
ERRORS: list[type[UpstreamError]] = [ConnectFailed, UpstreamBroken, UpstreamTimeout, HandoffFailed]


class Served:
    """One request on its way, and the events that its front may report next."""

    def __init__(self, core: CoreOfPods, names: list[str], *, stream: bool) -> None:
        plans = [PLANS[name](core) for name in names]
        self.core, self.context = core, core.context(*plans, prompt=PROMPT, stream=stream)
        self.tracker: Tracker | None = core.core.tracker(self.context)
        self.now_s, self.received, self.has_head = 0.0, b"", False
        core.core.counters.requests_began(1)
        try:
            self._begin(self.tracker.first(self.now_s))
        except RouterError as error:
            self._refuse(error)

    def play(self, event: str, number: int, now_s: float) -> None:
        """Report one event, if it can occur now."""
        self.now_s = now_s
        if self.tracker is not None:
            getattr(self, f"_{event}")(self.tracker, number)

    def _head(self, tracker: Tracker, number: int) -> None:
        if self.has_head:
            return
        try:
            status = [200, 200, 404, 500, 503][number % 5]
            headers = [EVENT_HEADERS, JSON_HEADERS, []][number % 3]
            tracker.head(self._plan().pod.id, status, headers, self.now_s)
            self.has_head = True
        except UpstreamError as error:
            self._fail(error)

    def _piece(self, tracker: Tracker, number: int) -> None:
        if self.has_head:
            self.received += tracker.piece([TOKEN, TOKEN[:9], b": comment\n\n", b"{}"][number % 4], self.now_s)

    def _handed_over(self, tracker: Tracker, number: int) -> None:
        if isinstance(self._plan(), Split):
            tracker.handed_over(self.now_s)

    def _assumed(self, tracker: Tracker, number: int) -> None:
        tracker.assume_first_token(self.now_s)

    def _failed(self, tracker: Tracker, number: int) -> None:
        pods = [self._plan().pod.id, ""]
        self._fail(ERRORS[number % len(ERRORS)]("failed", pod=pods[number % 2]))

    def _left(self, tracker: Tracker, number: int) -> None:
        self.core.core.endings.interrupted(self.context, by_client=True)
        tracker.left(self.now_s)
        self._finish()

    def _end(self, tracker: Tracker, number: int) -> None:
        if self.has_head:
            self.received += tracker.rest(self.now_s)
            tracker.complete(self.now_s)
            self._finish()

    def _plan(self) -> Plan:
        assert self.context.candidate is not None
        return self.context.candidate.plan

    def _begin(self, candidate: Any) -> None:
        assert self.tracker is not None
        self.tracker.begin(candidate, self.now_s)
        self.has_head = False

    def _fail(self, error: UpstreamError) -> None:
        assert self.tracker is not None
        candidate = self.tracker.failed(error, self.now_s)
        if candidate is None:
            self._refuse(error)
        else:
            self._begin(candidate)

    def _refuse(self, error: RouterError) -> None:
        self.core.core.endings.failed(self.context, error, has_answered=bool(self.received))
        self._finish()

    def _finish(self) -> None:
        assert self.tracker is not None
        self.tracker.end(self.now_s)
        self.tracker = None
        self.core.core.endings.end(self.context)


def core_of(**settings: Any) -> CoreOfPods:
    return CoreOfPods(
        pods_at({name: f"http://{name}" for name in "abc"}), clock=Clock(lambda: 9.0, lambda: 9.0), **settings
    )


EVENTS = ["head", "piece", "handed_over", "assumed", "failed", "left", "end"]


@given(
    requests=st.lists(
        st.tuples(st.lists(st.sampled_from(sorted(PLANS)), min_size=1, max_size=4, unique=True), st.booleans()),
        min_size=1,
        max_size=3,
    ),
    events=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(EVENTS), st.integers(0, 19)), max_size=40),
)
def test_any_order_of_events_leaves_nothing(
    requests: list[tuple[list[str], bool]], events: list[tuple[int, str, int]]
) -> None:
    """Leases, holds on KV and predictions are back to 0, and each request has one record."""
    core = core_of(retries=3)
    served = [Served(core, names, stream=stream) for names, stream in requests]
    for at, (which, event, number) in enumerate(events):
        served[which % len(served)].play(event, number, at / 10)
    for one in served:
        one.play("left", 0, 9.0)
    assert core.is_idle()
    assert len(core.ended) == len(requests)
    assert all(len(one.failures) <= one.tries for one in core.ended)


def started(core: CoreOfPods, *names: str, stream: bool = True) -> Tracker:
    """The tracker of a request that is sent to its first candidate."""
    context = core.context(*(PLANS[name](core) for name in names), prompt=PROMPT, stream=stream)
    tracker = core.core.tracker(context)
    tracker.begin(tracker.first(0.0), 0.0)
    return tracker


def replaced(tracker: Tracker, error: UpstreamError, now_s: float) -> str:
    """The pod that is tried after this failure."""
    candidate = tracker.failed(error, now_s)
    assert candidate is not None
    tracker.begin(candidate, now_s)
    return candidate.pod.id


def test_a_request_is_booked_from_its_begin_to_its_release() -> None:
    core = core_of()
    tracker = started(core, "direct a")
    assert core.ledger.inflight()["a"].prefill_requests == 1
    tracker.head("a", 200, EVENT_HEADERS, 0.1)
    tracker.piece(TOKEN, 0.2)
    assert (core.ledger.inflight()["a"].prefill_requests, core.ledger.inflight()["a"].requests) == (0, 1)
    tracker.rest(0.3)
    tracker.end(0.3)
    assert not core.ledger.inflight()


@pytest.mark.parametrize("is_unnamed", [True, False])
def test_a_pod_that_announces_windows_alone_is_predicted(is_unnamed: bool) -> None:
    """As one without events, which do not say what it keeps."""
    core = core_of()
    core.store.add_holder(core.pod("a"), PROMPT.generation)
    if is_unnamed:
        window = LayerType(AttentionKind.WINDOW, 16, 128)
        core.store.apply("a", [BlocksStored(block_hashes=(1,), layers=window)])
    tracker = started(core, "direct a")
    tracker.head("a", 200, EVENT_HEADERS, 0.1)
    tracker.piece(TOKEN, 0.2)
    tracker.piece(USAGE, 0.3)
    tracker.end(0.3)
    assert core.store.capacities_blocks == ([62] if is_unnamed else [None])


def test_a_stream_shows_its_first_token_and_another_response_is_assumed_to_have_one() -> None:
    """After a multiple of the expected time."""
    core = core_of()
    context = core.context(PLANS["direct a"](core), expected_ms=40.0)
    tracker = core.core.tracker(context)
    assert tracker.begin(tracker.first(0.0), 0.0) == pytest.approx(0.04 * UNARY_PREFILL_SLACK)
    assert core.core.tracker(core.context(PLANS["direct a"](core), stream=True)) is not None
    streamed = core.core.tracker(core.context(PLANS["direct a"](core), stream=True))
    assert streamed.begin(streamed.first(0.0), 0.0) is None


def test_an_unstreamed_response_is_held_until_it_is_complete() -> None:
    """A pod that fails inside it can be replaced."""
    core = core_of()
    tracker = started(core, "direct a", "direct b", stream=False)
    tracker.head("a", 200, JSON_HEADERS, 0.1)
    assert tracker.piece(b'{"a":', 0.2) == b""
    assert replaced(tracker, UpstreamBroken("cut", pod="a"), 0.3) == "b"
    tracker.head("b", 200, JSON_HEADERS, 0.4)
    assert (tracker.piece(b'{"b":', 0.5), tracker.piece(b"1}", 0.5)) == (b"", b"")
    assert tracker.rest(0.6) == b'{"b":1}'


SPEECH: HeaderList = [(b"content-type", b"audio/mpeg")]
NDJSON: HeaderList = [(b"content-type", b"application/x-ndjson")]


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.OTHER])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "headers"),
    [
        *[(status, headers) for status in (200, 404, 500) for headers in (JSON_HEADERS, SPEECH, NDJSON, EVENT_HEADERS)],
        (200, [(b"content-type", b"Application/JSON; charset=utf-8")]),
        (200, [*JSON_HEADERS, (b"content-length", b"1000")]),
        (200, [*SPEECH, (b"content-length", b"1000")]),
        (200, []),
    ],
)
def test_only_errors_and_objects_are_held(endpoint: Endpoint, stream: bool, status: int, headers: HeaderList) -> None:
    """JSON without a length may be a stream of objects, unless the request wants none from an API that is read."""
    tracker = started(core_of(), "direct a", "direct b", stream=stream)
    tracker.context.request = structs.replace(tracker.context.request, endpoint=endpoint)
    tracker.head("a", status, headers, 0.1)
    kind, length = (headers[0][1], len(headers) > 1) if headers else (b"", False)
    is_object = kind.lower().startswith(b"application/json") and (length or (endpoint is Endpoint.CHAT and not stream))
    is_held = headers is not EVENT_HEADERS and (status >= 400 or is_object)
    assert tracker.piece(b'{"a": 1', 0.2) == (b"" if is_held else b'{"a": 1')
    assert tracker.rest(0.3) == (b'{"a": 1' if is_held else b"")


@pytest.mark.parametrize("headers", [SPEECH, NDJSON, []])
def test_an_answer_that_is_made_while_it_is_sent_has_its_first_token_in_its_first_byte(headers: HeaderList) -> None:
    """The lease on the prefill ends, the prompt counts as cached, and no other pod can answer any more."""
    core = core_of()
    tracker = started(core, "direct a", "direct b", stream=False)
    tracker.head("a", 200, headers, 0.1)
    assert tracker.context.first_token_s is None
    assert tracker.piece(b"ID3", 0.2) == b"ID3"
    assert tracker.context.first_token_s == pytest.approx(0.2 - 9.0)
    assert (core.ledger.inflight()["a"].prefill_requests, core.ledger.inflight()["a"].requests) == (0, 1)
    assert tracker.piece(TOKEN, 0.5) == TOKEN
    assert tracker.context.first_token_s == pytest.approx(0.2 - 9.0)
    assert tracker.failed(UpstreamBroken("cut", pod="a"), 0.6) is None
    tracker.end(0.6)
    assert core.store.match(PROMPT, 0.7).blocks.keys() == {"a"}


def test_an_answer_that_is_made_while_it_is_sent_can_be_replaced_before_its_first_byte() -> None:
    tracker = started(core_of(), "direct a", "direct b", stream=False)
    tracker.head("a", 200, SPEECH, 0.1)
    assert replaced(tracker, UpstreamBroken("cut", pod="a"), 0.2) == "b"
    tracker.head("b", 200, SPEECH, 0.3)
    assert tracker.piece(b"ID3", 0.4) == b"ID3"


def test_the_pod_that_replaces_another_shows_its_own_first_token() -> None:
    """Also where the response that was held until then had one."""
    core, whole = core_of(), b'{"choices":[{"message":{"content":"a"}}]}'
    tracker = started(core, "direct a", "direct b", stream=False)
    tracker.head("a", 200, JSON_HEADERS, 0.1)
    assert tracker.piece(whole, 0.2) == b""
    assert replaced(tracker, UpstreamBroken("cut", pod="a"), 0.3) == "b"
    tracker.head("b", 200, JSON_HEADERS, 0.4)
    tracker.piece(whole, 0.5)
    assert tracker.rest(0.6) == whole
    assert tracker.context.first_token_s == pytest.approx(0.6 - 9.0)
    assert core.ledger.inflight()["b"].prefill_requests == 0


def test_what_is_no_event_stream_cannot_say_that_an_engine_is_dead() -> None:
    """A model may be asked to write anything."""
    dead = b'data: {"error": {"message": "EngineCore encountered an issue."}}\n\n'
    tracker = started(core_of(), "direct a", "direct b", stream=False)
    tracker.head("a", 200, [(b"content-type", b"text/plain")], 0.1)
    assert tracker.piece(dead, 0.2) == dead
    streamed = started(core_of(), "direct a", "direct b")
    streamed.head("a", 200, EVENT_HEADERS, 0.1)
    with pytest.raises(UpstreamBroken, match="dead"):
        streamed.piece(dead, 0.2)


def test_a_response_too_large_to_hold_is_passed_on() -> None:
    """Then no other pod can answer."""
    tracker = started(core_of(), "direct a", "direct b", stream=False)
    tracker.head("a", 200, JSON_HEADERS, 0.1)
    assert len(tracker.piece(b"x" * MAX_HELD_BYTES, 0.2)) == MAX_HELD_BYTES
    assert tracker.piece(b"y", 0.3) == b"y"
    assert tracker.failed(UpstreamBroken("cut", pod="a"), 0.4) is None


def test_what_is_held_of_responses_has_a_share_of_the_memory_for_bodies() -> None:
    """A client that uses up its share gets its responses as they come, until the others have ended."""
    core, piece = core_of(), b"x" * UNCOUNTED_BYTES
    memory = FairBound(16 * UNCOUNTED_BYTES, "bytes", "limits.max_held_bytes")
    core.core.rules = replace(core.core.rules, memory=memory)
    trackers = [started(core, "direct a", stream=False) for _ in range(5)]
    for tracker in trackers:
        tracker.head("a", 200, JSON_HEADERS, 0.1)
        shown = [tracker.piece(piece, 0.2) for _ in range(4)]
    assert memory.used == 16 * UNCOUNTED_BYTES
    assert shown == [piece] * 4
    for tracker in trackers:
        tracker.end(0.3)
    assert memory.used == 0


def test_events_before_the_prefill_are_held_until_the_next_event() -> None:
    core = core_of()
    tracker = started(core, "direct a")
    tracker.context.reader = reader_of(Endpoint.RESPONSES)
    tracker.head("a", 200, EVENT_HEADERS, 0.1)
    assert tracker.piece(PREAMBLE, 0.2) == b""
    following = b"event: response.output_item.added\ndata: {}\n\n"
    assert tracker.piece(following, 0.3) == PREAMBLE + following
    assert tracker.context.first_token_s is not None


def test_a_prediction_begins_with_the_attempt_and_is_confirmed_by_the_first_token() -> None:
    """A pod that fails has nothing."""
    core = core_of()
    tracker = started(core, "direct a", "direct b")
    assert core.store.match(PROMPT, 0.0).blocks.keys() == {"a"}
    assert replaced(tracker, UpstreamBroken("cut", pod="a"), 0.1) == "b"
    assert core.store.match(PROMPT, 0.1).blocks.keys() == {"b"}
    tracker.head("b", 200, EVENT_HEADERS, 0.2)
    tracker.piece(TOKEN, 0.2)
    tracker.end(0.3)
    assert core.store.match(PROMPT, 0.3).blocks.keys() == {"b"}


def test_the_pods_of_a_split_have_the_prompt_when_it_is_handed_over() -> None:
    """Also where the client leaves before the decode pod responds: the prefill pod has it."""
    core = core_of()
    tracker = started(core, "split")
    tracker.handed_over(0.1)
    tracker.left(0.2)
    tracker.end(0.2)
    assert core.store.match(PROMPT, 0.3).blocks.keys() == {"c"}
    assert core.is_idle()
