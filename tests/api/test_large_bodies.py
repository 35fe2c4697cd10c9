"""Large bodies are counted before they are decoded."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.tenant import OPEN_TENANT, Tenant
from router.errors import MalformedRequest
from router.frontends import fair_turns
from router.frontends.fair_turns import FairTurns
from router.frontends.http import large_bodies
from router.frontends.http.exchange import Exchange
from router.frontends.http.large_bodies import ItemCounter, LargeBodies
from router.types import Endpoint
from tests.api.edge_to_pod import UnreadBodies, chain
from tests.kit.deadlines import DEADLINE_S

ITEMS = 1_000
TEXT = st.text(st.sampled_from('ab"\\,[{}]:é\n'), max_size=12)
VALUES = st.recursive(
    TEXT | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=30,
)


def pieces_of(body: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


def counted(value: Any) -> tuple[int, int, int]:
    """(containers, strings, commas) of a JSON value."""
    if isinstance(value, str):
        return 0, 1, 0
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inner = [*value, *(value.values() if isinstance(value, dict) else ())]
    found = [counted(one) for one in inner]
    return 1 + sum(f[0] for f in found), sum(f[1] for f in found), max(len(value) - 1, 0) + sum(f[2] for f in found)


@given(value=VALUES, size=st.integers(1, 40), ascii_only=st.booleans())
def test_items_are_counted_outside_of_strings_wherever_a_body_is_cut(value: Any, size: int, ascii_only: bool) -> None:
    counter = ItemCounter()
    for piece in pieces_of(json.dumps(value, ensure_ascii=ascii_only).encode(), size):
        counter.feed(piece)
    assert (counter.containers, counter.strings, counter.commas) == counted(value)


@given(value=st.dictionaries(TEXT, VALUES, max_size=5), size=st.integers(1, 40))
def test_the_fields_at_the_top_are_counted(value: dict[str, Any], size: int) -> None:
    counter = ItemCounter()
    for piece in pieces_of(json.dumps(value).encode(), size):
        counter.feed(piece)
    assert counter.fields == len(value)


@pytest.mark.anyio
@pytest.mark.parametrize("endpoint", Endpoint)
async def test_a_large_body_with_too_many_fields_is_refused(endpoint: Endpoint) -> None:
    """To decode their names takes as long as ten times as many other items. Inner fields do not count."""
    fields = b",".join(b'"%x":1' % number for number in range(large_bodies.MAX_FIELDS + 1))
    await LargeBodies(5_000).check(endpoint, b'{"a":{%b}}' % fields)
    with pytest.raises(MalformedRequest, match="may have 4096 fields"):
        await LargeBodies(5_000).check(endpoint, b"{%b}" % fields)


def body_of(values: bytes, repeat: int) -> bytes:
    return b'{"model":"m","messages":[' + b",".join([values] * repeat) + b"]}"


LONG = b'{"role":"user","content":"' + b"{[,]}" * 20_000 + b'"}'


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("endpoint", "body", "allowed"),
    [
        (Endpoint.CHAT, body_of(b"{}", 2_000), False),
        (Endpoint.CHAT, body_of(b"0", 2_000), False),
        (Endpoint.CHAT, body_of(b"[[[[]]]]", 300), False),
        (Endpoint.CHAT, body_of(b'{"role":"user","content":"' + b"x" * 90 + b'"}', 300), True),
        (Endpoint.CHAT, body_of(LONG, 5), True),
        (Endpoint.CHAT, body_of(b'"' + b"\\n" * 20_000 + b'"', 1), True),
        (Endpoint.CHAT, body_of(b'"' + b"\\n" * 30_000 + b'"', 1), False),
        (Endpoint.CHAT, body_of(b"[1.5]", 500), False),
        (Endpoint.CHAT, body_of(b"1" * 4_000, 3), False),
        (Endpoint.CHAT, body_of(b" " * 9_000, 1), False),
        (Endpoint.OTHER, body_of(b" " * 100_000, 1), True),
        (Endpoint.OTHER, body_of(b" " * 140_000, 1), False),
        (Endpoint.CHAT, b" " * 1_000 + body_of(b"0", 2_000), False),
        (Endpoint.COMPLETIONS, body_of(b"150000", 12_000), True),
        (Endpoint.COMPLETIONS, body_of(b"1", 17_000), False),
        (Endpoint.COMPLETIONS, body_of(b'""', 2_000), False),
        (Endpoint.EMBEDDINGS, body_of(b"[1,2,3]", 2_000), False),
        (Endpoint.OTHER, b"{" + b",".join(b'"a%d":1' % n for n in range(2_000)) + b"}", False),
    ],
)
async def test_a_body_with_too_many_items_is_refused(endpoint: Endpoint, body: bytes, *, allowed: bool) -> None:
    bodies = LargeBodies(ITEMS)
    assert bodies.needs_check(body)
    if allowed:
        await bodies.check(endpoint, body)
        return
    with pytest.raises(MalformedRequest, match=r"more than 1000 items.*limits\.max_json_items"):
        await bodies.check(endpoint, body)


@pytest.mark.anyio
@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize("end", [b"\xff", b"\xe6\x97", b"\xed\xa0\x80"])
async def test_a_body_that_is_not_utf8_is_refused(
    endpoint: Endpoint, end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters may be cut by a slice."""
    monkeypatch.setattr(large_bodies, "SLICE_BYTES", 7)
    text = b'{"' + "日本語 é 😀 ".encode() * 20
    await LargeBodies(8).check(endpoint, text)
    with pytest.raises(MalformedRequest, match="not valid JSON"):
        await LargeBodies(8).check(endpoint, text + end)


