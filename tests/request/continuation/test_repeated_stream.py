"""Messages and responses go on by being made again: the client reads one stream, although its pods die."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.request.continuation.repeated_stream import MESSAGE_STOP, RepeatedStream, SaidEvents
from router.request.continuation.terms import terms_of
from router.types import Endpoint
from tests.request.continuation.test_any_fault import in_pieces

Answer = Sequence[tuple[str, str]]
ANSWER: Answer = [
    ("thinking", "Six times 🧬 seven,\nthen."),
    ("text", "It is 42 😀: \"[DONE]\", 'data:'."),
    ("tool_use", '{"city": "Paris 😀", "days": 3}'),
    ("tool_use", '{"to": "msg-0"}'),
]
Write = Callable[[Answer, Sequence[int], int], bytes]


def event(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


def cut(text: str, groups: Sequence[int]) -> Iterator[str]:
    place = number = 0
    while place < len(text):
        size = groups[number % len(groups)]
        yield text[place : place + size]
        place, number = place + size, number + 1


def message(answer: Answer, groups: Sequence[int], pod: int) -> bytes:
    """The stream of `/v1/messages`, as vLLM writes it."""
    head: dict[str, Any] = {"id": f"msg-{pod}", "role": "assistant", "content": [], "stop_reason": None}
    made = event("message_start", message={**head, "usage": {"input_tokens": 7 + pod}})
    for index, (kind, text) in enumerate(answer):
        is_call, is_thought = kind == "tool_use", kind == "thinking"
        block = {"id": f"toolu-{pod}-{index}", "name": "read", "input": {}} if is_call else {kind: ""}
        made += event("content_block_start", index=index, content_block={"type": kind, **block})
        field, name = ("partial_json", "input_json_delta") if is_call else (kind, f"{kind}_delta")
        for piece in cut(text, groups):
            made += event("content_block_delta", index=index, delta={"type": name, field: piece})
        if is_thought:
            signature = {"type": "signature_delta", "signature": f"s-{pod}"}
            made += event("content_block_delta", index=index, delta=signature)
        made += event("content_block_stop", index=index)
    usage = {"output_tokens": 12, "cache_read_input_tokens": pod}
    made += event("message_delta", delta={"stop_reason": "tool_use"}, usage=usage)
    return made + event("message_stop")


def response(answer: Answer, groups: Sequence[int], pod: int) -> bytes:
    """The stream of `/v1/responses`, as vLLM writes it. Items have ids, also in the events of their parts."""
    events: list[tuple[str, dict[str, Any]]] = []
    head = {"id": f"resp-{pod}", "created_at": 100 + pod, "instructions": 'Say "msg": 1,', "output": []}
    for kind in ("response.created", "response.in_progress"):
        events.append((kind, {"response": {**head, "status": "in_progress"}}))
    items = []
    for index, (kind, text) in enumerate(answer):
        is_call = kind == "tool_use"
        name = f"item-{pod}-{index}"
        item: dict[str, Any] = {"id": name, "type": "function_call" if is_call else kind}
        item |= {"call_id": f"call-{pod}-{index}", "name": "read"} if is_call else {}
        place = {"item_id": name, "output_index": index}
        events.append(("response.output_item.added", {"output_index": index, "item": {**item, "arguments": ""}}))
        part = "response.function_call_arguments" if is_call else f"response.{kind}"
        events += [(f"{part}.delta", {**place, "delta": piece}) for piece in cut(text, groups)]
        events.append((f"{part}.done", {**place, "text": text}))
        items.append({**item, "arguments": text})
        events.append(("response.output_item.done", {"output_index": index, "item": items[-1]}))
    usage = {"output_tokens": 12, "cached_tokens": pod}
    events.append(
        ("response.completed", {"response": {**head, "status": "completed", "output": items, "usage": usage}})
    )
    return b"".join(event(kind, sequence_number=number, **fields) for number, (kind, fields) in enumerate(events))


WRITERS = [(Endpoint.MESSAGES, message), (Endpoint.RESPONSES, response)]


def steps_of(received: bytes) -> list[Any]:
    """What a client makes of a stream: its events, with one text for its deltas, without numbers and usage. Fails where
    it is not legal."""
    assert received.endswith(b"\n\n") or not received
    steps: list[Any] = []
    numbers = []
    for one in received.decode().split("\n\n")[:-1]:
        name, data = one.split("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert name == f"event: {fields['type']}"
        if "sequence_number" in fields:
            numbers.append(fields.pop("sequence_number"))
        for owner in (fields, fields.get("message", {}), fields.get("response", {})):
            owner.pop("usage", None)
        delta = fields.get("delta")
        if isinstance(delta, dict):
            fields |= {"delta": next((v for k, v in delta.items() if k in ("text", "thinking", "partial_json")), delta)}
        if isinstance(fields.get("delta"), str) and steps and _place(steps[-1]) == _place(fields):
            steps[-1]["delta"] += fields["delta"]
        else:
            steps.append(fields)
    assert numbers == list(range(len(numbers)))
    return steps


def _place(fields: dict[str, Any]) -> Any:
    return fields["type"], fields.get("index"), fields.get("output_index"), type(fields.get("delta"))


class Broken:
    """One stream through any number of faults."""

    def __init__(self, endpoint: Endpoint, write: Write) -> None:
        self.terms = terms_of(endpoint, b'{"temperature":0}')
        self.write, self.said, self.received, self.lives = write, SaidEvents(), b"", 0
        self.reader = RepeatedStream(self.terms, self.said)

    def live(self, sent: bytes, sizes: Sequence[int]) -> None:
        self.reader = RepeatedStream(self.terms, self.said)
        before = self.received
        for piece in in_pieces(sent, sizes):
            self.received += self.reader.feed(piece)
        self.reader.end()
        self.lives += 1
        assert self.received.startswith(before)


def without_ids_of_later_pods(steps: list[Any], pods: int) -> list[Any]:
    """Items that the first pod has not begun have the ids of a later one."""
    text = json.dumps(steps)
    for pod in range(1, pods):
        for kind in ("toolu", "item", "call"):
            text = text.replace(f"{kind}-{pod}-", f"{kind}-0-")
        text = text.replace(f'"s-{pod}"', '"s-0"')
    return json.loads(text)  # type: ignore[no-any-return]


FAULTS = [b"", b'event: error\ndata: {"type":"error","error":{"message":"dead"}}\n\n', b"data: [DONE]\n\n"]
GROUPS = st.lists(st.integers(1, 7), min_size=1, max_size=4)
LIVES = st.lists(
    st.tuples(GROUPS, st.lists(st.integers(1, 700), min_size=1, max_size=4), st.floats(0, 1), st.sampled_from(FAULTS)),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize(("endpoint", "write"), WRITERS)
@given(LIVES)
def test_joined_stream_is_the_uncut_one(endpoint: Endpoint, write: Write, lives: Any) -> None:
    broken = Broken(endpoint, write)
    for groups, sizes, share, fault in [*lives, ((1,), (10**9,), 1.0, b"")]:
        sent = write(ANSWER, groups, broken.lives if broken.received else 0)
        sent = sent[: int(share * (len(sent) + 1))]
        if fault:
            sent = sent[: sent.rfind(b"\n\n") + 2 if b"\n\n" in sent else 0] + fault
        broken.live(sent, sizes)
        assert not broken.reader.differs
        if broken.said.is_done:
            break
        assert broken.reader.fault
        if broken.said.is_finished:
            broken.received += MESSAGE_STOP
            break
    expected = steps_of(write(ANSWER, (3,), 0))
    assert without_ids_of_later_pods(steps_of(broken.received.removesuffix(FAULTS[2])), broken.lives) == expected


@pytest.mark.parametrize(("endpoint", "write"), WRITERS)
def test_every_cut_between_two_events_is_exact(endpoint: Endpoint, write: Write) -> None:
    events = write(ANSWER, (3,), 0).split(b"\n\n")[:-1]
    for number in range(len(events)):
        broken = Broken(endpoint, write)
        broken.live(b"".join(one + b"\n\n" for one in events[:number]), (10**9,))
        broken.live(write(ANSWER, (2, 5), 1 if number else 0), (10**9,))
        assert broken.said.is_done
        assert without_ids_of_later_pods(steps_of(broken.received), 2) == steps_of(write(ANSWER, (3,), 0))


def test_items_of_the_first_pod_keep_their_ids() -> None:
    sent = response(ANSWER, (3,), 0)
    broken = Broken(Endpoint.RESPONSES, response)
    broken.live(sent[: sent.index(b"days")], (10**9,))
    broken.live(response(ANSWER, (4,), 1), (10**9,))
    completed = steps_of(broken.received)[-1]["response"]
    assert (completed["id"], completed["created_at"]) == ("resp-0", 100)
    assert [one["id"] for one in completed["output"]] == ["item-0-0", "item-0-1", "item-0-2", "item-1-3"]
    assert [one.get("call_id") for one in completed["output"]][2:] == ["call-0-2", "call-1-3"]


@pytest.mark.parametrize(("endpoint", "write"), WRITERS)
@pytest.mark.parametrize("place", range(len(ANSWER)))
def test_pod_that_makes_another_answer_ends_the_stream(endpoint: Endpoint, write: Write, place: int) -> None:
    sent = write(ANSWER, (3,), 0)
    for other in (ANSWER[place][1][:-3] + "XYZ", ANSWER[place][1] + "more", ANSWER[place][1][:3]):
        broken = Broken(endpoint, write)
        broken.live(sent[: sent.rindex(b"event:")], (10**9,))
        before = broken.received
        answer = [*ANSWER[:place], (ANSWER[place][0], other), *ANSWER[place + 1 :]]
        broken.live(write(answer, (4,), 1), (10**9,))
        assert broken.reader.differs
        assert broken.received == before


@pytest.mark.parametrize(("endpoint", "write"), WRITERS)
def test_first_pod_is_passed_byte_for_byte(endpoint: Endpoint, write: Write) -> None:
    broken = Broken(endpoint, write)
    sent = b'event: ping\ndata: {"type":"ping"}\n\n: comment\n\n' + write([*ANSWER, ("text", "")], (3,), 0)
    broken.live(sent + b"data: [DONE]\n\n", (5,))
    assert broken.received == sent + b"data: [DONE]\n\n"
    assert not broken.reader.fault


@pytest.mark.parametrize(
    "last",
    [
        event("error", error={"message": "dead"}),
        event("message_delta", delta={"stop_reason": None}),
        event("response.failed", response={"status": "failed"}),
        event("response.completed", response={"status": "cancelled"}),
        b'data: {"error":{"message":"dead"}}\n\n',
    ],
)
def test_ends_that_are_none_do_not_reach_the_client(last: bytes) -> None:
    broken = Broken(Endpoint.MESSAGES, message)
    broken.live(message(ANSWER, (3,), 0)[:600].rpartition(b"event:")[0] + last, (10**9,))
    assert last not in broken.received
    assert broken.reader.fault in ("error event", "aborted")


def test_unreadable_event_passes_and_ends_the_chance_to_continue() -> None:
    broken = Broken(Endpoint.MESSAGES, message)
    sent = message(ANSWER, (3,), 0)
    broken.live(sent[:600].rpartition(b"event:")[0] + b"event: x\ndata: {]\n\n" + sent, (10**9,))
    assert b"{]" in broken.received
    assert broken.said.forgotten == "unreadable"
    assert not broken.reader.fault


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{}", "sampled"),
        (b'{"temperature":1}', "sampled"),
        (b'{"temperature":0}', ""),
        (b'{"temperature":0.0,"top_logprobs":2}', "log probabilities"),
        (b'{"temperature":0,"include":["message.output_text.logprobs"]}', "log probabilities"),
        (b'{"temperature":[]}', "body"),
    ],
)
def test_streams_that_cannot_be_made_again_are_named(body: bytes, why: str) -> None:
    assert terms_of(Endpoint.RESPONSES, body).refusal == why
