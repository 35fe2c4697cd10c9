"""A real Redis or Valkey for tests: one process on a free port, without persistence."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from router.config.index_schema import RedisIndex
from tests.redis_servers.server import binaries, free_port


def address_of(url: str, **settings: object) -> RedisIndex:
    """A configuration with this URL."""
    return RedisIndex.model_validate({"url": url, **settings})


class RedisProcess:
    """One server. Port and folder stay the same across `kill` and `start`."""

    def __init__(self, binary: Path, folder: Path, options: Mapping[str, str]) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._arguments = [str(binary), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        usual = {"save": "", "appendonly": "no", "logfile": "log", "protected-mode": "no"}
        for name, value in {**usual, **options}.items():
            self._arguments += [f"--{name}", *(value.split(" ") if value else [""])]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start on the same port. Raises `RuntimeError` after a minute."""
        self._process = subprocess.Popen(self._arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(6000):
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as probe:
                    probe.sendall(b"PING\r\n")
                    if probe.recv(16):
                        return
            except OSError:
                pass
            if self._process.poll() is not None:
                break
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.01)
        raise RuntimeError((self._folder / "log").read_text()[-2000:])

    def kill(self) -> None:
        """Kill it, with all its data."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop responding, with open connections."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue after `pause`."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)


@contextmanager
def redis_process(kind: str = "valkey", **options: str) -> Iterator[RedisProcess]:
    """Run a server of that kind, with options as in its configuration file (`_` for `-`)."""
    with tempfile.TemporaryDirectory(prefix="warmroute-redis-") as folder:
        server = RedisProcess(
            binaries()[kind], Path(folder), {name.replace("_", "-"): value for name, value in options.items()}
        )
        try:
            yield server
        finally:
            server.kill()
