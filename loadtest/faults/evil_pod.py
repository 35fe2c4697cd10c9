"""A mock pod of the hostile soak that lies, floods and fails in every way that a pod can, one after the other.

    python -m loadtest.faults.evil_pod 9005

It is a good pod (`soak_pods.py`) until a request for `/_evil/NAME` names one of `WRONGS`; `/_evil/` ends it.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec
import uvloop
import zmq
import zmq.asyncio

sys.path.insert(0, str(Path(__file__).parents[2]))

from loadtest.bench.bodies import MODEL
from loadtest.faults.soak_pods import _METRICS, _UNARY, SoakPod, response, serve

CONTROL = b"/_evil/"
SOURCES, METRICS, MODELS, CHAT = b"/kv_event_sources", b"/metrics", b"/v1/models", b"/v1/chat/completions"
FLOOD_S = 0.05
"""Pause between KV event messages."""
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@dataclass(frozen=True, slots=True)
class Wrong:
    """Pages in place of the good ones, a fault of generation (`x-soak-fault`), and KV event messages."""

    pages: Mapping[bytes, Callable[[], bytes]] = field(default_factory=dict)
    fault: bytes = b""
    events: Callable[[], bytes] | None = None


def _page(body: bytes) -> bytes:
    return response(b"200 OK", body)


def _load(value: bytes, ranks: int = 4) -> bytes:
    gauge = b'vllm:num_requests_waiting{engine="%d",model_name="' + MODEL.encode() + b'"} %b\n'
    return _page(_METRICS + b"".join([gauge % (rank, value) for rank in range(ranks)]))


def _models(count: int) -> bytes:
    adapters = [{"id": f"adapter-{number}", "object": "model", "parent": MODEL} for number in range(count)]
    return _page(msgspec.json.encode({"object": "list", "data": [{"id": MODEL, "object": "model"}, *adapters]}))


def _stored(count: int) -> bytes:
    event = ["BlockStored", [1], None, list(range(16)), 16, None, "GPU"]
    return msgspec.msgpack.encode([1.0, [event] * count])


WRONGS: Mapping[str, Wrong] = {
    "load 1e308": Wrong({METRICS: lambda: _load(b"1e308")}),
    "load NaN": Wrong({METRICS: lambda: _load(b"NaN")}),
    "long label": Wrong({METRICS: lambda: _page(_METRICS + b"vllm:num_requests_waiting{" + b"a" * 60_000 + b"} 1\n")}),
    "long metrics": Wrong({METRICS: lambda: _page(_METRICS * 20_000)}),
    "many adapters": Wrong({MODELS: lambda: _models(100_000)}),
    "nested models": Wrong({MODELS: lambda: _page(b"[" * 1_000_000)}),
    "endless trailers": Wrong(
        {CHAT: lambda: _HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 1_000_000}
    ),
    "endless head": Wrong({CHAT: lambda: _HEAD + b"x: y\r\n" * 1_000_000}),
    "usage": Wrong({CHAT: lambda: _page(_UNARY.replace(b"16", b"999999999"))}),
    "errors": Wrong(fault=b"500"),
    "garbage": Wrong(fault=b"garbage"),
    "cut": Wrong(fault=b"cut"),
    "reset": Wrong(fault=b"reset"),
    "many events": Wrong(events=lambda: _stored(400_000)),
    "event garbage": Wrong(events=lambda: b"\x91" * 1_000_000),
}
GOOD = Wrong()


@cache
def _made(build: Callable[[], bytes]) -> bytes:
    return build()


class EvilPod(SoakPod):
    """One connection of the router, or of an attacker who says what is wrong."""

    wrong = ""
    """What all connections do wrong."""
    endpoint = ""

    def on_message_complete(self) -> None:
        target, kind = self._target.partition(b"?")[0], type(self)
        wrong = WRONGS.get(kind.wrong, GOOD)
        self._closes = self._headers.get(b"connection") == b"close"
        if target.startswith(CONTROL):
            kind.wrong = target.removeprefix(CONTROL).decode().replace("%20", " ")
            self._answer(_page(b""))
        elif target in wrong.pages:
            self._answer(_made(wrong.pages[target]))
        elif target == SOURCES:
            source = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": kind.endpoint, "topic": ""}
            self._answer(_page(msgspec.json.encode({"0": source})))
        else:
            if wrong.fault and target == CHAT:
                self._headers[b"x-soak-fault"] = wrong.fault
            super().on_message_complete()

    def _answer(self, answer: bytes) -> None:
        self._begin()
        self._end(answer)


async def _flood() -> None:
    """Publish KV events while they are wrong."""
    socket = zmq.asyncio.Context().socket(zmq.PUB)
    EvilPod.endpoint = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    sequence = 0
    while True:
        await asyncio.sleep(FLOOD_S)
        events = WRONGS.get(EvilPod.wrong, GOOD).events
        if events is not None:
            await socket.send_multipart([b"", struct.pack(">Q", sequence), _made(events)])
            sequence += 1


async def main(port: int) -> None:
    os.nice(10)  # its own work must not delay the others
    for wrong in WRONGS.values():  # before the run: a pod that makes them is slow
        for build in (*wrong.pages.values(), *([wrong.events] if wrong.events else [])):
            _made(build)
    flooding = asyncio.create_task(_flood())
    await serve([port], EvilPod)
    flooding.cancel()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
