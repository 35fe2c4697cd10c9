"""Clients that attack a router in every way that a client can, at a bounded rate.

    python -m loadtest.faults.hostile_clients PORT [KIND...]      # reads `on` and `off` from stdin, one word per line

With `EVIL_KEY` in the environment, they are one tenant with this key, and attack the other tenants too. With
`EVIL_POD_PORT`, they make the pod there do wrong (`evil_pod.py`): all that it can, or only `EVIL_WRONGS`, divided by
semicolons.
After `off` it waits until all attacks have ended and prints one line of JSON: how they ended, by kind.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import string
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))

from loadtest.bench.bodies import MODEL
from loadtest.faults.evil_pod import CONTROL, WRONGS
from tests.api.test_framing import REFUSED, SERVED

MIB = 1 << 20
RESPONSE_S = 8.0
"""An attacker waits this long for a response."""
ENDED_S = 45.0
"""All attacks end within this time after `off`."""
WRONG_S = 2.0
"""How long the evil pod does one thing wrong."""
PACE_S = 0.2
"""Pause of slow senders and readers."""
WINDOW_BYTES = 2048
CHAT = b"/v1/chat/completions"
_HOST = b"host: h\r\n"
Attack: TypeAlias = Callable[["Attacker"], Awaitable[str]]


@dataclass(slots=True)
class Attacker:
    """What an attack needs: the router's port and a source of chance. `key`: of its tenant; `pod_port`: of the evil
    pod."""

    port: int
    chance: random.Random
    key: str = ""
    pod_port: int = 0
    wrongs: Sequence[str] = tuple(WRONGS)
    """What the evil pod does wrong."""

    @asynccontextmanager
    async def connected(self, *, small_window: bool = False) -> AsyncIterator[Peer]:
        """A new connection, aborted at the end."""
        sock = socket.socket()
        sock.setblocking(False)
        if small_window:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW_BYTES)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
            reader, writer = await asyncio.open_connection(sock=sock)
        except BaseException:
            sock.close()
            raise
        try:
            yield Peer(
                reader, writer, b"host: h\r\nauthorization: Bearer %b\r\n" % self.key.encode() if self.key else _HOST
            )
        finally:
            writer.transport.abort()

    async def exchange(self, request: bytes) -> str:
        """Send a request and read the response: its status, or how the connection ended."""
        async with self.connected() as peer:
            await peer.send(request)
            return await peer.status()


@dataclass(frozen=True, slots=True)
class Peer:
    """One connection of an attacker."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    host: bytes = _HOST
    """What is sent for the header `host`: with the key of the tenant behind it."""

    async def send(self, data: bytes, piece_bytes: int = MIB // 4, pause_s: float = 0.0) -> None:
        """Send piece by piece, until the router closes."""
        data = data.replace(_HOST, self.host, 1) if self.host != _HOST else data
        with suppress(ConnectionError):
            for at in range(0, len(data), piece_bytes):
                self.writer.write(data[at : at + piece_bytes])
                await self.writer.drain()
                await asyncio.sleep(pause_s)

    async def status(self) -> str:
        """Read the response to its end."""
        head = b""
        try:
            async with asyncio.timeout(RESPONSE_S):
                head = await self.reader.read(4096)
                while await self.reader.read(MIB):
                    pass
        except (TimeoutError, ConnectionError) as error:
            if not head:
                return "no response" if isinstance(error, TimeoutError) else "reset"
        return head[9:12].decode("latin-1") or "closed"


def request(body: bytes, path: bytes = CHAT, headers: bytes = b"", method: bytes = b"POST") -> bytes:
    """A request whose connection ends after it."""
    head = b"%b %b HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-type: application/json\r\n" % (method, path)
    return b"%b%bcontent-length: %d\r\n\r\n%b" % (head, headers, len(body), body)


def chat(content: Any = "Hello", **fields: Any) -> bytes:
    """A chat body."""
    return msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": content}], **fields})


def text(chance: random.Random, length: int) -> str:
    """A string that was never sent before."""
    return "".join(chance.choices(string.ascii_letters, k=16)) + "x" * (length - 16)


# --- kinds ---

JSON = (
    b"",
    b"{",
    b'{"model"',
    b"[]",
    b"null",
    b'"text"',
    b"1e999",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"\xff\xfe" * 1000,
    b'{"model": "mock-model", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "mock-model", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
    b'{"model": "mock-model", "messages": null}',
    b'{"model": "mock-model", "messages": {}}',
    b'{"model": "mock-model", "messages": [[]]}',
    b'{"model": "mock-model", "messages": [{"role": 1, "content": {}}]}',
    b'{"model": "mock-model", "messages": [], "stream": "yes"}',
    b'{"model": 5, "messages": []}',
    b'{"model": "mock-model", "messages": [{"role": "user", "content": "a"}], "max_tokens": -1, "n": 1e308}',
    b'{"model": "mock-model", "model": "mock-model", "messages": [], "messages": []}',
    b'{"model": "mock-model", "messages": [{"role": "user", "content": "a"}]} trailing',
    b'{"model": "mock-model", "prompt": [[1, 2], ["a"]]}',
    b'{"model": "mock-model", "prompt": [' + b"9" * 5000 + b"]}",
)
STEERING = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 1},
    "bootstrap_host": "10.0.0.1",
    "bootstrap_room": 1,
    "data_parallel_rank": 7,
    "disaggregated_params": {"request_type": "generation_only"},
    "cache_salt": "x" * 100,
    "priority": -(2**31),
    "request_id": "x" * 10_000,
}
STEERING_HEADERS = b"x-data-parallel-rank: 9\r\nx-prefiller-host-port: 10.0.0.1:1\r\nx-request-id: %b\r\n" % (
    b"x" * 5000
)
UNSUPPORTED = (
    "audio/speech",
    "images/generations",
    "responses",
    "rerank",
    "embeddings",
    "messages",
    "score",
    "batches",
)
OWN = (
    request(b"", b"/admin/pods", method=b"GET", headers=b"x-forwarded-for: 127.0.0.1\r\norigin: http://evil\r\n"),
    request(b'{"url": "http://127.0.0.1:1"', b"/admin/pods"),
    request(b'{"url": 5}', b"/admin/pods"),
    request(b"", b"/admin/pods/none", method=b"DELETE"),
    request(b"", b"/admin/explain/" + b"x" * 2000, method=b"GET"),
    request(b"", b"/admin/../admin/pods", method=b"GET"),
    request(b"", b"//admin/policies", method=b"GET"),
    request(b"", b"/metrics", method=b"GET"),
    request(b"", b"/" + b"%00" * 500, method=b"GET"),
    request(b"", b"/livez", method=b"TRACE"),
    request(b"", b"*", method=b"OPTIONS"),
)


