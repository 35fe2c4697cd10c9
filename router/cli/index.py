"""Inspect the cluster index. All commands only read, and take the routers' configuration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from redis.exceptions import RedisError
from rich.console import Console
from rich.text import Text

from router.cli.options import flag
from router.cli.terminal import folded_table, printable
from router.config.load import ENGINE_TOKENIZER, load
from router.config.model_names import ModelNames, with_model_folders
from router.config.router_file import with_redis_url
from router.config.schema import RouterConfig
from router.errors import ConfigError
from router.index.holders import hashes_by_generation
from router.prompt.fingerprint import Fingerprinter
from router.stores.index_reader import IndexReader
from router.stores.redis_connection import RedisConnection, redis_error_text
from router.stores.redis_schema import HolderRow, Keys, scope_of
from router.types import Endpoint, Generation, InferenceRequest, Tier
from router.wiring.cluster_member import redis_address
from router.wiring.prompts import fingerprinter, source_of
from router.wiring.tokenizer_files import load_tokenizer

ConfigOption = Annotated[Path, typer.Option(help="The routers' configuration, with index.redis.")]
RedisOption = Annotated[str | None, typer.Option(help="URL of the Redis.", show_default="index.redis.url in --config")]
ModelOption = Annotated[str | None, typer.Option(help="Only this model.", show_default="all models")]

index_app = typer.Typer(no_args_is_help=True, help="Inspect the cluster index.")


@dataclass(frozen=True, slots=True)
class _Index:
    config: RouterConfig
    connection: RedisConnection
    keys: Keys
    reader: IndexReader

    async def rows(self, model: str | None) -> list[tuple[Generation, str, HolderRow]]:
        found = []
        for generation in await self.reader.generations():
            if model in (None, generation.model):
                rows = await self.reader.rows(generation)
                found += [(generation, holder, row) for holder, row in sorted(rows.items())]
        return found


@asynccontextmanager
async def _open(path: Path, url: str | None) -> AsyncIterator[_Index]:
    config = with_redis_url(load(path, RouterConfig), url)
    redis = config.index.redis
    if redis is None:
        raise ConfigError(f"{path}: index.redis is missing; configure it or pass --redis")
    connection, keys = RedisConnection(redis_address(redis), timeout_s=redis.timeout_s), Keys(redis.namespace)
    try:
        yield _Index(config, connection, keys, IndexReader(connection, keys))
    finally:
        await connection.close()


def _run(path: Path, url: str | None, command: Callable[[_Index], Awaitable[int]]) -> None:
    async def running() -> int:
        async with _open(path, url) as index:
            return await command(index)

    try:
        code = asyncio.run(running())
    except (RedisError, OSError) as error:
        typer.echo(
            f"Redis does not answer: {redis_error_text(error)}. Check index.redis and that the server is running.",
            err=True,
        )
        code = 3
    raise typer.Exit(code)


# --- stats ---


@index_app.command("stats")
def stats_command(config: ConfigOption, redis: RedisOption = None, model: ModelOption = None) -> None:
    """Show holders, blocks and log entries by generation, and the server's memory."""
    _run(config, redis, lambda index: _stats(index, model))


async def _stats(index: _Index, model: str | None) -> int:
    rows = await index.rows(model)
    table = folded_table("model", "revision", "holders", "blocks", "log entries", "scope", show_lines=True)
    for generation in dict.fromkeys(generation for generation, _, _ in rows):
        own = [row for each, _, row in rows if each == generation]
        scope = scope_of(generation)
        entries = await index.connection.client.xlen(index.keys.log(scope))
        blocks = sum(sum(row.blocks) for row in own)
        table.add_row(generation.model, generation.revision, str(len(own)), f"{blocks:,}", f"{entries:,}", scope)
    Console().print(table)
    routers = await index.connection.client.hlen(index.keys.routers)
    print(f"{routers} routers share their requests in flight.{await _memory(index)}")
    return 0


async def _memory(index: _Index) -> str:
    """The server's memory, if this user may read it."""
    try:
        info = await index.connection.client.info("memory")
    except RedisError:
        return ""
    used = info.get("used_memory_human")
    return f" Memory of the server: {used}." if used else ""


