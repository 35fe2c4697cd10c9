"""`warmroute publish`: starts a publisher.

Reads the routers' configuration: models, pods, index.redis. Options override it, so that all sidecars can share a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn
from starlette.types import ASGIApp

from router.cli.options import configured
from router.config.load import load, validate_options
from router.config.models import with_model_folders
from router.config.router_file import MistakeList, check_keys, with_redis_url
from router.config.schema import Limits, RouterConfig
from router.errors import ConfigError
from router.frontends.http.http_edge import HttpEdge
from router.frontends.http.protocol import EdgeProtocol
from router.observe.log import configure_logging
from router.wiring.publisher_process import PublisherProcess, generation_of

SERVER: Mapping[str, Any] = {
    "loop": "uvloop",
    "http": EdgeProtocol,
    "ws": "none",
    "access_log": False,
    "log_config": None,
    "server_header": False,
    "timeout_graceful_shutdown": 2,
}
"""uvicorn's settings for the publisher's port."""


def publish_command(
    config: Annotated[Path, typer.Option(help="router.yaml: models, index.redis, and pods unless --pod is given.")],
    pod: Annotated[
        list[str] | None, typer.Option(help="URL of a pod. Can be repeated.", show_default="pods in --config")
    ] = None,
    engine: Annotated[str, typer.Option(help="Engine of the pods: vllm or sglang.")] = "vllm",
    advertise: Annotated[
        str | None, typer.Option(help="URL that routers use for the pod; for a single --pod.", show_default="--pod")
    ] = None,
    redis: Annotated[
        str | None, typer.Option(help="URL of the Redis.", show_default="index.redis.url in --config")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on.", show_default=configured("publish.host"))
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on.", show_default=configured("publish.port"))
    ] = None,
) -> None:
    """Publish until SIGTERM, then remove the holders from the index."""
    loaded = with_model_folders(load(config, RouterConfig))
    mistakes = MistakeList(config)
    check_keys(mistakes, loaded)
    mistakes.report()
    chosen = _with_options(
        loaded,
        pods=[{"url": url, "engine": engine, "advertised_url": advertise} for url in pod or []],
        redis=redis,
        publish={"host": host, "port": port},
    )
    configure_logging(chosen.log.format, chosen.log.level)
    process = PublisherProcess(
        chosen, {model.name: generation_of(model) for model in chosen.models if not model.is_pattern}
    )
    uvicorn.run(bounded(process.app, chosen.limits), host=chosen.publish.host, port=chosen.publish.port, **SERVER)


def bounded(app: ASGIApp, limits: Limits) -> HttpEdge:
    """The application behind the limits of a listener."""
    return HttpEdge(limits, app)


def _with_options(
    config: RouterConfig, *, pods: list[dict[str, Any]], redis: str | None, publish: dict[str, Any]
) -> RouterConfig:
    if len(pods) > 1 and any(pod["advertised_url"] for pod in pods):
        raise ConfigError("--advertise needs a single --pod; for several, set pods[].advertised_url in --config")
    data: dict[str, Any] = with_redis_url(config, redis).model_dump()
    auth = {pod["url"]: pod["auth"] for pod in data["pods"]}
    own = [{**pod, "auth": auth.get(pod["advertised_url"]) or auth.get(pod["url"])} for pod in pods]
    data["pods"] = own or data["pods"]
    data["publish"] |= {name: value for name, value in publish.items() if value is not None}
    return validate_options(RouterConfig, data)
