"""`warmroute serve` and `warmroute picker`: run the router, for clients or as the endpoint picker of a gateway.

Options override the configuration file.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import structlog
import typer

from router.admission.fair_bound import KEPT_PART
from router.cli.options import PoliciesOption, configured, with_options
from router.config.load import shipped, validate_options
from router.config.models import all_priors, without_cost
from router.config.router_file import MistakeList, load_router
from router.config.schema import RouterConfig
from router.config.watched_file import StartupFiles
from router.errors import ConfigError
from router.observe.log import configure_logging

if TYPE_CHECKING:
    from router.frontends.http.server import SocketServer
    from router.wiring.router import Front, Router

Bound = TypeVar("Bound")

log = structlog.get_logger()

STARTUP_FAILURE = 3
"""Exit code, as uvicorn's, when the server cannot start."""
SPARE_FILES = 320
"""Open files that a router needs for probes and events of pods, Redis, policies, new connections, TLS handshakes."""
SWITCH_INTERVAL_S = 0.0001
"""Longest time that a computing thread, such as one that reads policies, blocks the event loop. Python's default of
5 ms is too long for requests."""


@dataclass(frozen=True)
class ServeOptions:
    config: Annotated[
        Path | None,
        typer.Option(help="router.yaml; see `warmroute config show`.", show_default="the built-in defaults"),
    ] = None
    policy: Annotated[
        str | None, typer.Option(help="Name of the default policy.", show_default=configured("policy"))
    ] = None
    policies: Annotated[
        Path | None,
        typer.Option(help="Folder of policies. It is reloaded when it changes.", show_default="the shipped policies"),
    ] = None
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default=configured("listen.host"))] = (
        None
    )
    port: Annotated[int | None, typer.Option(help="Port to listen on.", show_default=configured("listen.port"))] = None
    pod: Annotated[
        list[str] | None, typer.Option(help="URL of another pod. Can be repeated.", show_default="pods in --config")
    ] = None
    admin_port: Annotated[
        int | None,
        typer.Option(help="Port of /admin and /metrics.", show_default=configured("admin.port")),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option(
            help="1: a router is one process; see `listen.reuse_port`.",
            show_default=configured("listen.workers"),
        ),
    ] = None
    log_level: Annotated[
        str | None,
        typer.Option(help="debug, info, warning or error.", show_default=configured("log.level")),
    ] = None


@dataclass(frozen=True)
class PickerOptions:
    config: Annotated[Path, typer.Option(help="router.yaml; see `warmroute config show`.")]
    policies: PoliciesOption = None
    host: Annotated[str | None, typer.Option(help="Address for gateways.", show_default=configured("picker.host"))] = (
        None
    )
    port: Annotated[int | None, typer.Option(help="Port for gateways.", show_default=configured("picker.port"))] = None
    admin_port: Annotated[
        int | None, typer.Option(help="Port of /admin and /metrics.", show_default=configured("admin.port"))
    ] = None


@with_options(ServeOptions)
def serve_command(options: ServeOptions) -> None:
    """Serve until SIGTERM; running responses may finish."""
    config = _with_overrides(load_router(options.config) if options.config else RouterConfig(), options)
    configure_logging(config.log.format, config.log.level)
    if not config.pods and not config.discovery.groups:
        log.warning(
            "no pods",
            hint="name one with --pod URL or under `pods` or `discovery` in a --config file, or add one at /admin/pods",
        )
    for model, hint in without_cost(config.models).items():
        log.warning("model without cost", model=model, hint=hint)
    _serve(config, options, StartupFiles(config, options.config))


def _serve(config: RouterConfig, options: ServeOptions, files: StartupFiles) -> None:
    gc.disable()  # imports create no garbage, and the search for it takes a fifth of their time

    import uvicorn

    from router.frontends.http.protocol import EdgeProtocol
    from router.frontends.http.server import DrainingServer, bind_port, open_port

    config = _with_fitting_connections(config, allow_all_open_files())
    bind = partial(bind_port, config.listen.host, config.listen.port, exclusive=not config.listen.reuse_port)
    program, admin, public = _started(config, options, files, bind)
    settings = uvicorn.Config(
        program.edge,
        loop="uvloop",
        http=EdgeProtocol,
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=ceil(config.limits.drain_timeout_s),
    )
    if certificate := program.edges.certificate:
        settings.ssl_context_factory = lambda *_: certificate.context
    server = DrainingServer(
        settings,
        admin,
        delay_s=config.limits.drain_delay_s,
        summary=program.summary,
        figures=program.metrics.figures,
    )
    open_port(public, settings.backlog)
    with suppress(KeyboardInterrupt):
        server.run([public])
    if not server.started:
        raise typer.Exit(STARTUP_FAILURE)


