"""How is the router started?

Reads configuration and policies, builds the program, hands it to uvicorn; with several workers, each does so, and
this process supervises them. Options win over the file.
"""

from __future__ import annotations

import resource
import socket
import sys
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn

from router.api.app import App
from router.api.protocol import EdgeProtocol
from router.api.server import DrainingServer
from router.config.priors import all_priors
from router.config.router_file import load_router
from router.config.schema import RouterConfig
from router.config.shipped import shipped
from router.observe.log import configure_logging
from router.wiring import build
from router.wiring.gc_tuning import tune_gc
from router.workers import WorkerIdentity, bind_port, supervise_workers

STARTUP_FAILURE = 3
"""Exit code, as uvicorn has it."""

SWITCH_S = 0.0001
"""A thread that computes, as when policies are read, keeps the event loop waiting for so long, at every turn. Python's
own 5 ms are longer than requests may wait."""


def serve_command(
    config: Annotated[Path | None, typer.Option(help="router.yaml; see `warmroute config show`.")] = None,
    policy: Annotated[str | None, typer.Option(help="A policy by name.")] = None,
    policies: Annotated[Path | None, typer.Option(help="Folder of policies, reloaded when it changes.")] = None,
    host: Annotated[str | None, typer.Option()] = None,
    port: Annotated[int | None, typer.Option()] = None,
    pod: Annotated[list[str] | None, typer.Option(help="URL of a pod; may be given several times.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that serve as one router, a core each.")] = None,
    worker: Annotated[str | None, typer.Option(hidden=True, help="FOLDER:NUMBER, set by the supervisor.")] = None,
) -> None:
    """Serve until SIGTERM; running answers may finish."""
    given = load_router(config) if config else RouterConfig()
    chosen = _with_options(given, policy=policy, host=host, port=port, pods=pod or [], workers=workers)
    configure_logging(chosen.log.format)
    priors = all_priors(chosen.priors)
    if chosen.listen.workers > 1 and worker is None:
        raise typer.Exit(supervise_workers(chosen.listen))
    identity = WorkerIdentity.parse(worker, chosen.listen.workers) if worker else None
    app = build(chosen, policies or shipped("policies"), priors, identity)
    _serve(app, chosen, [bind_port(chosen.listen)] if identity else None)


def _serve(app: App, chosen: RouterConfig, sockets: list[socket.socket] | None) -> None:
    tune_gc()
    sys.setswitchinterval(SWITCH_S)
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
        server.run(sockets)
    if not server.started:
        raise typer.Exit(STARTUP_FAILURE)


def _with_options(
    config: RouterConfig,
    *,
    policy: str | None,
    host: str | None,
    port: int | None,
    pods: list[str],
    workers: int | None,
) -> RouterConfig:
    data: dict[str, Any] = config.model_dump()
    data["policy"] = policy or config.policy
    listen = {"host": host, "port": port, "workers": workers}
    data["listen"] |= {key: value for key, value in listen.items() if value is not None}
    data["pods"] = [*data["pods"], *({"url": url} for url in pods)]
    return RouterConfig.model_validate(data)


def allow_all_open_files() -> int:
    """Raise the soft limit of open files to the hard limit, which is returned.

    Each stream needs two sockets; the default soft limit is often 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
