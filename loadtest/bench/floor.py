"""A minimal Python proxy: the lower bound for the CPU cost of a Python router.

    python -m loadtest.bench.floor --port 8080 http://127.0.0.1:9001 http://127.0.0.1:9002
    python -m loadtest.bench.hotpath --routers warmroute,floor,floor-tokens,nginx

uvloop and httptools with one protocol class per side. Requests go round robin; responses are forwarded unchanged. There
is no routing, counting, checking, retry or timeout, and client disconnects are ignored: not for production. With
`--tokens`, each prompt is parsed, rendered, tokenized and hashed by the router's code.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import httptools
import typer
import uvloop

from router.addresses import split_url

sys.path.insert(0, str(Path(__file__).parents[2]))

from loadtest.bench.bodies import MODEL
from loadtest.commands.mock_engine_command import mock_tokenizer
from router.prompt.fingerprint import Fingerprinter
from router.prompt.template import ChatTemplate
from router.request.parse import PARSERS
from router.types import Endpoint, Generation, InferenceRequest

Read = Callable[[bytes], object]


class Pods:
    """Idle connections by pod; `send` rotates over the pods."""

    def __init__(self, urls: list[str]) -> None:
        places = [split_url(url) for url in urls]
        self._turns: Iterator[tuple[str, int]] = itertools.cycle([(at.hostname or "", at.port or 80) for at in places])
        self._idle: dict[tuple[str, int], list[Upstream]] = {}

    def send(self, message: bytes, client: asyncio.Transport) -> None:
        """Send to the next pod, over an idle connection or a new one."""
        pod = next(self._turns)
        idle = self._idle.setdefault(pod, [])
        if idle:
            idle.pop().send(message, client)
        else:
            asyncio.get_running_loop().create_task(self._connect(pod, idle, message, client))

    async def _connect(
        self, pod: tuple[str, int], idle: list[Upstream], message: bytes, client: asyncio.Transport
    ) -> None:
        _, upstream = await asyncio.get_running_loop().create_connection(lambda: Upstream(idle), *pod)
        upstream.send(message, client)


class Upstream(asyncio.Protocol):
    """One connection to a pod. Between requests it is in `idle`."""

    def __init__(self, idle: list[Upstream]) -> None:
        self._idle = idle
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def send(self, message: bytes, client: asyncio.Transport) -> None:
        """Send one request; the response goes to `client`."""
        self._client = client
        self._transport.write(message)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._client.write(data)
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._idle.append(self)


class Client(asyncio.Protocol):
    """One client connection."""

    def __init__(self, pods: Pods, read: Read | None) -> None:
        self._pods = pods
        self._read = read
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body: list[bytes] = []
        self._headers: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append(name + b": " + value)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        if self._read is not None and body:
            self._read(body)
        head = b"\r\n".join([self._parser.get_method() + b" " + self._url + b" HTTP/1.1", *self._headers, b"\r\n"])
        self._pods.send(head + body, self._transport)  # type: ignore[arg-type]


def reader() -> Read:
    """Tokenize and hash a chat with the router's code."""
    tokenizer = mock_tokenizer()
    generation = Generation(model=MODEL, block_size_tokens=16)
    fingerprinter = Fingerprinter(tokenizer, ChatTemplate(tokenizer), generation)

    def read(body: bytes) -> object:
        parsed = PARSERS[Endpoint.CHAT].parse(body)
        prompt = PARSERS[Endpoint.CHAT].prompt_fields(parsed)
        request = InferenceRequest(id="", endpoint=Endpoint.CHAT, model=parsed.model, body=body, prompt=prompt)
        return fingerprinter.fingerprint(request)

    return read


async def serve(port: int, pods: list[str], read: Read | None) -> None:
    """Serve until the process is terminated."""
    known = Pods(pods)
    server = await asyncio.get_running_loop().create_server(lambda: Client(known, read), "127.0.0.1", port)
    await server.serve_forever()


def main(
    pods: Annotated[list[str], typer.Argument(help="Base URLs.")],
    port: Annotated[int, typer.Option()],
    tokens: Annotated[bool, typer.Option(help="Render, tokenize and hash each prompt.")] = False,
) -> None:
    """Run the proxy."""
    uvloop.run(serve(port, pods, reader() if tokens else None))


if __name__ == "__main__":
    typer.run(main)
