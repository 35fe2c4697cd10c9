"""What is in the cluster's index?

    warmroute index stats       how much there is, of which model, at which cost
    warmroute index holders     who is in it, how well, since when
    warmroute index lookup      which holder has how much of one prompt
    warmroute index verify      does the index say what the engines say

Only reads. Every command takes the routers' configuration.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from router.config.load import load
from router.config.schema import ModelConfig, RouterConfig
from router.engines.engine_catalog import ENGINES
from router.errors import ConfigError
from router.feeds.http_client import open_client
from router.index.holders import hashes_by_generation
from router.prompt.fingerprint import Fingerprinter
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import TokenizerSource, load_tokenizer
from router.publisher.verify import VerifyResult, verify_holder
from router.stores.index_reader import IndexReader
from router.stores.redis_connection import RedisClient, RedisConnection
from router.stores.redis_schema import HolderRow, Keys, scope_of
from router.types import Endpoint, Generation, InferenceRequest, PromptPrefix
from router.wiring.cluster_member import redis_address

ConfigOption = Annotated[Path, typer.Option(help="The routers' configuration, with index.redis.")]
RedisOption = Annotated[str | None, typer.Option(help="URL of the Redis, instead of index.redis.url.")]
ModelOption = Annotated[str | None, typer.Option(help="Only this model.")]

index_app = typer.Typer(no_args_is_help=True, help="Look into the cluster's index.")


@dataclass(frozen=True, slots=True)
class _Opened:
    """One Redis, open for a command."""

    config: RouterConfig
    connection: RedisConnection
    keys: Keys
    registry: IndexReader

    @property
    def client(self) -> RedisClient:
        return self.connection.client


@asynccontextmanager
async def _open(path: Path, url: str | None) -> AsyncIterator[_Opened]:
    config = load(path, RouterConfig)
    if config.index.redis is None and url is None:
        raise ConfigError(f"{path}: index.redis is missing; name the Redis there or with --redis")
    data: dict[str, Any] = config.index.redis.model_dump() if config.index.redis else {}
    given = RouterConfig.model_validate({"index": {"redis": {**data, **({"url": url} if url else {})}}}).index.redis
    assert given is not None
    connection = RedisConnection(redis_address(given), timeout_s=given.timeout_s)
    try:
        yield _Opened(config, connection, Keys(given.namespace), IndexReader(connection, Keys(given.namespace)))
    finally:
        await connection.close()


def _run(path: Path, url: str | None, command: Callable[[_Opened], Awaitable[int]]) -> None:
    async def running() -> int:
        async with _open(path, url) as opened:
            return await command(opened)

    try:
        code = asyncio.run(running())
    except (RedisError, OSError) as error:
        typer.echo(f"Redis does not answer: {error}. Is index.redis right, and does the server run?", err=True)
        code = 3
    raise typer.Exit(code)


async def _rows(opened: _Opened, model: str | None) -> list[tuple[Generation, str, HolderRow]]:
    found = []
    for generation in await opened.registry.generations():
        if model in (None, generation.model):
            rows = await opened.registry.rows(generation)
            found += [(generation, holder, row) for holder, row in sorted(rows.items())]
    return found


# --- stats ---


@index_app.command("stats")
def stats_command(config: ConfigOption, redis: RedisOption = None, model: ModelOption = None) -> None:
    """How much is in the index, of which generation, and what it costs the server."""
    _run(config, redis, lambda opened: _stats(opened, model))


async def _stats(opened: _Opened, model: str | None) -> int:
    rows = await _rows(opened, model)
    table = Table("model", "revision", "holders", "blocks", "log entries", "scope")
    for generation in dict.fromkeys(generation for generation, _, _ in rows):
        of = [row for each, _, row in rows if each == generation]
        scope = scope_of(generation)
        entries = await opened.client.xlen(opened.keys.log(scope))
        blocks = sum(sum(row.blocks) for row in of)
        table.add_row(generation.model, generation.revision, str(len(of)), f"{blocks:,}", f"{entries:,}", scope)
    Console().print(table)
    routers = await opened.client.hlen(opened.keys.routers)
    print(f"{routers} routers tell what they have in flight.{await _memory(opened)}")
    return 0


async def _memory(opened: _Opened) -> str:
    """The server's memory, where this user may ask."""
    try:
        info = await opened.client.info("memory")
    except RedisError:
        return ""
    used = info.get("used_memory_human")
    return f" The server uses {used}." if used else ""


# --- holders ---


@index_app.command("holders")
def holders_command(config: ConfigOption, redis: RedisOption = None, model: ModelOption = None) -> None:
    """Who is in the index: pods and stores, with what their publishers say of them."""
    _run(config, redis, lambda opened: _holders(opened, model))


