"""How is a publisher started?

Reads the same configuration as the routers: models, pods, index.redis. Options win over the file, so that one file
serves a fleet of sidecars.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn

from router.config.load import load
from router.config.schema import RouterConfig
from router.errors import ConfigError
from router.observe.log import configure_logging
from router.wiring.agent import Agent, generation_of


def publish_command(
    config: Annotated[Path, typer.Option(help="router.yaml: models, index.redis, and pods unless --pod is given.")],
    pod: Annotated[list[str] | None, typer.Option(help="URL of a pod; may be given several times.")] = None,
    engine: Annotated[str, typer.Option(help="What runs there: vllm or sglang.")] = "vllm",
    advertise: Annotated[str | None, typer.Option(help="The URL under which routers know the (one) pod.")] = None,
    redis: Annotated[str | None, typer.Option(help="URL of the Redis to publish into.")] = None,
    host: Annotated[str | None, typer.Option()] = None,
    port: Annotated[int | None, typer.Option()] = None,
) -> None:
    """Publish until SIGTERM, then leave the index."""
    chosen = _with_options(
        load(config, RouterConfig),
        pods=[{"url": url, "engine": engine, "advertised_url": advertise} for url in pod or []],
        redis=redis,
        publish={"host": host, "port": port},
    )
    configure_logging(chosen.log.format)
    agent = Agent(chosen, {model.name: generation_of(model) for model in chosen.models})
    uvicorn.run(
        agent.app,
        host=chosen.publish.host,
        port=chosen.publish.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=2,
    )


def _with_options(
    config: RouterConfig, *, pods: list[dict[str, Any]], redis: str | None, publish: dict[str, Any]
) -> RouterConfig:
    if len(pods) > 1 and any(pod["advertised_url"] for pod in pods):
        raise ConfigError("--advertise is for one pod; name several under pods[] with advertised_url each")
    data: dict[str, Any] = config.model_dump()
    data["pods"] = pods or data["pods"]
    if redis is not None:
        data["index"]["redis"] = {**(data["index"]["redis"] or {}), "url": redis}
    data["publish"] |= {name: value for name, value in publish.items() if value is not None}
    return RouterConfig.model_validate(data)
