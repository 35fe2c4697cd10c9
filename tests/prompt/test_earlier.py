"""Bodies that begin like others."""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from router.prompt.earlier import EarlierTurns
from router.types import CachedPrefix, Mark, Piece


def body_of(*contents: str, spaced: bool = False, **fields: Any) -> bytes:
    """A chat's JSON, as one kind of client or the other writes it."""
    messages = [{"role": "user" if i % 2 else "assistant", "content": text} for i, text in enumerate(contents)]
    separators = None if spaced else (",", ":")
    return json.dumps({"model": "m", "messages": messages, **fields}, separators=separators).encode()


def earlier_of(mark: Mark, piece: Piece | None = None) -> CachedPrefix:
    piece = piece or Piece(b"abcd", None, 1)
    return CachedPrefix(mark.digest, mark.head, "m", ("user",), 7, piece, b"", 5, b"", "")


def marked(known: EarlierTurns, *bodies: bytes) -> Mark:
    """What is to be remembered of the last of these."""
    mark = None
    for body in bodies:
        _, _, mark = known.find(body)
    assert mark is not None
    return mark


@given(spaced=st.booleans(), texts=st.lists(st.text(max_size=30), min_size=2, max_size=5))
def test_a_beginning_is_worth_remembering_when_it_comes_again(spaced: bool, texts: list[str]) -> None:
    """All but the last message, whatever is written in them; what never comes again costs a digest."""
    known, texts = EarlierTurns(seed=1), ["system " * 200, *texts]
    first, second = body_of(*texts, spaced=spaced), body_of(*texts[:-1], "else" * 60, spaced=spaced)
    assert known.find(first) == (None, 0, None)
    mark = marked(known, second)
    last = second[mark.end :].lstrip(b", ")
    earlier = earlier_of(mark)
    known.keep(mark, second, len(texts) - 1, earlier, known.age)
    found, at, more = known.find(body_of(*texts[:-1], "third" * 60, spaced=spaced, max_tokens=5))
    assert (found, more) == (earlier, None)
    assert json.loads(mark.head + last) == {"model": "m", "messages": [json.loads(second)["messages"][-1]]}
    assert at == second.index(last)


def test_a_conversation_is_remembered_turn_by_turn() -> None:
    """The longest beginning that is known is found, and what is new of it is marked."""
    known = EarlierTurns(seed=1)
    turns = ["system " * 9, "question", "answer", "question 2", "answer 2", "question 3", "answer 3", "question 4"]
    known.find(body_of(*turns[:4]))
    mark = marked(known, body_of(*turns[:6]))
    earlier = earlier_of(mark)
    known.keep(mark, body_of(*turns[:6]), 5, earlier, known.age)
    body = body_of(*turns)
    found, at, more = known.find(body)
    assert found is earlier
    assert more is not None
    assert json.loads(b"[" + body[at : more.end] + b"]") == json.loads(body)["messages"][5:7]
    assert (more.start, more.head) == (at, mark.head)


def test_what_is_more_than_messages_is_not_remembered() -> None:
    """A second list of messages would hide the fields in front of it from whoever reads only what follows."""
    known = EarlierTurns(seed=1)
    message = b'{"role":"user","content":"x"}'
    hidden = b'{"model":"m","messages":[' + message + b'],"kv_transfer_params":{},"messages":[' + message + b","
    bodies = [hidden + b'{"role":"user","content":"' + bytes([last]) * 200 + b'"}]}' for last in b"abc"]
    mark = marked(known, *bodies[:2])
    known.keep(mark, bodies[1], 1, earlier_of(mark), known.age)
    known.keep(mark, bodies[1], 2, earlier_of(mark), known.age)
    assert known.find(bodies[2])[0] is None


