"""What of a request's price is our own code, and where is it?

    python loadtest/inside.py --bench BENCH                              # CPU us a request, without any network
    python loadtest/inside.py --bench BENCH --load "2K warm" --functions 40

The load of `hotpath.py` is played inside the router's process: real protocol, real prompts, real decisions, but clients
and pods are objects that answer at once, so that neither kernel nor neighbours are in the figure; it repeats to a few
percent. With `--functions` the bytecodes and calls of each function a request are counted instead, which repeat exactly
and say where the work is; traced code is slow, so that its times mean nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Annotated, Any

import typer
import uvicorn

sys.path.insert(0, str(Path(__file__).parents[1]))

from loadtest import rig
from loadtest.bodies import MARKER, Prose, chat_bodies
from loadtest.hotpath import LOADS
from router.api.protocol import EdgeProtocol
from router.cli import main as warmroute
from router.proxy.connection import Connection
from router.proxy.upstream import UpstreamPool

CLIENTS = 32
ROUNDS = 5
WITHIN_S = 300.0
LEAST_REQUESTS = 2_000
_ORDER = "WARMROUTE_INSIDE"
"""Names the file that tells the router's process what to play, and where to write what it found."""
_BODY = json.dumps(
    {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello " * 60}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 300, "completion_tokens": 64, "total_tokens": 364},
    }
).encode()
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
_REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
)


class Wire(asyncio.Transport):
    """A connection of which only what is written to it matters."""

    def __init__(self, written: Callable[[bytes], None]) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.write = written  # type: ignore[method-assign, assignment]
        self._closing = False

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    abort = close

    def pause_reading(self) -> None:
        """Nothing is ever late."""

    resume_reading = pause_reading

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is ever held."""


async def answering(pool: UpstreamPool) -> Connection:
    """In place of `UpstreamPool._connect`: a pod that answers whatever it is sent."""
    loop = asyncio.get_running_loop()
    connection = Connection(loop, pool.timeouts, pool.pod)

    def written(_: bytes) -> None:
        loop.call_soon(connection.data_received, _ANSWER)

    connection.connection_made(Wire(written))
    return connection


class Player:
    """Clients that ask again as soon as they are answered."""

    def __init__(self, server: uvicorn.Server, bodies: list[bytes]) -> None:
        self._server = server
        self._bodies = bodies
        self._numbers = itertools.count(time.time_ns())

    async def play(self, requests: int) -> float:
        """So many requests; CPU seconds of this thread meanwhile."""
        loop = asyncio.get_running_loop()
        left, done = requests, loop.create_future()

        def client() -> Callable[[], None]:
            def answered(_: bytes) -> None:
                nonlocal left
                left -= 1
                if left >= CLIENTS:
                    loop.call_soon(ask)
                elif not left:
                    done.set_result(None)

            def ask() -> None:
                protocol.data_received(self._message())

            protocol = EdgeProtocol(self._server.config, self._server.server_state, {}, loop)
            protocol.connection_made(Wire(answered))
            return ask

        for ask in [client() for _ in range(CLIENTS)]:
            loop.call_soon(ask)
        began_s = time.thread_time()
        await done
        return time.thread_time() - began_s

    def _message(self) -> bytes:
        number = next(self._numbers)
        body = self._bodies[number % len(self._bodies)].replace(MARKER.encode(), b"%016x" % (number % 16**16))
        return _REQUEST % (len(body), body)


class Counts:
    """Bytecodes and calls of each function."""

    def __init__(self) -> None:
        self.bytecodes: Counter[CodeType] = Counter()
        self.calls: Counter[CodeType] = Counter()

    def enter(self, frame: FrameType, _event: str, _value: object) -> Any:
        """For `sys.settrace`."""
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.calls[frame.f_code] += 1
        return self._within

    def _within(self, frame: FrameType, event: str, _value: object) -> Any:
        if event == "opcode":
            self.bytecodes[frame.f_code] += 1
        return self._within

    def lines(self, requests: int, most: int) -> list[str]:
        """The sums, and the dearest functions."""
        every, calls = sum(self.bytecodes.values()) / requests, sum(self.calls.values()) / requests
        shown = [f"{every:,.0f} bytecodes in {calls:.0f} calls of Python functions a request; of them:"]
        for code, count in self.bytecodes.most_common(most):
            where = f"{code.co_qualname} ({Path(code.co_filename).name})"
            shown.append(f"{count / requests:8.1f} {self.calls[code] / requests:6.2f}  {where}")
        return shown


async def _played(player: Player, requests: int, functions: int) -> list[str]:
    """What is to be said of it."""
    await player.play(requests)
    if not functions:
        return [f"{await player.play(requests) / requests * 1e6:.1f} us" for _ in range(ROUNDS)]
    counts = Counts()
    sys.settrace(counts.enter)
    await player.play(requests)
    sys.settrace(None)
    return counts.lines(requests, functions)


def _serve(order: dict[str, Any]) -> None:
    """`warmroute serve` that plays once it is told to."""
    startup, bodies = uvicorn.Server.startup, [body.encode() for body in order["bodies"]]

    async def with_orders(self: uvicorn.Server, sockets: Any = None) -> None:
        await startup(self, sockets)
        loop = asyncio.get_running_loop()

        def begin() -> None:
            UpstreamPool._connect = answering  # type: ignore[assignment, method-assign]
            playing = loop.create_task(_played(Player(self, bodies), order["requests"], order["functions"]))
            playing.add_done_callback(lambda done: write(done.result()))

        loop.add_signal_handler(signal.SIGUSR1, begin)

    def write(lines: list[str]) -> None:
        Path(order["out"]).write_text("\n".join(lines) + "\n")

    uvicorn.Server.startup = with_orders  # type: ignore[method-assign]
    warmroute()


def main(
    bench: Annotated[Path, typer.Option(exists=True, help="Folder with mock.c and lg.c: pods to become ready before.")],
    load: Annotated[str, typer.Option(help="Of hotpath.py, one that is not streamed.")] = "2K warm",
    requests: Annotated[int, typer.Option(min=LEAST_REQUESTS)] = 5_000,
    functions: Annotated[int, typer.Option(min=0, help="Count bytecodes, and show so many functions.")] = 0,
) -> None:
    """Play one load inside the router."""
    with TemporaryDirectory(prefix="warmroute-inside-") as temporary:
        folder = Path(temporary)
        chats = LOADS[load].chats(Prose(rig.demo_tokenizer()), LOADS[load].tokens, 512)
        bodies = [body.decode() for body in chat_bodies(chats, stream=False)]
        order, out = folder / "order.json", folder / "out.txt"
        order.write_text(json.dumps({"bodies": bodies, "requests": requests, "functions": functions, "out": str(out)}))
        os.environ[_ORDER] = str(order)
        with (
            rig.mocks(rig.build(bench, folder).mock) as pods,
            rig.routed(rig.OURS, pods, folder / "router", program=[str(Path(__file__)), "serve"]) as router,
        ):
            os.kill(router.session or 0, signal.SIGUSR1)
            deadline_s = time.monotonic() + WITHIN_S
            while not out.exists() or not out.read_text().endswith("\n"):
                if time.monotonic() > deadline_s:
                    raise SystemExit((folder / "router" / f"{rig.OURS}.log").read_text())
                time.sleep(0.1)
        print(out.read_text(), end="")


if __name__ == "__main__":
    if _ORDER in os.environ:
        _serve(json.loads(Path(os.environ[_ORDER]).read_bytes()))
    else:
        typer.run(main)
