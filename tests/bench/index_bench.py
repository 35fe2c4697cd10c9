"""Cost of the cluster index, compared with the peers' design of one command per block.

    python tests/bench/index_bench.py [--server valkey|redis] [--holders 1000000,10000000] [--blocks 400000]

Ingest: one agent process hashes engine events and publishes them, one replica process applies them, through a real
server. Lookup: a prompt of 512 blocks among `--holders` (block, holder) pairs of 50 holders. CPU is that of the
process; medians of several runs on one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from router.config.index_schema import Publish
from router.feeds.kv_redis import IndexFeed
from router.hashing import token_array
from router.index.cluster import ClusterIndex, EntryKind, LogEntry
from router.index.holder_blocks import HolderBlocks
from router.index.holders import HolderFacts
from router.index.layers import HitRule
from router.index.masks import HolderMasks
from router.publisher.published_holder import PublishedHolder
from router.stores.holder_writer import HolderWriter, WriteResult
from router.stores.index_reader import IndexReader
from router.stores.prefix_store import ReplicaStore
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys
from router.types import AttentionKind, BlockChange, BlocksStored, Generation, LayerType, PromptPrefix, Tier
from tests.kit.scenes import make_pod
from tests.redis_process import RedisProcess, address_of, redis_process

GENERATION = Generation(model="bench", block_size_tokens=16)
BLOCKS = 512
SHARED = 64
HOLDERS = 50
LOOKUPS = 400
EVENT_BLOCKS = 64
PEER_PIPELINE = 512


# --- ingest -------------------------------------------------------------------------------------------------


def events(blocks: int) -> Iterator[BlocksStored]:
    """Prompts of 64 fresh blocks, as an engine announces them."""
    rng = np.random.default_rng(1)
    for first in range(0, blocks, EVENT_BLOCKS):
        tokens = token_array(rng.integers(0, 150_000, EVENT_BLOCKS * 16).tolist())
        names = tuple(range(first + 1, first + 1 + EVENT_BLOCKS))
        yield BlocksStored(block_hashes=names, parent_hash=None, tokens=tokens, block_size_tokens=16)


async def agent(url: str, blocks: int) -> dict[str, float]:
    """Publish as `warmroute publish` does, as fast as it goes."""
    connection = RedisConnection(address_of(url, timeout_s=5))
    writer = HolderWriter(connection, Keys(), GENERATION, "pod", 300)
    settings = Publish(flush_interval_ms=2.0)
    holder = PublishedHolder(writer, HolderFacts(url="http://pod"), settings)
    made = list(events(blocks))
    holder.caught_up(complete=True)
    running = asyncio.create_task(holder.run())
    await asyncio.sleep(0.2)
    started_s, cpu_s = time.time(), time.process_time()
    for number, event in enumerate(made):
        holder.apply([event])
        if number % 16 == 15:
            await asyncio.sleep(0)
    while holder.pending_blocks or holder.written_blocks < blocks:
        await asyncio.sleep(0.001)
    running.cancel()
    return {"started_s": started_s, "ended_s": time.time(), "cpu_s": time.process_time() - cpu_s}


async def replica(url: str, blocks: int) -> dict[str, float]:
    """Follow until all blocks are here."""
    index = ClusterIndex(holder_ttl_s=60)
    feed = IndexFeed(
        IndexReader(RedisConnection(address_of(url, timeout_s=5)), Keys()),
        ReplicaStore(index, max_age_s=60),
        lambda generation: True,
    )
    running = asyncio.create_task(feed.run())
    cpu_s = 0.0
    while index.masks.block_holders < blocks:
        cpu_s = cpu_s or (time.process_time() if index.masks.block_holders else 0.0)
        await asyncio.sleep(0.001)
    spent = {"ended_s": time.time(), "cpu_s": time.process_time() - cpu_s}
    running.cancel()
    return spent


async def peer_agent(url: str, blocks: int, pipeline: int) -> dict[str, float]:
    """The peers' design, one command per block: each awaited, or those of an event in one round trip. A stream entry
    notifies replicas; hashing and accounting are ours."""
    redis = RedisConnection(address_of(url, timeout_s=5)).client
    account, made = HolderBlocks(GENERATION), list(events(blocks))
    await asyncio.sleep(0.5)  # the replica is up
    started_s, cpu_s = time.time(), time.process_time()
    batch = redis.pipeline(transaction=False)
    for event in made:
        for change in account.apply(event):
            for block in change.blocks:
                if pipeline == 1:
                    await redis.xadd("log", {"pod@gpu": block})
                    continue
                batch.xadd("log", {"pod@gpu": block})
                if len(batch) >= pipeline:
                    await batch.execute()
    if len(batch):
        await batch.execute()
    return {"started_s": started_s, "ended_s": time.time(), "cpu_s": time.process_time() - cpu_s}


async def peer_replica(url: str, blocks: int) -> dict[str, float]:
    """Apply the peers' entries, one block each."""
    redis, masks, after = RedisConnection(address_of(url, timeout_s=10)).client, HolderMasks(), b"0"
    cpu_s = 0.0
    while masks.block_holders < blocks:
        answer = await redis.xread({"log": after}, count=4096, block=5000)
        cpu_s = cpu_s or time.process_time()
        for entry_id, fields in answer[0][1] if answer else ():
            masks.add("pod", [int(fields[b"pod@gpu"])])
            after = entry_id
    return {"ended_s": time.time(), "cpu_s": time.process_time() - cpu_s}