def test_memory_counts_what_stands_before_the_messages() -> None:
    """And the roles: of many short messages they are most."""
    known = EarlierTurns(seed=1)
    body = json.dumps({"metadata": "x" * 3000, "messages": [{"role": "user", "content": "a"}] * 2}).encode()
    mark = marked(known, body, body)
    seen = known.bytes
    known.keep(mark, body, 1, msgspec.structs.replace(earlier_of(mark), roles=("user",) * 500), known.age)
    known.find(body)
    assert known.bytes - seen > 3000 + 8 * 500


def test_memory_is_bounded_by_bytes_and_the_least_recently_used_go() -> None:
    """Also where each beginning is seen only once."""
    known = EarlierTurns(seed=1, most_bytes=26_000)
    kept = [body_of("system", f"{i}" * 20, "x" * 90) for i in range(3)]
    marks = [marked(known, body, body) for body in kept]
    for body, mark in zip(kept, marks, strict=True):
        known.keep(mark, body, 2, earlier_of(mark, Piece(b"t" * 8_000, None, 2_000)), known.age)
    for i in range(500):
        known.find(body_of("once", f"only {i}", "y" * 90))
        assert known.find(kept[1])[0] is not None
        assert known.bytes <= 26_000
    assert known.find(kept[0])[0] is None
    assert len(known) < 200


def test_turns_that_share_tokens_count_them_once() -> None:
    """As long as any of them is remembered, whichever goes first."""
    for order in permutations(range(3)):
        known = EarlierTurns(seed=1)
        bodies = [body_of("system", f"{i}" * 20, "x" * 90) for i in range(3)]
        marks = [marked(known, body, body) for body in bodies]
        first = Piece(b"f" * 8_000, None, 2_000)
        pieces = [Piece(b"g" * 4_000, first, 3_000), first, Piece(b"h" * 4_000, first, 3_000)]
        before = known.bytes
        kept = [earlier_of(mark, piece) for mark, piece in zip(marks, pieces, strict=True)]
        for body, mark, earlier in zip(bodies, marks, kept, strict=True):
            known.keep(mark, body, 2, earlier, known.age)
            known.find(body)
        assert 16_000 < known.bytes - before < 16_000 + 3 * 1_000
        for i in order[:2]:
            known.drop(kept[i])
        left = 8_000 + (4_000 if order[2] != 1 else 0)
        assert left < known.bytes - before < left + 1_000
        known.drop(kept[order[2]])
        assert known.bytes == before


def test_what_is_forgotten_has_to_be_read_again() -> None:
    """One beginning, or all of them; the bytes are counted down to nothing."""
    known = EarlierTurns(seed=1)
    body = body_of("system", "a", "b" * 99)
    mark = marked(known, body, body)
    earlier = earlier_of(mark)
    known.keep(mark, body, 2, earlier, known.age)
    assert known.find(body)[0] is earlier
    known.drop(earlier)
    assert known.find(body) == (None, 0, mark)
    known.keep(mark, body, 2, earlier, known.age)
    known.clear()
    assert (len(known), known.bytes) == (0, 0)
    assert known.find(body) == (None, 0, None)


def test_only_the_last_messages_are_looked_at() -> None:
    """A body of which most is new is read from its begin."""
    known = EarlierTurns(seed=1)
    body = body_of("a", "b", "new " * 2000)
    assert known.find(body) == (None, 0, None)
    assert len(known) == 0


@example(b'{"x":' + b"[" * 100_000 + b',"messages":[{"role":"user"},{"role":"user"}]')
@given(body=st.binary(max_size=80) | st.text('{}[]":, rolemsag\\', max_size=80).map(str.encode))
def test_any_bytes_may_come(body: bytes) -> None:
    """What is not JSON is no beginning of anything, or is found out by whoever decodes it."""
    known = EarlierTurns(seed=1)
    for _ in range(3):
        earlier, at, mark = known.find(body)
        assert (earlier, at) == (None, 0)
        if mark is not None:
            known.keep(mark, body, -1, earlier_of(mark), known.age)
