"""Forks the worker processes of a router and forks a new one for each that dies.

The supervisor serves no request and runs no event loop. Workers share the memory of objects that it loads before it
forks, mostly tokenizers. Each worker binds the port itself (SO_REUSEPORT), so that the kernel spreads connections over
them. The supervisor passes SIGTERM, SIGINT and SIGHUP on to all workers, which also end when their pipe to it closes.
"""

from __future__ import annotations

import asyncio
import gc
import os
import select
import shutil
import signal
import socket
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import structlog

from router.frontends.http.listen_sockets import bind_port
from router.workers.socket_folder import private_folder

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
STEADY_S = 60.0
"""A worker that ran for this long resets the backoff."""
FATAL_EXIT_CODES = (2, 3)
"""Exit codes for a wrong configuration or a taken port: a restart would not help."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Number of this process among `workers`, the folder of their sockets, their port, and a pipe that closes when the
    supervisor ends."""

    folder: Path
    number: int
    workers: int
    port: int
    supervisor_fd: int


@dataclass(slots=True)
class _Slot:
    """One worker's process. `pid` 0: no process; the next one starts at `due_s`."""

    pid: int = 0
    started_s: float = 0.0
    due_s: float = 0.0
    backoff_s: float = FIRST_BACKOFF_S
    restarted: bool = False


def fork_workers(host: str, port: int, workers: int) -> WorkerIdentity | int:
    """Fork the workers. Returns the identity in each worker, and in the supervisor, once all workers have ended after
    SIGTERM or SIGINT, the exit code. Raises `ConfigError`."""
    # With SO_REUSEPORT, any process of the same user can bind a port that is in use, so first check that it is free.
    with bind_port(host, port, exclusive=True) as probe:
        port = probe.getsockname()[1]
    supervisor, folder = os.getpid(), private_folder()
    try:
        with bind_port(host, port):  # never listens; reserves the port between restarts
            return WorkerSupervisor(folder, port, workers).run()
    finally:
        if os.getpid() == supervisor:
            shutil.rmtree(folder, ignore_errors=True)


class WorkerSupervisor:
    """Keeps `workers` processes running. Changes the signal handlers of this process."""

    def __init__(self, folder: Path, port: int, workers: int) -> None:
        self._folder = folder
        self._port = port
        self._slots = [_Slot() for _ in range(workers)]
        self._pipe = os.pipe()
        self._wakeup = socket.socketpair()
        self._stopping = False
        self._exit_code = 0

    def run(self) -> WorkerIdentity | int:
        for end in self._wakeup:
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup[1].fileno(), warn_on_full_buffer=False)
        for caught in _SIGNALS:
            signal.signal(caught, lambda *_: None)
        gc.collect()
        gc.freeze()  # so that the collector of a worker does not write to, and thereby copy, shared memory
        while True:
            for number, slot in enumerate(self._slots):
                if not slot.pid and not self._stopping and slot.due_s <= time.monotonic() and self._fork(slot) == 0:
                    return WorkerIdentity(self._folder, number, len(self._slots), self._port, self._pipe[0])
            if self._stopping and not any(slot.pid for slot in self._slots):
                return self._exit_code
            self._wait()

    def _fork(self, slot: _Slot) -> int:
        """The process id of the new worker, 0 inside it. Signals are blocked until the worker's handlers are reset."""
        slot.started_s = time.monotonic()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        slot.pid = os.fork()
        if slot.pid == 0:
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the policies can be reloaded
            os.setsid()  # Ctrl-C in a terminal reaches the supervisor only
            os.close(self._pipe[1])
            for end in self._wakeup:
                end.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return slot.pid

    def _wait(self) -> None:
        """Wait until a signal arrives or a restart is due, and handle the signals."""
        due_s = min((slot.due_s for slot in self._slots if not slot.pid and not self._stopping), default=None)
        select.select([self._wakeup[0]], [], [], None if due_s is None else max(0.0, due_s - time.monotonic()))
        try:
            received = self._wakeup[0].recv(4096)
        except BlockingIOError:
            return
        for number in received:
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stop(number)
            elif number == signal.SIGHUP:
                self._send(signal.SIGHUP)
        self._reap()

    def _reap(self) -> None:
        for number, slot in enumerate(self._slots):
            if slot.pid:
                pid, status = os.waitpid(slot.pid, os.WNOHANG)
                if pid:
                    slot.pid = 0
                    self._on_exit(number, slot, os.waitstatus_to_exitcode(status))

    def _on_exit(self, number: int, slot: _Slot, code: int) -> None:
        """Schedule a restart with a growing backoff, or stop all workers if this one cannot start."""
        if self._stopping:
            return
        if code in FATAL_EXIT_CODES and not slot.restarted:
            self._exit_code = code
            self._stop(signal.SIGTERM)
            return
        now_s, slot.restarted = time.monotonic(), True
        if now_s - slot.started_s > STEADY_S:
            slot.backoff_s = FIRST_BACKOFF_S
        log.error("worker exited; restarting", worker=number, code=code, backoff_s=slot.backoff_s)
        slot.due_s, slot.backoff_s = now_s + slot.backoff_s, min(slot.backoff_s * 2, MAX_BACKOFF_S)

    def _stop(self, number: int) -> None:
        self._stopping = True
        self._send(number)

    def _send(self, number: int) -> None:
        for slot in self._slots:
            if slot.pid:
                os.kill(slot.pid, number)


async def watch_supervisor(fd: int) -> None:
    """Run in a worker: raise SIGTERM when the supervisor is gone."""
    reader = asyncio.StreamReader()
    loop, protocol = asyncio.get_running_loop(), asyncio.StreamReaderProtocol(reader)
    pipe, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(fd, "rb", closefd=False))
    with closing(pipe):
        await reader.read()
    signal.raise_signal(signal.SIGTERM)
