"""How is the router started?

Reads configuration and policies, builds the program, hands it to uvicorn. Options win over the file.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn

from router.api.protocol import EdgeProtocol
from router.api.server import DrainingServer
from router.cli.open_files import allow_all_open_files
from router.config.links import load_link_classes
from router.config.load import load
from router.config.named import check_names
from router.config.priors import all_priors
from router.config.schema import RouterConfig
from router.config.shipped import shipped
from router.observe.log import configure_logging
from router.wiring import build

STARTUP_FAILURE = 3
"""Exit code, as uvicorn has it."""

YOUNG_OBJECTS, YOUNG_SEARCHES, MIDDLE_SEARCHES = 2_000, 10, 100
"""How many more container objects than before until the youngest are searched for cycles, how many such searches until
those that outlived one are searched as well, and how many of these until all are. Nobody is served meanwhile: at 20,000
a search takes 10 to 25 ms, at 2,000 mostly one or two. Python's own 700 is less than a few requests make."""


def serve_command(
    config: Annotated[Path | None, typer.Option(help="router.yaml; see `warmroute config show`.")] = None,
    policy: Annotated[str | None, typer.Option(help="A policy by name.")] = None,
    policies: Annotated[Path | None, typer.Option(help="Folder of policies, reloaded when it changes.")] = None,
    host: Annotated[str | None, typer.Option()] = None,
    port: Annotated[int | None, typer.Option()] = None,
    pod: Annotated[list[str] | None, typer.Option(help="URL of a pod; may be given several times.")] = None,
) -> None:
    """Serve until SIGTERM; running answers may finish."""
    given = load(config, RouterConfig) if config else RouterConfig()
    chosen = _with_options(given, policy=policy, host=host, port=port, pods=pod or [])
    configure_logging(chosen.log_format)
    priors = all_priors(chosen.priors)
    if config:
        check_names(config, given, priors, load_link_classes(shipped("config") / "hardware" / "links.yaml"))
    app = build(chosen, policies or shipped("policies"), priors)
    _spare_the_collector()
    allow_all_open_files()
    settings = uvicorn.Config(
        app,
        host=chosen.listen.host,
        port=chosen.listen.port,
        loop="uvloop",
        http=EdgeProtocol,
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=ceil(chosen.limits.drain_timeout_s),
    )
    server = DrainingServer(settings, delay_s=chosen.limits.drain_delay_s)
    with suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        raise typer.Exit(STARTUP_FAILURE)


def _spare_the_collector() -> None:
    """Tokenizers, templates and libraries are hundreds of thousands of objects that live as long as the process, and a
    request's own rarely form cycles: walking the former after every few of the latter takes percents of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_SEARCHES, MIDDLE_SEARCHES)


def _with_options(
    config: RouterConfig, *, policy: str | None, host: str | None, port: int | None, pods: list[str]
) -> RouterConfig:
    data: dict[str, Any] = config.model_dump()
    data["policy"] = policy or config.policy
    data["listen"] = {"host": host or config.listen.host, "port": config.listen.port if port is None else port}
    data["pods"] = [*data["pods"], *({"url": url} for url in pods)]
    return RouterConfig.model_validate(data)
