"""Malformed messages between workers: frames of the bus, and the updates in them.

A link with a malformed message is closed, and the state of its sender is dropped.
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
from tests.workers.fake_workers import FakeWorker, FakeWorkers, pod, prefix


class Recorder:
    """Records what its bus delivers."""

    def __init__(self) -> None:
        self.received: list[tuple[int, bytes]] = []
        self.gone: list[int] = []

    def snapshot(self) -> bytes:
        return b""

    def apply_remote(self, worker: int, update: bytes) -> None:
        if update.startswith(b"!"):
            raise ValueError(update)
        self.received.append((worker, update))

    def remove_worker(self, worker: int) -> None:
        self.gone.append(worker)

    async def answer(self, query: bytes) -> bytes:
        return query


def frames(data: bytes) -> None:
    """Bytes of a connection from another worker."""
    whole = _received([data])
    for pieces in in_pieces(data):
        assert _received(pieces) == whole, "different result in pieces"


def _received(pieces: list[bytes]) -> tuple[list[tuple[int, bytes]], list[int], bool]:
    worker, wire = Recorder(), Wire()
    bus = WorkerBus(Path(), 0, 3, lambda: None)
    bus._client = worker
    link = InboundLink(bus)
    link.connection_made(wire)
    for piece in pieces:
        if wire.open:
            link.data_received(piece)
    link.connection_lost(None)
    assert bus.connected_workers == 0
    assert {number for number, _ in worker.received} <= {1, 2}, "no worker has this number"
    return worker.received, worker.gone, wire.open


def update(data: bytes) -> None:
    """An update of another worker."""
    group = FakeWorkers(2)
    receiver = group.workers[0]
    with suppress(ValueError):
        receiver.view.apply_remote(1, data)
    group.workers[1].view.apply_remote(0, receiver.view.snapshot())
    receiver.view.remove_worker(1)
    assert not receiver.inflight(), "requests of a removed worker remain"


def _after(act: Callable[[Any], object]) -> bytes:
    """The update of a worker after `act`."""
    group = FakeWorkers(2)
    said: list[bytes] = []
    group.workers[0].view._publish = said.append
    act(group.workers[0])
    group.settle()
    return said[-1]


def _dispatch(worker: FakeWorker) -> None:
    local = worker.owners.local
    local.confirm(local.predict("a", prefix(1, 2), ttl_s=60.0, capacity_blocks=None), 1000.0)


_HELLO = encode_frame(HELLO, (1).to_bytes(4, "little"))
FRAMES = (
    _HELLO
    + encode_frame(UPDATE, b"snapshot")
    + encode_frame(QUERY, b"\0\0\0\0query")
    + encode_frame(ANSWER, b"\0\0\0\0answer"),
    _HELLO + encode_frame(UPDATE, b"!malformed") + encode_frame(UPDATE, b"more"),
    encode_frame(HELLO, b"\x07\0\0\0"),
    encode_frame(UPDATE, b"unknown") + _HELLO + _HELLO,
)
FRAME_WORDS = (_HELLO, encode_frame(UPDATE, b""), encode_frame(QUERY, b"\0\0\0\0"), b"\xff\xff\xff\xff")
UPDATES = (
    FakeWorkers(2).workers[0].view.snapshot(),
    _after(lambda worker: worker.owners.ledger.book(pod("a"), 100, 0, 1000.0)),
    _after(lambda worker: worker.owners.breaker.failure("a", 1000.0)),
    _after(lambda worker: worker.view.add_command("drain a", "yes")),
    _after(_dispatch),
)
UPDATE_WORDS = (
    *map(
        msgspec.msgpack.encode,
        (
            "snapshot",
            "work",
            "failures",
            "dispatched",
            "confirmed",
            "withdrawn",
            "reports",
            "loads",
            "commands",
            "calibration",
            "a",
        ),
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
