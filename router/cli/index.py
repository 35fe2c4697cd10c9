"""Inspect the cluster index: reads Redis as routers do."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer
from redis.exceptions import RedisError
from rich.console import Console
from rich.text import Text

from router.cli.terminal import folded_table, printable
from router.config.index_schema import RedisIndex
from router.config.load import load
from router.config.router_file import with_redis_url
from router.config.schema import RouterConfig
from router.errors import ConfigError
from router.stores.index_reader import IndexReader
from router.stores.redis_connection import RedisConnection, redis_error_text
from router.stores.redis_schema import HolderRow, Keys
from router.types import Generation, Tier
from router.wiring.cluster_member import redis_address

ConfigOption = Annotated[Path, typer.Option(help="The routers' configuration, with index.redis.")]
RedisOption = Annotated[str | None, typer.Option(help="URL of the Redis.", show_default="index.redis.url in --config")]
ModelOption = Annotated[str | None, typer.Option(help="Only this model.", show_default="all models")]

index_app = typer.Typer(no_args_is_help=True, help="Inspect the cluster index.")


@index_app.callback()
def _only_groups_commands() -> None: ...


@index_app.command("holders")
def holders_command(config: ConfigOption, redis: RedisOption = None, model: ModelOption = None) -> None:
    """List holders (pods and stores) with their blocks and state. Exit code 1 if there are none."""
    given = with_redis_url(load(config, RouterConfig), redis).index.redis
    if given is None:
        raise ConfigError(f"{config}: index.redis is missing; configure it or pass --redis")
    try:
        code = asyncio.run(_holders(given, model))
    except (RedisError, OSError) as error:
        typer.echo(
            f"Redis does not answer: {redis_error_text(error)}. Check index.redis and that the server is running.",
            err=True,
        )
        code = 3
    raise typer.Exit(code)


async def _holders(redis: RedisIndex, model: str | None) -> int:
    now_s = time.time()
    columns = "holder, model, address", "blocks", "complete", "heartbeat", "cache since"
    table = folded_table(*columns, show_lines=True)
    connection = RedisConnection(redis_address(redis), timeout_s=redis.timeout_s)
    try:
        reader = IndexReader(connection, Keys(redis.namespace))
        for generation in await reader.generations():
            if model in (None, generation.model):
                for holder, row in sorted((await reader.rows(generation)).items()):
                    table.add_row(*_cells(generation, holder, row, now_s))
    finally:
        await connection.close()
    if not table.rows:
        of_model = f" of model {model!r}" if model else ""
        print(f"No holders{of_model} in the index (namespace {redis.namespace!r}). Does `warmroute publish` run?")
        return 1
    Console().print(table)
    return 0


def _cells(generation: Generation, holder: str, row: HolderRow, now_s: float) -> tuple[str | Text, ...]:
    address = f"store for {row.facts.reach}" if row.facts.reach else row.facts.url
    started = time.strftime("%Y-%m-%d\n%H:%M:%S", time.localtime(row.epoch / 1e6))
    name = f"{generation.model} {generation.revision}".strip()
    complete = "yes" if row.complete else "[red]no[/red]"
    names = Text("\n").join(map(printable, (holder, name, address)))
    return names, _blocks(row), complete, f"{max(now_s - row.beat_s, 0):.0f} s ago", started


def _blocks(row: HolderRow) -> str:
    """The blocks of each tier that has any."""
    held = (f"{tier.name.lower()} {blocks:,}" for tier, blocks in zip(Tier, row.blocks, strict=True) if blocks)
    return "\n".join(held) or "0"
