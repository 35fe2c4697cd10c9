"""Measures the CPU cost of this router's own Python code, per request and per function.

    python -m loadtest.bench.inside                              # CPU us per request, without a network
    python -m loadtest.bench.inside --load "2K warm" --functions 40

Runs a load of `hotpath.py` inside the router's process. Protocol, prompts and decisions are real; clients and pods are
objects that respond at once. Kernel and other processes are therefore excluded, and results vary by a few percent only.
`--functions` counts bytecodes and calls per function instead, which are exactly reproducible. Tracing is slow, so
traced times mean nothing.
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

sys.path.insert(0, str(Path(__file__).parents[2]))

from loadtest.bench import rig
from loadtest.bench.bodies import MARKER, SourceText, chat_bodies
from loadtest.bench.duties import tenant_key, write_tenants
from loadtest.bench.hotpath import LOADS
from loadtest.commands.mock_engine_command import mock_tokenizer
from router.cli import main as warmroute
from router.frontends.http.connection import Connection
from router.frontends.http.openai_edge import OpenAiEdge
from router.frontends.http.protocol import EdgeProtocol
from router.frontends.http.upstream import UpstreamPool

CLIENTS = 32
ROUNDS = 5
WITHIN_S = 900.0
LEAST_REQUESTS = 2_000
_JOB = "WARMROUTE_INSIDE"
"""Environment variable with the path of the job file."""
_BODY = json.dumps(
    {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello " * 60}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 300, "completion_tokens": 64, "total_tokens": 364},
    }
).encode()
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
_REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b"
)


class FakeTransport(asyncio.Transport):
    """A transport that passes written data to a callback."""

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
        """Ignored."""

    resume_reading = pause_reading

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Ignored."""


async def fake_connect(pool: UpstreamPool) -> Connection:
    """Replaces `UpstreamPool._connect`: a pod that returns the same response to every request."""
    loop = asyncio.get_running_loop()
    connection = Connection(loop, pool.limits, pool.pod)

    def written(_: bytes) -> None:
        loop.call_soon(connection.data_received, _ANSWER)

    connection.connection_made(FakeTransport(written))
    return connection


class LoadPlayer:
    """Clients that send the next request when they have a response."""

    def __init__(self, server: uvicorn.Server, bodies: list[bytes], keys: int) -> None:
        self._server = server
        self._bodies = bodies
        self._keys = [tenant_key(number).encode() for number in range(max(1, keys))]
        self._numbers = itertools.count(time.time_ns())

    async def play(self, requests: int) -> float:
        """Run `requests` requests; returns the CPU seconds of this thread."""
        loop = asyncio.get_running_loop()
        left, done = requests, loop.create_future()

        def client() -> Callable[[], None]:
            def on_answer(_: bytes) -> None:
                nonlocal left
                left -= 1
                if left >= CLIENTS:
                    loop.call_soon(ask)
                elif not left:
                    done.set_result(None)

            def ask() -> None:
                protocol.data_received(self._message())

            protocol = EdgeProtocol(self._server.config, self._server.server_state, {}, loop)
            protocol.connection_made(FakeTransport(on_answer))
            return ask

        for ask in [client() for _ in range(CLIENTS)]:
            loop.call_soon(ask)
        began_s = time.thread_time()
        await done
        return time.thread_time() - began_s

    def _message(self) -> bytes:
        number = next(self._numbers)
        body = self._bodies[number % len(self._bodies)].replace(MARKER.encode(), b"%016x" % (number % 16**16))
        return _REQUEST % (self._keys[number % len(self._keys)], len(body), body)


def _settings(tenants: int, folder: Path) -> dict[str, Any]:
    """Settings with this many tenants, each with quotas of all kinds, and with the file of usage; none without."""
    if not tenants:
        return {}
    return {"tenants": str(write_tenants(folder, tenants)), "usage": {"file": str(folder / "usage.jsonl")}}