# --- holders ---


@index_app.command("holders")
def holders_command(config: ConfigOption, redis: RedisOption = None, model: ModelOption = None) -> None:
    """List holders (pods and stores) with their blocks and state. Exit code 1 if there are none."""
    _run(config, redis, lambda index: _holders(index, model))


async def _holders(index: _Index, model: str | None) -> int:
    rows = await index.rows(model)
    if not rows:
        return _print_empty(index, model)
    now_s = time.time()
    columns = "holder, model, address", "blocks", "complete", "heartbeat", "epoch started"
    table = folded_table(*columns, show_lines=True)
    for generation, holder, row in rows:
        address = f"store for {row.facts.reach}" if row.facts.reach else row.facts.url
        started = time.strftime("%Y-%m-%d\n%H:%M:%S", time.localtime(row.epoch / 1e6))
        name = f"{generation.model} {generation.revision}".strip()
        complete = "yes" if row.complete else "[red]no[/red]"
        names = Text("\n").join(map(printable, (holder, name, address)))
        table.add_row(names, _blocks(row), complete, f"{max(now_s - row.beat_s, 0):.0f} s ago", started)
    Console().print(table)
    return 0


def _blocks(row: HolderRow) -> str:
    """The blocks of each tier that has any."""
    held = (f"{tier.name.lower()} {blocks:,}" for tier, blocks in zip(Tier, row.blocks, strict=True) if blocks)
    return "\n".join(held) or "0"


def _print_empty(index: _Index, model: str | None) -> int:
    of_model = f" of model {model!r}" if model else ""
    print(f"No holders{of_model} in the index (namespace {index.keys.namespace!r}). Does `warmroute publish` run?")
    return 1


# --- lookup ---


@index_app.command("lookup")
def lookup_command(
    config: ConfigOption,
    model: Annotated[str, typer.Option(help="The model, as clients name it.")],
    prompt: Annotated[str, typer.Option(help="A user message, or with --completion a completion prompt.")],
    redis: RedisOption = None,
    completion: Annotated[bool, flag("--completion", "Treat the prompt as a completion prompt.")] = False,
) -> None:
    """Show how many blocks of a prompt each holder has, matched as routers do."""
    chat = {"messages": [{"role": "user", "content": prompt}]}
    request = InferenceRequest(
        id="lookup",
        endpoint=Endpoint.COMPLETIONS if completion else Endpoint.CHAT,
        model=model,
        body=b"",
        prompt={"prompt": prompt} if completion else chat,
    )
    _run(config, redis, lambda index: _lookup(index, request))


async def _lookup(index: _Index, request: InferenceRequest) -> int:
    prefix = _fingerprinter(index.config, request.model).fingerprint(request)
    table = folded_table("holder", "revision", "blocks", "gpu", "cpu", "disk", "remote", show_lines=True)
    for generation, hashes in hashes_by_generation(prefix, await index.reader.generations()):
        for holder, row in sorted((await index.reader.rows(generation)).items()):
            run = await index.reader.leading_run(generation, holder, row, hashes)
            if any(run):
                table.add_row(printable(holder), generation.revision, str(sum(run)), *map(str, run))
    print(f"{prefix.token_count} tokens, {len(prefix.hashes)} blocks of {prefix.block_size_tokens}")
    if not table.rows:
        print("No holder has the first block. `warmroute index holders` lists all holders and their models.")
        return 1
    Console().print(table)
    return 0


def _fingerprinter(config: RouterConfig, name: str) -> Fingerprinter:
    model = ModelNames(with_model_folders(config).models).get(name)
    if model is None or model.tokenizer in (None, ENGINE_TOKENIZER):
        known = ", ".join(model.name for model in config.models if model.tokenizer not in (None, ENGINE_TOKENIZER))
        raise ConfigError(f"model {name!r} is not configured with a local tokenizer; known: {known}")
    return fingerprinter(model, load_tokenizer(source_of(model), fast=False))
