"""What would be the least that a Python router costs?

    python loadtest/floor.py --port 8080 http://127.0.0.1:9001 http://127.0.0.1:9002
    python loadtest/hotpath.py --bench BENCH --routers warmroute,floor,floor-tokens,nginx

One protocol class on each side, uvloop and httptools, and nothing else: requests go round robin, every answer passes as
the bytes that came. No route is chosen, nothing is counted, checked, retried, timed or given up, and a client that
leaves is not noticed: nobody may run this. It says what of a router's price is Python's own, and what are its features.
With `--tokens` each prompt is parsed, rendered, tokenized and hashed as our router does it.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import httptools
import typer
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from loadtest.bodies import MODEL
from router.api.parse import parse_body, prompt_fields
from router.cli.mock_engine_command import TOKENIZER
from router.prompt.fingerprint import Fingerprinter
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import load_tokenizer
from router.types import Endpoint, Generation, InferenceRequest

Read = Callable[[bytes], object]


class Pods:
    """Connections that wait for a request, by pod; the next pod is the next in turn."""

    def __init__(self, urls: list[str]) -> None:
        places = [urlsplit(url) for url in urls]
        self._turns: Iterator[tuple[str, int]] = itertools.cycle([(at.hostname or "", at.port or 80) for at in places])
        self._idle: dict[tuple[str, int], list[Upstream]] = {}

    def send(self, message: bytes, client: asyncio.Transport) -> None:
        """To the next pod, over a connection that waits, or over a new one."""
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
    """One connection to a pod; between two requests it lies among the `idle`."""

    def __init__(self, idle: list[Upstream]) -> None:
        self._idle = idle
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def send(self, message: bytes, client: asyncio.Transport) -> None:
        """One request; what comes back goes to that client."""
        self._client = client
        self._transport.write(message)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._client.write(data)
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._idle.append(self)


class Client(asyncio.Protocol):
    """One client's connection."""

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
    """Tokens and block hashes of a chat, by the router's own code."""
    tokenizer = load_tokenizer(TOKENIZER)
    generation = Generation(model=MODEL, block_size_tokens=16)
    fingerprinter = Fingerprinter(tokenizer, ChatTemplate(tokenizer), generation)

    def read(body: bytes) -> object:
        parsed = parse_body(Endpoint.CHAT, body)
        prompt = prompt_fields(Endpoint.CHAT, parsed)
        request = InferenceRequest(id="", endpoint=Endpoint.CHAT, model=parsed.model, body=body, prompt=prompt)
        return fingerprinter.fingerprint(request)

    return read


async def serve(port: int, pods: list[str], read: Read | None) -> None:
    """Until the process is ended."""
    known = Pods(pods)
    server = await asyncio.get_running_loop().create_server(lambda: Client(known, read), "127.0.0.1", port)
    await server.serve_forever()


def main(
    pods: Annotated[list[str], typer.Argument(help="Base URLs.")],
    port: Annotated[int, typer.Option()],
    tokens: Annotated[bool, typer.Option(help="Read each prompt.")] = False,
) -> None:
    """Pass requests on."""
    uvloop.run(serve(port, pods, reader() if tokens else None))


if __name__ == "__main__":
    typer.run(main)