@cache
def huge() -> Sequence[bytes]:
    """Bodies up to the limit, and one above."""
    half = b'{"model": "mock-model", "messages": [{"role": "user", "content": "a"}]}'
    return (
        b" " * (32 * MIB - len(half)) + half,
        chat("word " * (6 * MIB)),
        chat("x" * (8 * MIB)),
        chat([{"type": "text", "text": "a"}] * 300_000),
        msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "a"}] * 400_000}),
        b'{"model": "mock-model", "prompt": [' + b"7, " * (6 * MIB) + b"7]}",
        b'{"model": "mock-model", "prompt": "' + b"\\u00e9" * (4 * MIB) + b'"}',
        chat("a", tools=[{"type": "function", "function": {"name": "f", "parameters": {"a": "b" * 200}}}] * 20_000),
        b" " * (33 * MIB),
    )


async def malformed_framing(attacker: Attacker) -> str:
    vectors = [*REFUSED.values(), *(sent for sent, _ in SERVED.values())]
    return await _until_closed(attacker, attacker.chance.choice(vectors).replace(b"/v1/x", CHAT))


async def _until_closed(attacker: Attacker, sent: bytes) -> str:
    """The status of the first response. The connection may stay open."""
    async with attacker.connected() as peer:
        await peer.send(sent)
        try:
            async with asyncio.timeout(1):
                return (await peer.reader.read(4096))[9:12].decode("latin-1") or "closed"
        except TimeoutError:
            return "open"
        except ConnectionError:
            return "reset"


async def malformed_json(attacker: Attacker) -> str:
    path = attacker.chance.choice((CHAT, b"/v1/completions", b"/v1/embeddings"))
    return await attacker.exchange(request(attacker.chance.choice(JSON), path))


async def huge_bodies(attacker: Attacker) -> str:
    body = attacker.chance.choice(huge())
    path = CHAT if b'"messages"' in body[-200:] or b'"messages"' in body[:200] else b"/v1/completions"
    return await attacker.exchange(request(body, path))