@pytest.mark.anyio
@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize("space", [b" ", b"\t", b"\r\n"])
async def test_a_large_body_begins_within_a_few_characters(endpoint: Endpoint, space: bytes) -> None:
    """Whitespace in front does not switch the check off."""
    for count in (1_024, 140_000):
        with pytest.raises(MalformedRequest, match="begins with more than 1024"):
            await LargeBodies(8).check(endpoint, space * count + b'{"model":"m"}')


@pytest.mark.anyio
async def test_a_form_is_not_counted() -> None:
    """An upload of audio is no JSON."""
    await LargeBodies(8).check(Endpoint.OTHER, b"--x\r\n" + b"{[,\xff" * 1_000)


@pytest.mark.anyio
async def test_the_event_loop_runs_between_slices_of_one_body_at_a_time() -> None:
    """However many large bodies arrive."""
    bodies, body = LargeBodies(ITEMS), b'{"' + b"x" * (8 * large_bodies.SLICE_BYTES)
    checks = [
        asyncio.ensure_future(bodies.check(Endpoint.CHAT, body, Tenant(name=f"tenant {number}"))) for number in range(5)
    ]
    turns = 0
    while not all(check.done() for check in checks):
        await asyncio.sleep(0)
        turns += 1
    assert turns >= len(checks) * 8


@pytest.mark.anyio
async def test_a_tenant_with_one_large_body_waits_for_no_other_tenants_bodies() -> None:
    """Each tenant gets every other slice; of two that wait, the one with twice the weight gets two of three."""
    bodies, large, done = LargeBodies(ITEMS), b'{"' + b"x" * (32 * large_bodies.SLICE_BYTES), list[str]()

    async def check(name: str, body: bytes, weight: float = 1.0) -> None:
        await bodies.check(Endpoint.CHAT, body, Tenant(name=name, weight=weight))
        done.append(name)

    checks = [asyncio.ensure_future(check("flood", large)) for _ in range(20)]
    await asyncio.sleep(0)
    checks += [
        asyncio.ensure_future(check(name, large[: -16 * large_bodies.SLICE_BYTES], weight))
        for name, weight in (("light", 1.0), ("heavy", 2.0))
    ]
    await asyncio.gather(*checks[-2:])
    assert done == ["heavy", "light"]
    for pending in checks:
        pending.cancel()
    await asyncio.gather(*checks, return_exceptions=True)
    await asyncio.wait_for(check("later", large), DEADLINE_S)


