"""Starts the worker processes of a router and restarts those that die.

The supervisor serves no request. Each worker binds the port itself (SO_REUSEPORT), so that the kernel spreads
connections over them. SIGTERM and SIGINT are passed on to all workers. Each byte on a worker's stdin stands for a
SIGHUP of the supervisor; end of file means that the supervisor is gone.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog

from router.config.schema import Listen
from router.errors import ConfigError

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
STEADY_S = 60.0
"""A worker that ran for this long resets the backoff."""
FATAL_EXIT_CODES = (2, 3)
"""Exit codes of a worker whose configuration is wrong or whose port is taken: a restart would not help."""

log = structlog.get_logger()


def bind_port(listen: Listen, *, exclusive: bool = False) -> socket.socket:
    """A socket bound to the address, not listening yet. Unless `exclusive`, other workers can bind it as well. Raises
    `ConfigError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as on_error:
            bound = on_error.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if not exclusive:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(address)
            on_error.pop_all()
    except OSError as error:
        raise ConfigError(f"listen: cannot bind {listen.host}:{listen.port}: {error}") from error
    return bound


def supervise_workers(listen: Listen) -> int:
    """Run the workers until SIGTERM or SIGINT and until all have ended. Returns the exit code. Raises `ConfigError`."""
    # With SO_REUSEPORT any process of the same user may join the port, so first check that nobody else has it.
    with bind_port(listen, exclusive=True) as probe:
        port: int = probe.getsockname()[1]
    with (
        bind_port(listen.model_copy(update={"port": port})),  # never listens; reserves the port between restarts
        TemporaryDirectory(prefix="warmroute-") as folder,
    ):
        command = [sys.executable, *sys.orig_argv[1:], "--port", str(port)]
        return asyncio.run(WorkerSupervisor(command, Path(folder), listen.workers).run())


class WorkerSupervisor:
    """Runs `command` once for each worker, with `--worker FOLDER:NUMBER` appended."""

    def __init__(self, command: Sequence[str], folder: Path, workers: int) -> None:
        self._command = command
        self._folder = folder
        self._running: list[Process | None] = [None] * workers
        self._stopping = asyncio.Event()
        self._signal = signal.SIGTERM
        self._exit_code = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._forward_sighup)
        await asyncio.gather(*(self._keep_running(number) for number in range(len(self._running))))
        return self._exit_code

    async def _keep_running(self, number: int) -> None:
        """Restart worker `number` with a growing backoff until stopped."""
        backoff_s, restarted = FIRST_BACKOFF_S, False
        while not self._stopping.is_set():
            started_s = asyncio.get_running_loop().time()
            code = await self._run_once(number)
            if self._stopping.is_set():
                return
            if code in FATAL_EXIT_CODES and not restarted:
                self._exit_code = code
                self._stop(signal.SIGTERM)
                return
            restarted = True
            if asyncio.get_running_loop().time() - started_s > STEADY_S:
                backoff_s = FIRST_BACKOFF_S
            log.error("worker exited; restarting", worker=number, code=code, backoff_s=backoff_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff_s):
                    await self._stopping.wait()
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    async def _run_once(self, number: int) -> int:
        """Run worker `number` until it exits. Returns its exit code."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            "--worker",
            f"{self._folder}:{number}",
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._running[number] = process
        if self._stopping.is_set():
            process.send_signal(self._signal)
        try:
            return await process.wait()
        finally:
            self._running[number] = None

    def _stop(self, number: signal.Signals) -> None:
        self._signal = number
        self._stopping.set()
        for process in filter(None, self._running):
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def _forward_sighup(self) -> None:
        for process in filter(None, self._running):
            if process.stdin is not None and not process.stdin.is_closing():
                process.stdin.write(b"\n")


async def watch_parent(reload: Callable[[], Awaitable[object]]) -> None:
    """Run in a worker: reload for each byte on stdin; end like on SIGTERM when the supervisor is gone."""
    reader = asyncio.StreamReader()
    loop, protocol = asyncio.get_running_loop(), asyncio.StreamReaderProtocol(reader)
    pipe, _ = await loop.connect_read_pipe(lambda: protocol, sys.stdin.buffer)
    with closing(pipe):
        while await reader.read(1):
            await reload()
    signal.raise_signal(signal.SIGTERM)