ROLES: dict[str, Callable[[str, int], Coroutine[Any, Any, dict[str, float]]]] = {
    "agent": agent,
    "replica": replica,
    "peer-event": partial(peer_agent, pipeline=EVENT_BLOCKS),
    "peer-1": partial(peer_agent, pipeline=1),
    "peer-replica": peer_replica,
}


def child(role: str, url: str, blocks: int) -> subprocess.Popen[str]:
    """This file again, as another process."""
    command = [sys.executable, __file__, "--role", role, "--url", url, "--blocks", str(blocks)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."})


def result(process: subprocess.Popen[str]) -> dict[str, float]:
    """What it measured."""
    output, _ = process.communicate(timeout=60)
    measured: dict[str, float] = json.loads(output.splitlines()[-1])
    return measured


def ingest(server: str, blocks: int) -> list[tuple[str, float, float, float]]:
    """(way, blocks/s, agent us a block, replica us a block)."""
    ways = (
        ("warmroute", "agent", "replica", blocks),
        ("a command a block, an event a round trip", "peer-event", "peer-replica", blocks // 4),
        ("a command a block, each awaited", "peer-1", "peer-replica", blocks // 20),
    )
    rows = []
    for way, writer, reader, some in ways:
        with redis_process(server) as redis:
            reading, writing = child(reader, redis.url, some), child(writer, redis.url, some)
            wrote, read = result(writing), result(reading)
        rate = some / (max(read["ended_s"], wrote["ended_s"]) - wrote["started_s"])
        rows.append((way, rate, wrote["cpu_s"] / some * 1e6, read["cpu_s"] / some * 1e6))
    return rows


# --- lookup -------------------------------------------------------------------------------------------------


async def fill(redis: RedisProcess, block_holders: int) -> list[array[int]]:
    """50 holders: 64 blocks that all have, conversations of 448 more that one or two have. Returns prompts."""
    rng, pick = np.random.default_rng(2), random.Random(2)
    shared = rng.integers(1, 2**63, SHARED, dtype=np.uint64)
    connection = RedisConnection(address_of(redis.url, timeout_s=10))
    held: list[list[Any]] = [[shared] for _ in range(HOLDERS)]
    tails = []
    for _ in range((block_holders - SHARED * HOLDERS) // 448):
        tails.append(rng.integers(1, 2**63, 448, dtype=np.uint64))
        held[pick.randrange(HOLDERS)].append(tails[-1])
    for number, pieces in enumerate(held):
        writer = HolderWriter(connection, Keys(), GENERATION, f"pod{number}", 3600)
        await writer.begin(EntryKind.EMPTY, HolderFacts(url=f"http://pod{number}"), take_over=True)
        for piece in np.array_split(np.concatenate(pieces), max(sum(map(len, pieces)) // 4096, 1)):
            answer = await writer.apply([BlockChange(Tier.GPU, True, piece.tolist())], complete=True)
            assert answer is WriteResult.OK
        await writer.beat(complete=True)
    return [array("Q", np.concatenate([shared, pick.choice(tails)]).tobytes()) for _ in range(LOOKUPS)]


def bind_all(store: ReplicaStore) -> None:
    """The router's pods are the holders."""
    for number in range(HOLDERS):
        store.add_holder(make_pod(f"pod{number}"), GENERATION)


async def timed(lookup: Callable[[array[int]], Awaitable[Any]], prompts: list[array[int]]) -> tuple[float, float]:
    """Median wall and mean CPU of one lookup, microseconds."""
    walls, cpu_s = [], time.process_time()
    for prompt in prompts:
        began_s = time.perf_counter()
        await lookup(prompt)
        walls.append(time.perf_counter() - began_s)
    return statistics.median(walls) * 1e6, (time.process_time() - cpu_s) / len(prompts) * 1e6


async def lookups(redis: RedisProcess, block_holders: int) -> list[tuple[str, float, float]]:
    """(way, median wall us, CPU us)."""
    prompts = await fill(redis, block_holders)
    connection = RedisConnection(address_of(redis.url, timeout_s=30))
    reader, rows = IndexReader(connection, Keys()), []
    empty = token_array()

    async def ask(store: ReplicaStore, prompt: array[int]) -> None:
        match = store.match(PromptPrefix(GENERATION, empty, prompt), 0.0)
        assert not match.degraded and len(match.blocks) == HOLDERS

    copy = ReplicaStore(ClusterIndex(holder_ttl_s=3600), max_age_s=1e9)
    bind_all(copy)
    feed, began_s = IndexFeed(reader, copy, lambda generation: True), time.perf_counter()
    running = asyncio.create_task(feed.run())
    await feed.loaded.wait()
    loading_s = time.perf_counter() - began_s
    running.cancel()
    copy.mark_current(0.0)
    rows.append(("replica", *await timed(lambda prompt: ask(copy, prompt), prompts)))
    server_bytes = (await connection.client.info("memory"))["used_memory"]
    print(
        f"{block_holders:,} pairs: copied in {loading_s:.1f} s; bytes a pair: replica "
        f"{copy.index.masks.bytes / block_holders:.1f}, server with log {server_bytes / block_holders:.1f}"
    )
    rows += await typed_lookups(prompts)
    rows += await peers_lookups(connection.client, prompts[:40])
    return rows


def typed_replica(prompts: list[array[int]], *, has_window: bool) -> ReplicaStore:
    """All prompts on all holders; with a window of 128 tokens, which is kept at the end of each."""
    full, window = LayerType(AttentionKind.FULL, 16), LayerType(AttentionKind.WINDOW, 16, 128)
    rule = HitRule.of([full, window], groups=2) if has_window else None
    store = ReplicaStore(ClusterIndex(holder_ttl_s=3600), max_age_s=1e9)
    bind_all(store)
    for holder in (f"pod{number}" for number in range(HOLDERS)):
        facts = HolderFacts(url=f"http://{holder}", rule=rule)
        store.index.apply(GENERATION, LogEntry(kind=EntryKind.EMPTY, holder=holder, epoch=1, facts=facts), 0.0)
        for seq, prompt in enumerate(prompts, start=1):
            changes = [BlockChange(Tier.GPU, True, prompt)]
            if has_window:
                changes.append(BlockChange(Tier.GPU, True, prompt[-window.needed_blocks :], 1))
            entry = LogEntry(kind=EntryKind.CHANGE, holder=holder, epoch=1, seq=seq, changes=changes)
            store.index.apply(GENERATION, entry, 0.0)
    store.mark_current(0.0)
    return store


async def typed_lookups(prompts: list[array[int]]) -> list[tuple[str, float, float]]:
    """The same prompts where layers are of one type, and of two: by turns, the medians of several runs."""
    rows = []
    stores = {"replica, one type": typed_replica(prompts, has_window=False)}
    stores["replica, two types"] = typed_replica(prompts, has_window=True)
    tokens = token_array([0] * (BLOCKS * 16 + 1))

    async def ask(store: ReplicaStore, prompt: array[int]) -> None:
        found = store.match(PromptPrefix(GENERATION, tokens, prompt), 0.0).blocks
        assert len(found) == HOLDERS and set(found.values()) == {(BLOCKS, 0, 0, 0)}

    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in stores}
    for _ in range(9):
        for name, store in stores.items():
            runs[name].append(await timed(partial(ask, store), prompts))
    for name, store in stores.items():
        rows.append((name, *map(statistics.median, zip(*runs[name], strict=True))))
        print(f"{name}: {store.index.masks.bytes / len(set().union(*prompts)):.1f} bytes a block of {HOLDERS} holders")
    return rows


async def peers_lookups(redis: Any, prompts: list[array[int]]) -> list[tuple[str, float, float]]:
    """HKEYS a block over the prompts' blocks alone: all in one pipeline, or one after the other."""
    for prompt in prompts:
        batch = redis.pipeline(transaction=False)
        for block in prompt:
            batch.hset(f"b:{block}", "pod@gpu", "")
        await batch.execute()

    async def pipelined(prompt: array[int]) -> None:
        batch = redis.pipeline(transaction=False)
        for block in prompt:
            batch.hkeys(f"b:{block}")
        assert all(await batch.execute())

    async def awaited(prompt: array[int]) -> None:
        for block in prompt:
            assert await redis.hkeys(f"b:{block}")

    return [
        ("HKEYS a block, one pipeline", *await timed(pipelined, prompts)),
        ("HKEYS a block, each awaited", *await timed(awaited, prompts)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="valkey")
    parser.add_argument("--holders", default="1000000,10000000")
    parser.add_argument("--blocks", type=int, default=400_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--role", choices=ROLES)
    parser.add_argument("--url", default="")
    args = parser.parse_args()
    if args.role:
        print(json.dumps(asyncio.run(ROLES[args.role](args.url, args.blocks))))
        return
    console = Console()
    runs = [ingest(args.server, args.blocks) for _ in range(args.runs)]
    table = Table("ingest", "blocks/s", "publisher us/block", "replica us/block", title=args.server)
    for same in zip(*runs, strict=True):
        names, *figures = zip(*same, strict=True)
        table.add_row(str(names[0]), *(f"{statistics.median(map(float, figure)):,.1f}" for figure in figures))
    console.print(table)
    for block_holders in map(int, args.holders.split(",")):
        table = Table(f"512 blocks of {block_holders:,}", "median us", "CPU us")
        with redis_process(args.server) as redis:
            for way, wall_us, cpu_us in asyncio.run(lookups(redis, block_holders)):
                table.add_row(way, f"{wall_us:,.0f}", f"{cpu_us:,.0f}")
        console.print(table)


if __name__ == "__main__":
    main()
