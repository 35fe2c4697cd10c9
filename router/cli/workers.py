"""How do several processes become one router?

The first one serves nothing itself: it starts the workers, each a process with a listening socket of its own on the
same port, among which the kernel shares out connections; starts another in the place of one that dies; and ends when
all have. SIGTERM and SIGINT go to all of them. Over a pipe each hears of SIGHUP, and that this process is gone. What
workers tell one another passes by here.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog

from router.config.schema import Listen
from router.errors import ConfigError

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 10.0
STEADY_S = 60.0
"""A worker that served for this long had not failed to start: the next wait is the first one again."""
BAD_STARTS = (2, 3)
"""Exit codes of a worker that cannot serve: its configuration is wrong, or its port taken."""

log = structlog.get_logger()


def bound(listen: Listen, *, alone: bool = False) -> socket.socket:
    """A socket on the address, which does not listen yet. All workers may bind it; `alone`, only where nobody listens.
    Raises `ConfigError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as unless_bound:
            taken = unless_bound.enter_context(socket.socket(family, kind, protocol))
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if not alone:
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            taken.bind(address)
            unless_bound.pop_all()
    except OSError as error:
        raise ConfigError(f"{listen.host}:{listen.port}: {error}") from error
    return taken


def look_after(listen: Listen) -> int:
    """Until SIGTERM or SIGINT, and until all workers have ended. Returns the exit code. Raises `ConfigError`."""
    # Workers share their port with anybody of the same user who asks for it: that nobody has it yet is tried without.
    with bound(listen, alone=True) as tried:
        port: int = tried.getsockname()[1]
    with (
        bound(listen.model_copy(update={"port": port})),  # it does not listen; the port stays ours between workers
        TemporaryDirectory(prefix="warmroute-") as folder,
    ):
        command = [sys.executable, *sys.orig_argv[1:], "--port", str(port)]
        return asyncio.run(_Workers(command, Path(folder), listen.workers).run())


class _Workers:
    def __init__(self, command: Sequence[str], folder: Path, workers: int) -> None:
        self._command = command
        self._folder = folder
        self._running: list[Process | None] = [None] * workers
        self._stops = asyncio.Event()
        self._signal = signal.SIGTERM
        self._code = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        await asyncio.gather(*(self._keep(number) for number in range(len(self._running))))
        return self._code

    async def _keep(self, number: int) -> None:
        """One worker after another, with growing pauses while they do not last."""
        wait_s, served = FIRST_WAIT_S, False
        while not self._stops.is_set():
            began_s = asyncio.get_running_loop().time()
            code = await self._one(number)
            if self._stops.is_set():
                return
            if code in BAD_STARTS and not served:
                self._code = code
                self._stop(signal.SIGTERM)
                return
            served = True
            wait_s = FIRST_WAIT_S if asyncio.get_running_loop().time() - began_s > STEADY_S else wait_s
            log.error("a worker has ended; another takes its place", worker=number, code=code, wait_s=wait_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._stops.wait()
            wait_s = min(wait_s * 2, LONGEST_WAIT_S)

    async def _one(self, number: int) -> int:
        """Its exit code."""
        process = await asyncio.create_subprocess_exec(
            *self._command, "--place", f"{self._folder}:{number}", stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        self._running[number] = process
        if self._stops.is_set():
            process.send_signal(self._signal)
        try:
            return await process.wait()
        finally:
            self._running[number] = None

    def _stop(self, number: signal.Signals) -> None:
        self._signal = number
        self._stops.set()
        for process in filter(None, self._running):
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def _hang_up(self) -> None:
        for process in filter(None, self._running):
            if process.stdin is not None and not process.stdin.is_closing():
                process.stdin.write(b"\n")