def _started(
    config: RouterConfig,
    options: ServeOptions | PickerOptions,
    files: StartupFiles,
    bind: Callable[[], Bound],
    front: Front | None = None,
) -> tuple[Router, SocketServer, Bound]:
    """The program that is ready to run, its admin listener, and what `bind` returns: ports are taken before models are
    loaded."""
    from router.feeds.process_memory import release_free_memory, tune_gc, tune_malloc
    from router.frontends.http.server import SocketServer, bind_admin
    from router.frontends.prompts import preloaded
    from router.wiring.router import HTTP_FRONT, build_router

    tune_malloc()
    admin, bound = bind_admin(config.admin), bind()
    policies, priors = options.policies or shipped("policies"), all_priors(config.priors)
    load = preloaded(config.models, MistakeList(options.config))
    gc.enable()
    release_free_memory()
    program = build_router(config, policies, priors, load, files=files, front=front or HTTP_FRONT)
    tune_gc()
    release_free_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return program, SocketServer(program.edges.admin, admin), bound


def _with_overrides(config: RouterConfig, options: ServeOptions) -> RouterConfig:
    data: dict[str, Any] = config.model_dump()
    data["policy"] = options.policy or config.policy
    listen = {"host": options.host, "port": options.port, "workers": options.workers}
    data["listen"] |= {key: value for key, value in listen.items() if value is not None}
    data["admin"]["port"] = config.admin.port if options.admin_port is None else options.admin_port
    data["pods"] = [*data["pods"], *({"url": url} for url in options.pod or [])]
    if options.pod and not config.models:
        data["unlisted_models"] = "engine"
    data["log"]["level"] = options.log_level or config.log.level
    return validate_options(RouterConfig, data)


def allow_all_open_files() -> int:
    """Raise the soft limit of open files to the hard limit, which is returned. Each stream needs two sockets, and the
    default soft limit is often 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connections_allowed(open_files: int) -> int:
    """How many client connections fit into this limit of open files: one that is served needs a second one, to a pod,
    and some more are kept for other clients. Without a file left, the router can accept no connection, and open none to
    a pod, which would then be ejected."""
    if open_files == resource.RLIM_INFINITY:
        return sys.maxsize
    return max((open_files - SPARE_FILES) // 2 * KEPT_PART // (KEPT_PART + 1), 1)


def _with_fitting_connections(config: RouterConfig, open_files: int) -> RouterConfig:
    """The configuration with as many connections as the limit of open files allows."""
    allowed, limits = connections_allowed(open_files), config.limits
    if limits.max_connections <= allowed:
        return config
    log.info(
        "fewer connections than limits.max_connections",
        connections=allowed,
        configured=limits.max_connections,
        open_files=open_files,
        hint="raise the hard limit of open files (`ulimit -Hn`; LimitNOFILE in systemd) to serve more clients",
    )
    return config.model_copy(update={"limits": limits.model_copy(update={"max_connections": allowed})})


# --- the endpoint picker ---


@with_options(PickerOptions)
def picker_command(options: PickerOptions) -> None:
    """Serve gateways until SIGTERM; running responses may finish."""
    try:
        import grpc  # noqa: F401, because the extra may be missing
    except ImportError:
        raise ConfigError("`warmroute picker` needs grpcio: run `pip install '.[picker]'` in the clone") from None
    config = _with_picker_overrides(load_router(options.config), options)
    configure_logging(config.log.format, config.log.level)
    gc.disable()

    import uvloop

    from router.wiring.router import picker_front

    allow_all_open_files()
    files, front = StartupFiles(config, options.config), picker_front(config.picker)
    program, admin, _ = _started(config, options, files, lambda: None, front)
    uvloop.run(_serve_gateways(config, program, admin))


async def _serve_gateways(config: RouterConfig, program: Router, admin: SocketServer) -> None:
    from router.frontends.extproc.picker_server import PickerServer

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = PickerServer(program.edge, config, program.is_ready, program.pods.sources.priority)
    async with program.run():
        await admin.open()
        port = await server.open()
        log.info("serving gateways", host=config.picker.host, port=port, **program.summary())
        await stop.wait()
        log.info("draining", streams=server.streams)
        await server.close(config.limits.drain_delay_s, config.limits.drain_timeout_s)
        await admin.close()
    log.info("stopped", **program.metrics.figures())


def _with_picker_overrides(config: RouterConfig, options: PickerOptions) -> RouterConfig:
    given = {"host": options.host, "port": options.port}
    picker = config.picker.model_copy(update={key: value for key, value in given.items() if value is not None})
    port = config.admin.port if options.admin_port is None else options.admin_port
    return config.model_copy(update={"picker": picker, "admin": config.admin.model_copy(update={"port": port})})