@pytest.mark.anyio
async def test_a_shorter_body_of_the_same_tenant_is_checked_first() -> None:
    """It does not wait until a long one ends."""
    bodies, large, done = LargeBodies(ITEMS), b'{"' + b"x" * (32 * large_bodies.SLICE_BYTES), list[int]()

    async def check(size: int) -> None:
        await bodies.check(Endpoint.CHAT, large[:size])
        done.append(size)

    await asyncio.gather(check(len(large)), check(len(large) // 2), check(large_bodies.SLICE_BYTES))
    assert done == sorted(done)


@pytest.mark.anyio
async def test_a_body_that_left_gives_its_turn_to_the_next() -> None:
    turns, order = FairTurns(), list[str]()

    async def take(name: str) -> None:
        async with turns.turn(Tenant(name=name), 0, 1):
            order.append(name)
            await asyncio.sleep(0)

    async with turns.turn(Tenant(name="first"), 0, 1):
        waiting = [asyncio.create_task(take(name)) for name in ("b", "c", "d")]
        await asyncio.sleep(0)
        waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == ["c", "d"]
    async with asyncio.timeout(DEADLINE_S), turns.turn(Tenant(name="last"), 0, 1):
        waiting = [asyncio.create_task(take("f")), asyncio.create_task(take("g"))]
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(waiting[0].cancel)  # just as it gets its turn
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order[-1] == "g"


class WatchedCounter(ItemCounter, gc=False):
    """Records how many bytes were counted."""

    counted_bytes: ClassVar[list[int]] = []

    def feed(self, piece: bytes) -> None:
        self.counted_bytes.append(len(piece))
        super().feed(piece)


@pytest.mark.anyio
async def test_the_next_request_of_a_chat_is_counted_from_where_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "SLICE_BYTES", 100)
    monkeypatch.setattr(large_bodies, "ItemCounter", WatchedCounter)
    monkeypatch.setattr(WatchedCounter, "counted_bytes", [])
    bodies, chat = LargeBodies(ITEMS), b'{"messages":["' + b"x" * 300
    for body, owner in ((chat + b'"]}', "a"), (chat + b'","y"]}', "a"), (chat + b'"]}', "b")):
        await bodies.check(Endpoint.CHAT, body, Tenant(name=owner))
    assert WatchedCounter.counted_bytes == [100, 100, 100, 17, 21, 100, 100, 100, 17]


@given(
    starts=st.lists(st.binary(max_size=30) | st.sampled_from([b'"\\"', b"[[", b"\xc3\xa9"]), max_size=4),
    ends=st.lists(st.lists(st.sampled_from([b'"', b"\\", b"[", b"\xc3", b"\xa9", b"a"]), max_size=40), max_size=4),
    size=st.integers(1, 9),
)
def test_what_is_remembered_changes_no_verdict(starts: list[bytes], ends: list[list[bytes]], size: int) -> None:
    used = LargeBodies(4)

    async def verdict(bodies: LargeBodies, body: bytes) -> str:
        try:
            await bodies.check(Endpoint.CHAT, body)
        except MalformedRequest as error:
            return str(error)
        return ""

    async def compare() -> None:
        for end in [*ends, *ends]:
            body = b"{" + b"".join([*starts, *end])
            assert await verdict(used, body) == await verdict(LargeBodies(4), body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_bodies, "SLICE_BYTES", size)
        asyncio.run(compare())


@pytest.mark.anyio
async def test_the_number_of_remembered_beginnings_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "MAX_COUNTED", 3)
    bodies = LargeBodies(ITEMS)
    for number in range(9):
        await bodies.check(Endpoint.CHAT, b'{"a":%d}' % number)
    assert len(bodies._counted) == 3


@pytest.mark.anyio
async def test_large_bodies_are_decoded_in_a_thread_one_at_a_time() -> None:
    """Each call of a decoder holds the interpreter."""
    turns, running, most = FairTurns(), 0, 0

    def work() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        running -= 1
        return threading.current_thread().name

    body = bytes(fair_turns.INLINE_BYTES + 1)
    names = await asyncio.gather(*(turns.run(OPEN_TENANT, body, work) for _ in range(8)))
    assert most == 1
    assert threading.current_thread().name not in names


def test_a_body_too_small_for_so_many_items_is_not_checked() -> None:
    bodies = LargeBodies(ITEMS)
    assert not bodies.needs_check(b"[" + b"0," * (ITEMS - 1) + b"0")


@pytest.mark.net
@pytest.mark.anyio
@pytest.mark.parametrize("large", [False, True])
async def test_only_a_large_body_is_read_in_a_thread(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    read = UnreadBodies.read

    def recorded(self: UnreadBodies, *arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read(self, *arguments, **options)

    monkeypatch.setattr(UnreadBodies, "read", recorded)
    body = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % (b"a" * (1_100_000 if large else 300_000))
    async with chain() as client:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        client.writer.write(head % len(body) + body)
        assert (await client.answer())[0].startswith(b"HTTP/1.1 200")
    assert [name == threading.current_thread().name for name in threads] == [not large]


@pytest.mark.net
@pytest.mark.anyio
async def test_a_refused_body_is_freed_at_once() -> None:
    """A kept error refers to the frames that it passed, and they refer to the body. Such a cycle would stay in memory
    until the next full garbage collection, which is ten minutes away while the router serves."""
    body = b'{"messages":[' + b"[]," * 400_000 + b"[]]}"
    gc.collect()
    gc.disable()
    try:
        async with chain() as client:
            head = b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            client.writer.write(head + body)
            assert b"limits.max_json_items" in (await client.answer())[1]
            async with asyncio.timeout(DEADLINE_S):
                while any(isinstance(each, Exchange) for each in gc.get_objects()):
                    await asyncio.sleep(0.05)
    finally:
        gc.enable()