async def endless_body(attacker: Attacker) -> str:
    """A chunked body without an end, and a length that is never sent."""
    async with attacker.connected() as peer:
        await peer.send(b"POST %b HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT)
        await peer.send((b"10000\r\n" + b" " * 0x10000 + b"\r\n") * 560)
        return await peer.status()


async def slow_senders(attacker: Attacker) -> str:
    """A byte at a time, in the head or in the body."""
    sent = request(chat("a" * 500))
    at = attacker.chance.choice((0, 20, len(sent) - 400))
    async with attacker.connected() as peer:
        await peer.send(sent[:at])
        with suppress(TimeoutError):
            async with asyncio.timeout(RESPONSE_S * 2):
                await peer.send(sent[at:], 1, PACE_S)
        return await peer.status()


async def slow_readers(attacker: Attacker) -> str:
    """A response of 4 MiB at 5 KiB a second."""
    async with attacker.connected(small_window=True) as peer:
        await peer.send(request(chat(stream=True), headers=b"x-soak-bytes: 4194304\r\n"))
        read = 0
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(RESPONSE_S * 2):
                while piece := await peer.reader.read(1024):
                    read += len(piece)
                    await asyncio.sleep(PACE_S)
        return "part of the response" if read else "no response"


async def abandoned(attacker: Attacker) -> str:
    """In the head, in the body, in the prefill or in the stream."""
    sent, where = request(chat(text(attacker.chance, 2000), stream=True)), attacker.chance.randrange(4)
    async with attacker.connected() as peer:
        await peer.send((sent[:40], sent[:-10], sent, sent)[where])
        if where == 3:
            await peer.reader.read(64)
        await asyncio.sleep((0.0, 0.01, 0.01, 0.03)[where])
    return ("in the head", "in the body", "in the prefill", "in the stream")[where]


async def unknown_names(attacker: Attacker) -> str:
    """Models and paths that do not exist, each another one."""
    name = text(attacker.chance, attacker.chance.choice((20, 200, 20_000)))
    if attacker.chance.random() < 0.5:
        return await attacker.exchange(request(chat(model=name)))
    return await attacker.exchange(request(chat(), f"/v1/{name[:4000]}".encode()))


async def unsupported_endpoints(attacker: Attacker) -> str:
    """Endpoints that the pods answer with 501."""
    path = f"/v1/{attacker.chance.choice(UNSUPPORTED)}".encode()
    return await attacker.exchange(request(chat(input="a", prompt="a"), path))


async def pod_failures(attacker: Attacker) -> str:
    """Requests that make a pod fail."""
    fault = attacker.chance.choice((b"500", b"501", b"cut", b"garbage"))
    return await attacker.exchange(request(chat(stream=True), headers=b"x-soak-fault: %b\r\n" % fault))


async def steering(attacker: Attacker) -> str:
    """Fields and headers that would control an engine."""
    some = dict(attacker.chance.sample(sorted(STEERING.items()), 4))
    return await attacker.exchange(request(chat(**some), headers=STEERING_HEADERS))


async def distinct_names(attacker: Attacker) -> str:
    """A session, tenant, salt, user and request id that nobody else has, long or too long."""
    names = ("x-session-id", "x-tenant-id", "x-request-id", "x-correlation-id", "traceparent", "authorization")
    length = attacker.chance.choice((200, 1000, 9000))
    headers = "".join(f"{name}: {text(attacker.chance, length)}\r\n" for name in names).encode()
    unique = text(attacker.chance, length)
    return await attacker.exchange(request(chat(cache_salt=unique, user=unique, stream=True), headers=headers))


async def oversized_heads(attacker: Attacker) -> str:
    """More bytes or more headers than allowed."""
    many = b"".join(b"x-%d: 1\r\n" % number for number in range(7000))
    return await attacker.exchange(
        request(b"{}", headers=attacker.chance.choice((many, b"x: " + b"y" * 200_000 + b"\r\n")))
    )


async def own_endpoints(attacker: Attacker) -> str:
    """The router's own endpoints, in the wrong place and form."""
    return await _until_closed(attacker, attacker.chance.choice(OWN))


async def idle_connections(attacker: Attacker) -> str:
    """Connections without a request."""
    async with attacker.connected() as peer:
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(RESPONSE_S):
                await peer.reader.read(1)
    return "idle"


async def pipelined(attacker: Attacker) -> str:
    """Forty requests at once, without reading."""
    one = request(chat(stream=True)).replace(b"connection: close\r\n", b"")
    async with attacker.connected() as peer:
        await peer.send(one * 40)
        await asyncio.sleep(PACE_S)
    return "left"


# --- of one tenant against the others ---


async def held_bodies(attacker: Attacker) -> str:
    """Large bodies that stop before their end."""
    async with attacker.connected() as peer:
        body = chat("x" * (4 * MIB))
        await peer.send(request(body)[:-100])
        return await peer.status()


async def held_connections(attacker: Attacker) -> str:
    """Four hundred requests that stop after one byte of the body; each is sent again when the router closes it."""

    async def hold() -> None:
        while True:
            with suppress(OSError):
                async with attacker.connected() as peer:
                    await peer.send(request(chat())[: 1 - len(chat())])
                    while await peer.reader.read(4096):
                        pass
            await asyncio.sleep(PACE_S / 4)

    with suppress(TimeoutError):
        async with asyncio.timeout(RESPONSE_S), asyncio.TaskGroup() as group:
            for _ in range(400):
                group.create_task(hold())
    return "held"


async def nested_tools(attacker: Attacker) -> str:
    """Tools nested deeply, and with thousands of parameters."""
    nested = b'{"a":' * attacker.chance.choice((30, 300, 900))
    deep = nested + b"{}" + b"}" * nested.count(b"{")
    wide = b"{" + b",".join([b'"p%d":{}' % number for number in range(4000)]) + b"}"
    tool = b'{"type":"function","function":{"name":"f","parameters":%b}}' % attacker.chance.choice((deep, wide))
    return await attacker.exchange(
        request(chat().replace(b'{"model"', b'{"tools":[%b],"model"' % b",".join([tool] * 6), 1))
    )


async def many_large_bodies(attacker: Attacker) -> str:
    """Eight chats of half a megabyte with many items at once."""
    body = chat([{"type": "text", "text": text(attacker.chance, 20)}] * 10_000)
    ends = await asyncio.gather(*[attacker.exchange(request(body)) for _ in range(8)])
    return ends[0]


async def unread_prompts(attacker: Attacker) -> str:
    """Forty chats at once that the router does not read."""
    sent = request(chat(text(attacker.chance, 2000), truncate_prompt_tokens=10))
    return (await asyncio.gather(*[attacker.exchange(sent) for _ in range(40)]))[0]


async def impatient(attacker: Attacker) -> str:
    """Deadlines that no pod can meet."""
    return await attacker.exchange(request(chat(stream=True), headers=b"x-request-deadline-ms: 1\r\n"))


async def long_streams(attacker: Attacker) -> str:
    """Sixty streams that nobody reads."""

    async def stay() -> None:
        async with attacker.connected(small_window=True) as peer:
            await peer.send(request(chat(stream=True), headers=b"x-soak-bytes: 4194304\r\n"))
            await asyncio.sleep(RESPONSE_S)

    await asyncio.gather(*[stay() for _ in range(60)])
    return "held"


async def stored_responses(attacker: Attacker) -> str:
    """Responses that do not exist, and background responses."""
    if attacker.chance.random() < 0.5:
        return await attacker.exchange(
            request(b"", b"/v1/responses/" + text(attacker.chance, 40).encode(), method=b"GET")
        )
    body = msgspec.json.encode({"model": MODEL, "input": "a", "background": True, "store": True})
    return await attacker.exchange(request(body, b"/v1/responses"))


async def wrong_pod(attacker: Attacker) -> str:
    """The evil pod does something wrong for a few seconds."""
    name, pod = attacker.chance.choice(attacker.wrongs), Attacker(attacker.pod_port, attacker.chance)
    try:
        await pod.exchange(request(b"", CONTROL + name.replace(" ", "%20").encode(), method=b"GET"))
        await asyncio.sleep(WRONG_S)
    finally:
        await pod.exchange(request(b"", CONTROL, method=b"GET"))
    return name


@dataclass(frozen=True, slots=True)
class AttackKind:
    """An attack, how often it begins, and how many run at most at the same time."""

    run: Attack
    per_s: float
    at_once: int = 8


KINDS: Mapping[str, AttackKind] = {
    "malformed framing": AttackKind(malformed_framing, 5),
    "malformed JSON": AttackKind(malformed_json, 4),
    "huge bodies": AttackKind(huge_bodies, 0.1, 1),
    "endless bodies": AttackKind(endless_body, 0.1, 1),
    "slow senders": AttackKind(slow_senders, 1, 20),
    "slow readers": AttackKind(slow_readers, 1, 20),
    "abandoned": AttackKind(abandoned, 6),
    "unknown names": AttackKind(unknown_names, 3),
    "unsupported endpoints": AttackKind(unsupported_endpoints, 2),
    "failures of pods": AttackKind(pod_failures, 1),
    "engine steering": AttackKind(steering, 2),
    "distinct names": AttackKind(distinct_names, 3),
    "oversized heads": AttackKind(oversized_heads, 1),
    "own endpoints": AttackKind(own_endpoints, 2),
    "idle connections": AttackKind(idle_connections, 3, 30),
    "pipelined": AttackKind(pipelined, 0.2, 2),
}


TENANT_KINDS: Mapping[str, AttackKind] = {
    "held bodies": AttackKind(held_bodies, 4, 32),
    "held connections": AttackKind(held_connections, 0.2, 1),
    "nested tools": AttackKind(nested_tools, 2, 4),
    "many large bodies": AttackKind(many_large_bodies, 0.2, 1),
    "unread prompts": AttackKind(unread_prompts, 0.5, 2),
    "impatient": AttackKind(impatient, 10),
    "long streams": AttackKind(long_streams, 0.2, 1),
    "stored responses": AttackKind(stored_responses, 5),
}
"""Attacks by one tenant: they use what all tenants share."""
POD_KINDS: Mapping[str, AttackKind] = {"wrong pod": AttackKind(wrong_pod, 2, 1)}


@dataclass(slots=True)
class Attacks:
    """All attacks that run, and how the others ended."""

    attacker: Attacker
    kinds: Mapping[str, AttackKind] = field(default_factory=lambda: KINDS)
    ends: Counter[str] = field(default_factory=Counter)
    running: dict[str, set[asyncio.Task[None]]] = field(default_factory=dict)

    async def run(self) -> None:
        """Begin attacks until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name, kind in self.kinds.items():
                group.create_task(self._repeat(name, kind))

    async def _repeat(self, name: str, kind: AttackKind) -> None:
        running = self.running.setdefault(name, set())
        while True:
            await asyncio.sleep(self.attacker.chance.expovariate(kind.per_s))
            if len(running) < kind.at_once:
                task = asyncio.create_task(self._one(name, kind))
                running.add(task)
                task.add_done_callback(running.discard)

    async def _one(self, name: str, kind: AttackKind) -> None:
        try:
            end = await kind.run(self.attacker)
        except Exception as error:
            end = type(error).__name__
        self.ends[f"{name}: {end}"] += 1

    async def finish(self) -> Counter[str]:
        """Wait until all have ended. Returns how, since the last call."""
        if tasks := [task for running in self.running.values() for task in running]:
            _, late = await asyncio.wait(tasks, timeout=ENDED_S)
            for task in late:
                task.cancel()
        ends, self.ends = self.ends, Counter()
        return ends


async def attack(port: int, kinds: Sequence[str]) -> None:
    """Follow the commands on stdin until it ends."""
    os.nice(10)  # the attackers' own work must not delay the others
    huge()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), sys.stdin)
    attacker = Attacker(port, random.Random(1), os.getenv("EVIL_KEY", ""), int(os.getenv("EVIL_POD_PORT", "0")))
    attacker.wrongs = os.getenv("EVIL_WRONGS", ";".join(WRONGS)).split(";")
    known = {**KINDS, **(TENANT_KINDS if attacker.key else {}), **(POD_KINDS if attacker.pod_port else {})}
    attacks, beginning = Attacks(attacker, {kind: known[kind] for kind in kinds or known}), None
    print("{}", flush=True)
    while word := (await reader.readline()).strip():
        if word == b"on" and beginning is None:
            beginning = asyncio.create_task(attacks.run())
        elif word == b"off" and beginning is not None:
            beginning.cancel()
            beginning = None
            print(msgspec.json.encode(await attacks.finish()).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(attack(int(sys.argv[1]), sys.argv[2:]))
