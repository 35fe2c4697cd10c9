"""`warmroute picker`: runs the router as the endpoint picker of a gateway. Options override the configuration file."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import structlog
import typer

from router.cli.options import PoliciesOption, configured, with_options
from router.cli.serve import SWITCH_INTERVAL_S, allow_all_open_files
from router.config.load import shipped
from router.config.priors import all_priors
from router.config.router_file import MistakeList, load_router
from router.config.schema import RouterConfig
from router.config.watched_file import StartupFiles
from router.errors import ConfigError
from router.observe.log import configure_logging

if TYPE_CHECKING:
    from router.frontends.http.server import SocketServer
    from router.wiring.program import Program

log = structlog.get_logger()


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


@with_options(PickerOptions)
def picker_command(options: PickerOptions) -> None:
    """Serve gateways until SIGTERM; running responses may finish."""
    try:
        import grpc  # noqa: F401, because the extra may be missing
    except ImportError:
        raise ConfigError("`warmroute picker` needs grpcio: run `pip install '.[picker]'` in the clone") from None
    config = _with_overrides(load_router(options.config), options)
    configure_logging(config.log.format, config.log.level)
    _run(config, options)


def _run(config: RouterConfig, options: PickerOptions) -> None:
    gc.disable()  # as in `warmroute serve`

    import uvloop

    from router.frontends.http.listen_sockets import bind_admin
    from router.frontends.http.server import SocketServer
    from router.wiring.gc_tuning import tune_gc
    from router.wiring.malloc_tuning import release_free_memory, tune_malloc
    from router.wiring.picker_front import picker_front
    from router.wiring.program import Program
    from router.wiring.prompts import preloaded

    tune_malloc()
    allow_all_open_files()
    admin = bind_admin(config.admin)
    load = preloaded(config.models, MistakeList(options.config))
    gc.enable()
    policies, files = options.policies or shipped("policies"), StartupFiles(config, options.config)
    program = Program(config, policies, all_priors(config.priors), load, files=files, front=picker_front(config.picker))
    tune_gc()
    release_free_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    uvloop.run(_serve(config, program, SocketServer(program.admin, admin)))


async def _serve(config: RouterConfig, program: Program, admin: SocketServer) -> None:
    from router.frontends.extproc.picker_server import PickerServer

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = PickerServer(program.app, config, program.is_ready, program.pods.sources.priority)
    async with program.run():
        await admin.open()
        port = await server.open()
        log.info("serving gateways", host=config.picker.host, port=port, **program.summary())
        await stop.wait()
        log.info("draining", streams=server.streams)
        await server.close(config.limits.drain_delay_s, config.limits.drain_timeout_s)
        await admin.close()
    log.info("stopped", **program.metrics.figures())


def _with_overrides(config: RouterConfig, options: PickerOptions) -> RouterConfig:
    given = {"host": options.host, "port": options.port}
    picker = config.picker.model_copy(update={key: value for key, value in given.items() if value is not None})
    port = config.admin.port if options.admin_port is None else options.admin_port
    return config.model_copy(update={"picker": picker, "admin": config.admin.model_copy(update={"port": port})})
