"""A client whose connection is lost leaves nothing behind in the edge, in whichever callback of the event loop that
happens.

As `tests/proxy/test_cancellation.py`, through `EdgeProtocol`, with pipelined requests and bodies in pieces.
"""

from __future__ import annotations

import asyncio
import gc
import json
from itertools import count

import pytest
import uvicorn
from uvicorn.server import ServerState

from router.frontends.http.protocol import EdgeProtocol
from tests.api.edges import edge_of
from tests.kit.cores import CHAT
from tests.kit.scripted_pods import LONGER_S, Behaviour, ScriptedPod, Town
from tests.kit.step_loop import Pipe, StepLoop
from tests.proxy.test_cancellation import PROMPT, leftovers, streaming
from tests.proxy.test_kv_transfer import ANSWERING, saying

BODY = json.dumps({**CHAT, "stream": True}).encode()
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n" % len(BODY)
WHOLE = REQUEST + b"\r\n" + BODY


class Sink(asyncio.Protocol):
    """The client's end."""

    received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data


@pytest.mark.parametrize("behaviour", [ANSWERING, streaming, saying({}, 400)], ids=["unary", "stream", "error"])
@pytest.mark.parametrize(
    "pieces",
    [
        [WHOLE],
        [WHOLE * 3],
        [REQUEST + b"expect: 100-continue\r\n\r\n", BODY[:9], BODY[9:] + WHOLE],
        [WHOLE, b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n{}"],
    ],
    ids=["one request", "pipelined requests", "a body in pieces", "a refused request"],
)
def test_a_lost_connection_leaves_nothing(pieces: list[bytes], behaviour: Behaviour) -> None:
    """No buffered body, task, lease or connection to a pod."""
    with asyncio.Runner(loop_factory=StepLoop) as runner:
        runner.run(_lose_everywhere(pieces, behaviour))
        gc.collect()
        assert not runner.get_loop().problems  # type: ignore[attr-defined]


async def _lose_everywhere(pieces: list[bytes], behaviour: Behaviour) -> None:
    for callback in count(1):
        assert callback < 1000
        if not await _lose_before(callback, pieces, behaviour):
            assert callback > 5
            return


async def _lose_before(callback: int, pieces: list[bytes], behaviour: Behaviour) -> bool:
    """Whether the connection was lost before the last response was complete."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, StepLoop)
    loop.pods = {"a": ScriptedPod(behaviour)}
    pods = Town(loop.pods, {"a": "http://a"}, LONGER_S, retries=2)
    pods.read_prompt = PROMPT
    edge = edge_of(pods, pods.forwarder)
    config = uvicorn.Config(edge, http=EdgeProtocol, lifespan="off", log_config=None)
    config.load()
    protocol, client = EdgeProtocol(config, ServerState(), {}, loop), Sink()
    wire, far = Pipe(loop, protocol), Pipe(loop, client)
    wire.other, far.other = far, wire
    protocol.connection_made(wire)
    loop.interrupt_before(callback, wire.lose)
    for piece in pieces:
        far.write(piece)
        await asyncio.sleep(0)
    await loop.settle()
    lost = loop.interrupted
    loop.interrupt_before(0, wire.lose)
    if not lost:
        assert protocol.last is None or protocol.last.response_complete
        wire.lose()
    await loop.settle()
    pods.pools.close()
    await loop.settle()
    assert not edge.body_memory.bytes and not edge.in_flight.used and not protocol.tasks, callback
    assert not [*leftovers(pods, loop)], callback
    assert not loop.timers(), callback
    return lost