async def _holders(opened: _Opened, model: str | None) -> int:
    table = Table("holder", "model", "what", "gpu", "cpu", "disk", "remote", "complete", "heard", "epoch since")
    now_s = time.time()
    for generation, holder, row in await _rows(opened, model):
        what = f"store for {row.facts.reach}" if row.facts.reach else row.facts.url
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.epoch / 1e6))
        name = f"{generation.model} {generation.revision}".strip()
        counts = (f"{blocks:,}" for blocks in row.blocks)
        complete = "yes" if row.complete else "[red]no[/red]"
        table.add_row(holder, name, what, *counts, complete, f"{max(now_s - row.beat_s, 0):.0f} s ago", since)
    Console().print(table)
    return 0


# --- lookup ---


@index_app.command("lookup")
def lookup_command(
    config: ConfigOption,
    model: Annotated[str, typer.Option(help="The model, as clients name it.")],
    prompt: Annotated[str, typer.Option(help="The prompt: one user message, or with --completion as it is.")],
    redis: RedisOption = None,
    completion: Annotated[bool, typer.Option(help="Take the prompt as that of a completion.")] = False,
) -> None:
    """Which holder has how much of a prompt, as the routers would find it."""
    chat = {"messages": [{"role": "user", "content": prompt}]}
    request = InferenceRequest(
        id="lookup",
        endpoint=Endpoint.COMPLETIONS if completion else Endpoint.CHAT,
        model=model,
        body=b"",
        prompt={"prompt": prompt} if completion else chat,
    )
    _run(config, redis, lambda opened: _lookup(opened, request))


async def _lookup(opened: _Opened, request: InferenceRequest) -> int:
    prefix = _fingerprint(opened.config, request)
    table = Table("holder", "revision", "blocks", "gpu", "cpu", "disk", "remote")
    for generation, hashes in hashes_by_generation(prefix, await opened.registry.generations()):
        for holder, row in sorted((await opened.registry.rows(generation)).items()):
            run = await opened.registry.leading_run(generation, holder, row, hashes)
            if any(run):
                table.add_row(holder, generation.revision, str(sum(run)), *map(str, run))
    print(f"{prefix.token_count} tokens, {len(prefix.hashes)} blocks of {prefix.block_size_tokens}")
    if not table.rows:
        print("Nobody holds the first block. `warmroute index holders` shows who publishes, and for which tokenizer.")
        return 1
    Console().print(table)
    return 0


def _fingerprint(config: RouterConfig, request: InferenceRequest) -> PromptPrefix:
    model = next((each for each in config.models if each.name == request.model), None)
    if model is None or model.tokenizer in (None, "engine"):
        known = ", ".join(each.name for each in config.models if each.tokenizer not in (None, "engine"))
        raise ConfigError(f"no model {request.model!r} with a tokenizer of its own is configured; there are: {known}")
    return _fingerprinter(model).fingerprint(request)


def _fingerprinter(model: ModelConfig) -> Fingerprinter:
    assert model.tokenizer is not None
    tokenizer = load_tokenizer(TokenizerSource(model.tokenizer, model.chat_template), fast=False)
    template = None
    if tokenizer.chat_template:
        template = ChatTemplate(tokenizer, None, model.chat_template_content_format, model.chat_template_kwargs)
    generation = Generation(
        model=model.name,
        revision=model.revision,
        kv_dtype=model.kv_dtype,
        block_size_tokens=model.block_size_tokens,
    )
    return Fingerprinter(tokenizer, template, replace(generation, tokenizer=tokenizer.fingerprint))


# --- verify ---


@index_app.command("verify")
def verify_command(config: ConfigOption, redis: RedisOption = None, model: ModelOption = None) -> None:
    """Compare the index with what the engines' replays say; exit code 1 if anything differs."""
    _run(config, redis, lambda opened: _verify(opened, model))


async def _verify(opened: _Opened, model: str | None) -> int:
    async with open_client() as client:
        verdicts = [
            await verify_holder(opened.registry, client, generation, holder, _engine(row))
            for generation, holder, row in await _rows(opened, model)
        ]
    table = Table("holder", "in the index", "announced", "missing", "stale", "verdict")
    for verdict in verdicts:
        stale = "unknown" if verdict.stale is None else f"{verdict.stale:,}"
        counts = (f"{count:,}" for count in (verdict.indexed, verdict.announced, verdict.missing))
        table.add_row(verdict.holder, *counts, stale, _word(verdict))
    Console().print(table)
    return 0 if all(verdict.agrees or verdict.note for verdict in verdicts) else 1


def _engine(row: HolderRow) -> str:
    return row.facts.source if row.facts.source in ENGINES else "vllm"


def _word(verdict: VerifyResult) -> str:
    if verdict.note:
        return f"[yellow]{verdict.note}[/yellow]"
    if not verdict.agrees:
        return "[red]differs[/red]"
    return "agrees" if verdict.stale is not None else "agrees, as far as the engine remembers"
