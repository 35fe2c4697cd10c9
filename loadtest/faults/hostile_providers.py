"""What do providers that hang, lie, redirect or send a gigabyte do to a router, and clients with endless names?

    python -m loadtest.faults.hostile_providers

A router without pods, whose names fall back to one such provider each, then to a good one. Prints who answered, after
what time, what the router counted as its cost, and how much memory it had at most.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import httpx
import typer

from loadtest.commands.child_processes import FleetPlan, RouterUrls, configured_router, router_config, temporary_folder

MIB = 1024 * 1024
SENT_BYTES = 1024 * MIB
TIMEOUT_S = 1.0
DIGEST = "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683"
"""The digest of `key`."""
PRICE = {"prompt": 2.5, "output": 10.0}
Script: TypeAlias = Callable[[asyncio.StreamWriter], Awaitable[None]]


def _head(kind: str, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{more}".encode()


async def _whole(
    writer: asyncio.StreamWriter, usage: Mapping[str, int], status: str = "200 OK", more: str = ""
) -> None:
    body = json.dumps({"choices": [{"message": {"content": "hi"}}], "usage": usage}).encode()
    writer.write(_head("application/json", status, f"{more}content-length: {len(body)}\r\n\r\n") + body)


async def good(writer: asyncio.StreamWriter) -> None:
    await _whole(writer, {"prompt_tokens": 9, "completion_tokens": 2})


async def lies(writer: asyncio.StreamWriter) -> None:
    await _whole(writer, {"prompt_tokens": 10**9, "completion_tokens": 10**9})


async def redirects(writer: asyncio.StreamWriter) -> None:
    await _whole(writer, {}, "307 X", "location: http://127.0.0.1:1/\r\n")


async def hangs(writer: asyncio.StreamWriter) -> None:
    """Until the router closes the connection."""


async def hangs_after_its_head(writer: asyncio.StreamWriter) -> None:
    writer.write(_head("text/event-stream", more="transfer-encoding: chunked\r\n\r\n"))


async def endless_headers(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    for number in range(100_000):
        writer.write(b"x-%d: %b\r\n" % (number, b"x" * 1000))
        await writer.drain()


async def sends_a_gigabyte(writer: asyncio.StreamWriter) -> None:
    """As one JSON object."""
    await _pour(writer, _head("application/json", more=f"content-length: {SENT_BYTES}\r\n\r\n") + b'{"choices":"')


async def streams_a_gigabyte(writer: asyncio.StreamWriter) -> None:
    """As one event, without an end."""
    await _pour(
        writer, _head("text/event-stream", more=f"content-length: {SENT_BYTES}\r\n\r\n") + b'data: {"choices":"'
    )


async def _pour(writer: asyncio.StreamWriter, begin: bytes) -> None:
    writer.write(begin)
    piece, left = b"x" * 262_144, SENT_BYTES - len(begin.partition(b"\r\n\r\n")[2])
    while left > 0:
        writer.write(piece[:left])
        left -= len(piece)
        await writer.drain()


SCRIPTS: Mapping[str, Script] = {
    one.__name__: one
    for one in (
        *(hangs, hangs_after_its_head, redirects, endless_headers),
        *(lies, sends_a_gigabyte, streams_a_gigabyte, good),
    )
}


@asynccontextmanager
async def standin(script: Script) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                await script(writer)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _metric(admin: httpx.AsyncClient, series: str) -> float:
    text = (await admin.get("/metrics")).text
    found = re.search(rf"^{re.escape(series)} (\S+)", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


class Memory:
    """The most that the router had while it was watched."""

    def __init__(self, admin: httpx.AsyncClient) -> None:
        self._admin, self.most_bytes = admin, 0.0

    async def watch(self) -> None:
        while True:
            self.most_bytes = max(self.most_bytes, await _metric(self._admin, "process_resident_memory_bytes"))
            await asyncio.sleep(0.05)


async def ask(client: httpx.AsyncClient, name: str, **headers: str) -> tuple[int, str, int, float]:
    """Status, who answered, bytes and seconds."""
    body = {
        "model": name,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 50,
        "stream": "stream" in name,
    }
    began_s, size = time.monotonic(), 0
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        async for piece in answer.aiter_raw():
            size += len(piece)
    by = answer.headers.get("x-warmroute-model", "")
    return answer.status_code, by, size, time.monotonic() - began_s


def config_of(urls: Mapping[str, str], folder: Path) -> dict[str, Any]:
    (folder / "key").write_text("key")
    names: list[Any] = [
        {"name": f"to-{name}", "to": "gone", "fallbacks": [name, "good"]} for name in urls if name != "good"
    ]
    rules = [{"headers": {"x-beta": "1"}, "to": "secret"}]
    names.append({"name": "ruled", "to": "gone", "rules": rules, "fallbacks": ["good"]})
    tenants = [{"name": "acme", "keys": [DIGEST], "models": ["to-*", "ruled", "gone", *urls]}]
    for what, entries in {"names": names, "tenants": tenants}.items():
        (folder / f"{what}.yaml").write_text(json.dumps({what: entries}))
    usual: dict[str, Any] = {"model": "there", "key_file": str(folder / "key"), "price": PRICE, "budget_per_hour": 100}
    usual |= {"timeout_s": TIMEOUT_S, "max_output_tokens": 100}
    providers = [{"name": name, "url": url, **usual} for name, url in urls.items()]
    config = router_config([], FleetPlan(pods=0, num_blocks=1))
    files = {what: str(folder / f"{what}.yaml") for what in ("names", "tenants")}
    return {**config, **files, "providers": providers, "log": {"requests": False}}


async def attack(router: RouterUrls, endless: int) -> list[str]:
    lines = list[str]()
    key = {"authorization": "Bearer key"}
    async with (
        httpx.AsyncClient(base_url=router.public, timeout=120, trust_env=False, headers=key) as client,
        httpx.AsyncClient(base_url=router.admin, timeout=120, trust_env=False) as admin,
    ):
        for name in SCRIPTS:
            if name == "good":
                continue
            memory = Memory(admin)
            before = await _metric(admin, "process_resident_memory_bytes")
            watching = asyncio.create_task(memory.watch())
            try:
                status, by, size, took_s = await ask(client, f"to-{name}")
                said = f"{status} from {by}, {size:,} bytes, {took_s:.1f} s"
            except httpx.HTTPError as error:
                said = repr(error)
            watching.cancel()
            more = max(memory.most_bytes - before, 0) / MIB
            money = await _metric(admin, f'warmroute_provider_money_total{{provider="{name}"}}')
            lines.append(f"{name}: {said}; {more:.0f} MiB more memory; money {money:.6f}")
        statuses = Counter[int]()
        before = await _metric(admin, "process_resident_memory_bytes")
        for number in range(endless):
            statuses[(await ask(client, f"to_{number}_{'x' * 200}"))[0]] += 1
        grown = (await _metric(admin, "process_resident_memory_bytes") - before) / MIB
        seen = "to_1" in (await admin.get("/metrics")).text
        lines.append(f"{endless} names that do not exist: {dict(statuses)}; {grown:.0f} MiB; in metrics: {seen}")
        for header in ("x-none", "x-beta", "x-warmroute-model", "x-gateway-model-name-rewrite"):
            lines.append(f"header {header}: {(await ask(client, 'ruled', **{header: '1'}))[:2]}")
    return lines


async def measure(endless: int) -> str:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(temporary_folder("warmroute-hostile-"))
        urls = {name: await stack.enter_async_context(standin(script)) for name, script in SCRIPTS.items()}
        router = await stack.enter_async_context(configured_router("router", config_of(urls, folder), folder))
        return "\n".join(await attack(router, endless))


def main(endless: Annotated[int, typer.Option(min=1, help="Names that do not exist.")] = 2000) -> None:
    """Print what each of them did."""
    print(asyncio.run(measure(endless)))


if __name__ == "__main__":
    typer.run(main)
