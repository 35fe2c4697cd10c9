"""Fuzzes the link between workers: frames and the messages inside them.

A malformed link is closed, and nothing remains of its worker.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from router.workers.bus import ANSWER, HELLO, QUERY, UPDATE, InboundLink, WorkerBus, encode_frame
from tests.fuzz.pieces import in_pieces
from tests.fuzz.wire import Wire
from tests.workers.fake_workers import Town, pod, prefix


class Recorder:
    """Records what its bus delivers."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, bytes]] = []
        self.gone: list[int] = []

    def snapshot(self) -> bytes:
        return b""

    def apply_remote(self, worker: int, news: bytes) -> None:
        if news.startswith(b"!"):
            raise ValueError(news)
        self.heard.append((worker, news))

    def remove_worker(self, worker: int) -> None:
        self.gone.append(worker)

    async def answer(self, query: bytes) -> bytes:
        return query


def frames(data: bytes) -> None:
    """Bytes of a connection from another worker."""
    whole = _received([data])
    for pieces in in_pieces(data):
        assert _received(pieces) == whole, "another meaning in pieces"


def _received(pieces: list[bytes]) -> tuple[list[tuple[int, bytes]], list[int], bool]:
    worker, wire = Recorder(), Wire()
    bus = WorkerBus(Path(), 0, 3, lambda: None)
    bus._client = worker
    hearing = InboundLink(bus)
    hearing.connection_made(wire)
    for piece in pieces:
        if wire.open:
            hearing.data_received(piece)
    hearing.connection_lost(None)
    assert bus.connected_workers == 0
    assert {number for number, _ in worker.heard} <= {1, 2}, "nobody of that number"
    return worker.heard, worker.gone, wire.open


def news(data: bytes) -> None:
    """Messages of another worker."""
    town = Town(2)
    listening = town.workers[0]
    with suppress(ValueError):
        listening.view.apply_remote(1, data)
    town.workers[1].view.apply_remote(0, listening.view.snapshot())
    listening.view.remove_worker(1)
    assert not listening.inflight(), "it is gone, and its requests are not"


def _sent_after(act: Callable[[Any], object]) -> bytes:
    """The bytes that a worker sends after this action."""
    town = Town(2)
    said: list[bytes] = []
    town.workers[0].view._publish = said.append
    act(town.workers[0])
    town.settle()
    return said[-1]


_HELLO = encode_frame(HELLO, (1).to_bytes(4, "little"))
FRAMES = (
    _HELLO
    + encode_frame(UPDATE, b"snapshot")
    + encode_frame(QUERY, b"\0\0\0\0query")
    + encode_frame(ANSWER, b"\0\0\0\0answer"),
    _HELLO + encode_frame(UPDATE, b"!nonsense") + encode_frame(UPDATE, b"more"),
    encode_frame(HELLO, b"\x07\0\0\0"),
    encode_frame(UPDATE, b"nobody") + _HELLO + _HELLO,
)
FRAME_WORDS = (_HELLO, encode_frame(UPDATE, b""), encode_frame(QUERY, b"\0\0\0\0"), b"\xff\xff\xff\xff")
NEWS_TOLD = (
    Town(2).workers[0].view.snapshot(),
    _sent_after(lambda worker: worker.owners.ledger.book(pod("a"), 100, 0, 1000.0)),
    _sent_after(lambda worker: worker.owners.breaker.failure("a", 1000.0)),
    _sent_after(lambda worker: worker.view.add_command("drain a", "yes")),
    _sent_after(lambda worker: worker.owners.local.record("a", prefix(1, 2), 1000.0, ttl_s=60.0, capacity_blocks=None)),
)
NEWS_WORDS = (
    *map(
        msgspec.msgpack.encode,
        ("snapshot", "work", "failures", "dispatched", "reports", "loads", "commands", "calibration", "a"),
    ),
    *(
        b"\xcb\x7f\xf0\0\0\0\0\0\0",
        b"\xcb\x7f\xf8\0\0\0\0\0\0",
        b"\xc0",
        b"\xc3",
        b"\x81",
        b"\x91",
        b"\xcf\xff",
        b"\xc4\x08",
    ),
)