class BytecodeCounts:
    """Bytecodes and calls per function."""

    def __init__(self) -> None:
        self.bytecodes: Counter[CodeType] = Counter()
        self.calls: Counter[CodeType] = Counter()

    def enter(self, frame: FrameType, _event: str, _value: object) -> Any:
        """Trace function for `sys.settrace`."""
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.calls[frame.f_code] += 1
        return self._within

    def _within(self, frame: FrameType, event: str, _value: object) -> Any:
        if event == "opcode":
            self.bytecodes[frame.f_code] += 1
        return self._within

    def lines(self, requests: int, most: int) -> list[str]:
        """Totals and the most expensive functions."""
        every, calls = sum(self.bytecodes.values()) / requests, sum(self.calls.values()) / requests
        shown = [f"{every:,.0f} bytecodes in {calls:.0f} calls of Python functions per request; the largest:"]
        for code, count in self.bytecodes.most_common(most):
            where = f"{code.co_qualname} ({Path(code.co_filename).name})"
            shown.append(f"{count / requests:8.1f} {self.calls[code] / requests:6.2f}  {where}")
        return shown


async def _play(player: LoadPlayer, requests: int, functions: int) -> list[str]:
    """Run the load and return the lines to print."""
    await player.play(requests)
    if not functions:
        return [f"{await player.play(requests) / requests * 1e6:.1f} us" for _ in range(ROUNDS)]
    counts = BytecodeCounts()
    sys.settrace(counts.enter)
    await player.play(requests)
    sys.settrace(None)
    return counts.lines(requests, functions)


def _serve(job: dict[str, Any]) -> None:
    """`warmroute serve` that runs the job on SIGUSR1."""
    startup, bodies = uvicorn.Server.startup, [body.encode() for body in job["bodies"]]

    async def with_orders(self: uvicorn.Server, sockets: Any = None) -> None:
        await startup(self, sockets)
        if not isinstance(self.config.app, OpenAiEdge):
            return  # the admin listener
        loop = asyncio.get_running_loop()

        def begin() -> None:
            UpstreamPool._connect = fake_connect  # type: ignore[assignment, method-assign]
            playing = loop.create_task(
                _play(LoadPlayer(self, bodies, job["tenants"]), job["requests"], job["functions"])
            )
            playing.add_done_callback(lambda done: write(done.result()))

        loop.add_signal_handler(signal.SIGUSR1, begin)

    def write(lines: list[str]) -> None:
        Path(job["out"]).write_text("\n".join(lines) + "\n")

    uvicorn.Server.startup = with_orders  # type: ignore[method-assign]
    warmroute()


def main(
    bench: rig.BenchFolder = rig.BENCH,
    load: Annotated[str, typer.Option(help="A load of hotpath.py that is not streamed.")] = "2K warm",
    requests: Annotated[int, typer.Option(min=LEAST_REQUESTS)] = 5_000,
    tenants: Annotated[int, typer.Option(min=0, help="Tenants with quotas that send them in turn, with usage.")] = 0,
    functions: Annotated[int, typer.Option(min=0, help="Count bytecodes and show this many functions.")] = 0,
) -> None:
    """Run one load inside the router."""
    with TemporaryDirectory(prefix="warmroute-inside-") as temporary:
        folder = Path(temporary)
        chats = LOADS[load].chats(SourceText(mock_tokenizer()), LOADS[load].tokens, 512)
        bodies = [body.decode() for body in chat_bodies(chats, stream=False)]
        job, out = folder / "job.json", folder / "out.txt"
        facts = {"requests": requests, "functions": functions, "tenants": tenants, "out": str(out)}
        job.write_text(json.dumps({"bodies": bodies, **facts}))
        os.environ[_JOB] = str(job)
        with (
            rig.mocks(rig.build(bench, folder).mock) as pods,
            rig.launch_router(
                rig.OURS,
                pods,
                folder / "router",
                program=[str(Path(__file__)), "serve"],
                settings=_settings(tenants, folder),
            ) as router,
        ):
            os.kill(router.session or 0, signal.SIGUSR1)
            deadline_s = time.monotonic() + WITHIN_S
            while not out.exists() or not out.read_text().endswith("\n"):
                if time.monotonic() > deadline_s:
                    raise SystemExit((folder / "router" / f"{rig.OURS}.log").read_text())
                time.sleep(0.1)
        print(out.read_text(), end="")


if __name__ == "__main__":
    if _JOB in os.environ:
        _serve(json.loads(Path(os.environ[_JOB]).read_bytes()))
    else:
        typer.run(main)
