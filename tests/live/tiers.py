"""Starts and stops real cache tiers.

LMCache's server and Mooncake's store as installed by `install.sh`, and a vLLM that stores its KV in LMCache. Each in
its own process group, for the length of a `with` block. Blocking; for tests. Logs are under the live home.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.live.engines import BLOCK_TOKENS, HOME, START_TIMEOUT_S, STOP_TIMEOUT_S, EngineFailed

LMCACHE = HOME / "lmcache"
MOONCAKE = HOME / "mooncake"
CHUNK_TOKENS = 64

_CLIENT = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
failed = store.setup("127.0.0.1:" + sys.argv[1], sys.argv[2], 64 << 20, 16 << 20, "tcp", "", sys.argv[3])
print(failed, flush=True)
for line in sys.stdin:
    verb, name = line.split()
    print(store.put(name, b"kv") if verb == "put" else store.remove(name), flush=True)
"""
"""A script that adds memory to the store, and puts and removes objects by commands on standard input; prints 0 after
each."""


class MooncakeClient:
    """A real client of the store, as an engine's connector is. Its memory holds the objects."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def put(self, *names: str) -> None:
        """Store small objects."""
        for name in names:
            self._do("put", name)

    def remove(self, *names: str) -> None:
        """Remove objects; the master refuses while one is leased."""
        for name in names:
            self._do("remove", name)

    def answer(self) -> str:
        """The next line of the script's own output; the store's C++ code prints to the same stream."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip().lstrip("-").isdigit():
                return line.strip()
        raise EngineFailed("Mooncake's client ended")

    def _do(self, verb: str, name: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{verb} {name}\n")
        self.process.stdin.flush()
        answer = self.answer()
        if answer != "0":
            raise EngineFailed(f"Mooncake's client: {verb} {name} returned {answer}")


@contextmanager
def mooncake_master(
    rpc_port: int, metadata_port: int, admin_port: int, *, misses_after_s: int = 2, lease_ms: int = 100
) -> Iterator[str]:
    """Run the master of an empty store with a short client timeout and the given lease for reads; yields the URL of its
    admin port."""
    command = [
        *(str(MOONCAKE / "bin/mooncake_master"), f"-rpc_port={rpc_port}", "-rpc_thread_num=2"),
        *("-enable_http_metadata_server=true", "-http_metadata_server_host=127.0.0.1"),
        *(f"-http_metadata_server_port={metadata_port}", "-metrics_host=127.0.0.1", f"-metrics_port={admin_port}"),
        *(f"-client_ttl={misses_after_s}", f"-default_kv_lease_ttl={lease_ms}"),
    ]
    url = f"http://127.0.0.1:{admin_port}"
    with _running("mooncake-master", command, f"{url}/health", mooncake_environment()):
        yield url


@contextmanager
def mooncake_client(rpc_port: int, metadata_port: int, own_port: int) -> Iterator[MooncakeClient]:
    """Run a client with 64 MiB of memory for the store."""
    addresses = (str(own_port), f"http://127.0.0.1:{metadata_port}/metadata", f"127.0.0.1:{rpc_port}")
    process = subprocess.Popen(
        [str(MOONCAKE / "bin/python"), "-c", _CLIENT, *addresses],
        env={**os.environ, **mooncake_environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            client = MooncakeClient(process)
            if client.answer() != "0":
                raise EngineFailed("Mooncake's client finds no master")
            yield client
        finally:
            process.kill()


def mooncake_environment() -> dict[str, str]:
    """Folder of libraries that Mooncake needs and the machine may lack."""
    unpacked = MOONCAKE / "libraries"
    folders = [str(path) for path in (unpacked / "usr/lib/x86_64-linux-gnu", unpacked / "lib/x86_64-linux-gnu")]
    return {"LD_LIBRARY_PATH": ":".join([*folders, os.environ.get("LD_LIBRARY_PATH", "")])}


@contextmanager
def lmcache_server(port: int, http_port: int, options: Sequence[str] = ()) -> Iterator[str]:
    """Run an LMCache server, in a quarter of a minute and 1.5 GiB; yields the URL of its HTTP port."""
    command = [
        *(str(LMCACHE / "bin/lmcache"), "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--http-host", "127.0.0.1", "--http-port", str(http_port), "--prometheus-port", str(http_port + 1)),
        *("--chunk-size", str(CHUNK_TOKENS), "--l1-size-gb", "1", "--eviction-policy", "LRU"),
        *options,
    ]
    url = f"http://127.0.0.1:{http_port}"
    with _running("lmcache", command, f"{url}/healthcheck", {"LMCACHE_TRACK_USAGE": "false"}):
        yield url


def reporting(coordinator_url: str, files: Path) -> list[str]:
    """Options of an LMCache server that reports to a coordinator as `live-cache` and has a second tier in `files`."""
    return [
        *("--l2-adapter", json.dumps({"type": "fs", "base_path": str(files)}), "--instance-id", "live-cache"),
        *("--coordinator-url", coordinator_url, "--coordinator-advertise-ip", "127.0.0.1"),
        *("--coordinator-event-reporting", "--coordinator-event-flush-interval", "0.2"),
        *("--coordinator-heartbeat-interval", "0.5"),
    ]


@contextmanager
def vllm_on_lmcache(port: int, model_dir: Path, lmcache_port: int) -> Iterator[str]:
    """A vLLM whose KV the LMCache server copies, with its tokens; on a CPU this must be enabled."""
    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": lmcache_port,
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        },
    }
    command = [
        *(str(LMCACHE / "bin/python"), "-m", "vllm.entrypoints.cli.main", "serve", str(model_dir)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096"),
        *("--block-size", str(BLOCK_TOKENS), "--enforce-eager", "--enable-prefix-caching"),
        *("--num-gpu-blocks-override", "512", "--kv-transfer-config", json.dumps(transfer)),
    ]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "LMCACHE_TRACK_USAGE": "false",
    }
    url = f"http://127.0.0.1:{port}"
    with _running("vllm-on-lmcache", command, f"{url}/health", environment):
        yield url


@contextmanager
def _running(name: str, command: Sequence[str], health_url: str, environment: Mapping[str, str]) -> Iterator[None]:
    log = HOME / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _await_health(name, process, health_url, log)
        yield
    finally:
        _end(process)


def _await_health(name: str, process: subprocess.Popen[bytes], health_url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(health_url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except (OSError, urllib.error.URLError):
            pass  # not started yet
        time.sleep(0.1)
    raise EngineFailed(f"{name} is not up ({process.poll()})\n{log.read_text('utf-8', 'replace')[-4000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate the process group; kill what is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(STOP_TIMEOUT_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass  # the whole group has ended
