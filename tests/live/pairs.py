"""Pairs a real prefill pod with a real decode pod.

Two vLLMs for each connector that runs on a CPU, its store if it has one, and the router in front. The router reaches
the prefill pod through a relay, which can kill that pod at a given moment. Blocking.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx

from loadtest.commands.child_processes import free_port
from tests.live.engines import HOME, EngineProcess, start_vllm, started_together
from tests.live.router_process import router
from tests.live.tiers import lmcache_server, mooncake_environment, mooncake_master

MODEL = HOME / "model" / "tiny-llama"
PATIENCE_S = 180.0
"""NIXL over TCP sometimes stalls for half a minute when four processes share two cores."""
LEASE_S = 20
"""How long NIXL's prefill pod holds KV that is not taken, as long as its stalls."""
IDLE_LOOPS = Path(__file__).parents[2] / "../shared/engines/nixl_idle"
"""Lets the idle loops of NIXL and vLLM pause for longer, where it is: four pods need more than two cores otherwise."""
QUIET_POLLS = 5
"""Seconds without a prompt, after which the router's tests of a pod have ended."""
BOOTSTRAP_PORT = 8998
"""Port of Mooncake's bootstrap server."""


class Moment(Enum):
    """When the prefill pod dies."""

    AT_PREFILL_LEG = auto()
    """It has the request and does not respond."""
    BETWEEN_LEGS = auto()
    """It has computed the prompt, and the router has no response yet."""


class Relay(ThreadingHTTPServer):
    """A prefill pod's address, which forwards to the pod; if the pod is dead it closes the connection."""

    daemon_threads = True

    def __init__(self, pod: EngineProcess) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.pod = pod
        self.kills_at: Moment | None = None
        self.http = httpx.Client(base_url=pod.url, timeout=PATIENCE_S)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def ask(self, method: str, path: str, body: bytes) -> httpx.Response | None:
        """Forward a request, if the pod is alive."""
        leg = "completions" in path
        if leg and self.kills_at is Moment.AT_PREFILL_LEG:
            self.pod.kill()
        try:
            answer = self.http.request(method, path, content=body, headers={"content-type": "application/json"})
        except httpx.TransportError:
            return None
        if leg and self.kills_at is Moment.BETWEEN_LEGS:
            self.pod.kill()
        return answer

    @contextmanager
    def running(self) -> Iterator[Relay]:
        """Serve inside the `with` block."""
        Thread(target=self.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            self.http.close()


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Relay

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        answer = self.server.ask(self.command, self.path, body)
        self.close_connection = True
        if answer is not None:
            with suppress(ConnectionError):  # the client has disconnected
                self._pass_on(answer)

    def do_POST(self) -> None:
        self.do_GET()

    def _pass_on(self, answer: httpx.Response) -> None:
        self.send_response(answer.status_code)
        self.send_header("content-type", answer.headers.get("content-type", "text/plain"))
        self.send_header("content-length", str(len(answer.content)))
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, *_: object) -> None:
        """No-op: the pods have logs."""


@dataclass(frozen=True, slots=True)
class PodOptions:
    """Options that make a vLLM one half of a pair."""

    transfer: Mapping[str, Any]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Connector:
    """A vLLM connector: the router's name for it, and both pods' options while its store runs."""

    dialect: str
    options: Callable[[Path], AbstractContextManager[tuple[PodOptions, PodOptions]]]


@contextmanager
def _nixl(_: Path, **more: Any) -> Iterator[tuple[PodOptions, PodOptions]]:
    """`more`: settings of the connector."""

    def half(role: str) -> PodOptions:
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S, **more},
        }
        environment = {
            "UCX_TLS": "tcp,self,sysv,posix,cma",
            "UCX_NET_DEVICES": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
        return PodOptions(transfer, environment)

    yield half("kv_producer"), half("kv_consumer")


@contextmanager
def _mooncake(_: Path) -> Iterator[tuple[PodOptions, PodOptions]]:
    def half(role: str) -> PodOptions:
        extra = {"mooncake_protocol": "tcp"}
        transfer = {"kv_connector": "MooncakeConnector", "kv_role": role, "kv_connector_extra_config": extra}
        environment = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(BOOTSTRAP_PORT)}
        return PodOptions(transfer, environment)

    yield half("kv_producer"), half("kv_consumer")


@contextmanager
def _lmcache(_: Path) -> Iterator[tuple[PodOptions, PodOptions]]:
    port = free_port()
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    half = PodOptions(transfer, {"LMCACHE_TRACK_USAGE": "false"})
    # on a CPU the engines move KV themselves
    with lmcache_server(port, free_port(), ("--supported-transfer-mode", "auto")):
        yield half, half


@contextmanager
def _mooncake_store(folder: Path) -> Iterator[tuple[PodOptions, PodOptions]]:
    with mooncake_store(folder) as (_, *halves):
        yield halves[0], halves[1]


@contextmanager
def mooncake_store(folder: Path, *, saves_answers: bool = False) -> Iterator[tuple[str, PodOptions, PodOptions]]:
    """The URL of the store's master, and both pods' options."""
    rpc_port, metadata_port = free_port(), free_port()
    file = folder / "mooncake.json"
    store = {
        "metadata_server": f"http://127.0.0.1:{metadata_port}/metadata",
        "master_server_address": f"127.0.0.1:{rpc_port}",
        "protocol": "tcp",
        "device_name": "",
        "mode": "embedded",
        "global_segment_size": "256MB",
        "local_buffer_size": "128MB",
    }
    file.write_text(json.dumps(store))
    environment = {"MOONCAKE_CONFIG_PATH": str(file), "VLLM_HOST_IP": "127.0.0.1", "MC_LOG_LEVEL": "WARNING"}

    def half() -> PodOptions:
        # two pods on a host would share the socket for store lookups, and hang with its owner
        extra = {"load_async": True, "lookup_rpc_port": free_port(), "save_decode_cache": saves_answers}
        transfer = {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            # the list of keys includes a dead pod's memory: every retry would fail the same way
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
        return PodOptions(transfer, environment)

    # engines on a busy machine pause for seconds and read slowly
    with mooncake_master(rpc_port, metadata_port, free_port(), misses_after_s=30, lease_ms=30_000) as url:
        yield url, half(), half()


CONNECTORS: Mapping[str, Connector] = {
    "nixl": Connector("nixl", _nixl),
    "mooncake": Connector("mooncake", _mooncake),
    "lmcache": Connector("shared_store", _lmcache),
    "mooncake-store": Connector("shared_store", _mooncake_store),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two pods, the relay to the first, and the router."""

    connector: str
    relay: Relay
    decode: EngineProcess
    url: str
    admin_url: str


@contextmanager
def running(connector: str, folder: Path) -> Iterator[Pair]:
    """A pair behind a router that splits every request it can; takes a minute on two cores and 5 GiB."""
    kind = CONNECTORS[connector]
    with ExitStack() as stack:
        halves = stack.enter_context(kind.options(folder))
        starts = [
            partial(start_half, f"{connector}-{role}", half)
            for role, half in zip(("prefill", "decode"), halves, strict=True)
        ]
        prefill, decode = stack.enter_context(started_together(starts))
        relay = stack.enter_context(Relay(prefill).running())
        config = split_config(kind.dialect, [relay.url], [decode.url], failures_to_eject=1000)
        urls = stack.enter_context(router(folder, config))
        _await_end_of_tests(decode.url)
        yield Pair(connector, relay, decode, urls.public, urls.admin)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Pods that hand over with NIXL, and the router."""

    prefills: list[EngineProcess]
    decodes: list[EngineProcess]
    url: str
    admin_url: str


@contextmanager
def nixl_fleet(folder: Path, pairs: int, installed: str = "pairs", **more: Any) -> Iterator[Fleet]:
    """Pairs with NIXL behind one router, with these settings of the connector; a minute on two cores and 4 GiB
    for each."""
    with ExitStack() as stack:
        halves = [half for _ in range(pairs) for half in stack.enter_context(_nixl(folder, **more))]
        starts = [partial(start_half, f"nixl-{at}", half, installed) for at, half in enumerate(halves)]
        pods = stack.enter_context(started_together(starts))
        prefills, decodes = pods[::2], pods[1::2]
        config = split_config("nixl", [pod.url for pod in prefills], [pod.url for pod in decodes])
        urls = stack.enter_context(router(folder, config))
        for pod in decodes:
            _await_end_of_tests(pod.url)
        yield Fleet(prefills, decodes, urls.public, urls.admin)


def _await_end_of_tests(url: str) -> None:
    """Wait until the router's tests of a trusted pod have ended, whose prompts would count as the first request's."""
    deadline_s, quiet, before = time.monotonic() + PATIENCE_S, 0, list[str]()
    while quiet < QUIET_POLLS and time.monotonic() < deadline_s:
        text = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
        prompts = [line for line in text.splitlines() if line.startswith("vllm:prompt_tokens_total")]
        quiet, before = quiet + 1 if prompts == before else 0, prompts
        time.sleep(1.0)
    assert quiet == QUIET_POLLS, f"{url} gets prompts that nobody sent"


def start_half(name: str, half: PodOptions, installed: str = "pairs") -> EngineProcess:
    """LMCache loads the installed Mooncake as well. Another vLLM finds NIXL among the packages of the pairs."""
    packages = next((HOME / "pairs" / "lib").glob("python3.*")) / "site-packages"
    return start_vllm(
        name,
        free_port(),
        MODEL,
        kv_port=free_port(),
        extra_args=("--kv-transfer-config", json.dumps(half.transfer)),
        installed=installed,
        environment={**mooncake_environment(), **half.environment, "PYTHONPATH": f"{IDLE_LOOPS}:{packages}"},
    )


def split_config(dialect: str, prefills: Sequence[str], decodes: Sequence[str], **probes: Any) -> dict[str, Any]:
    """The decode pods' prior has slow prefills, so that a split always pays. With 1000 `failures_to_eject` requests
    reach a dead pod."""

    def pod(url: str, role: str, c0_ms: float) -> dict[str, Any]:
        speed = {"c0_ms": c0_ms, "c1_ms_per_token": 0.1, "c2_ms_per_token2": 0.0}
        return {"url": url, "role": role, "handoff": dialect, "speed": speed}

    return {
        "models": [{"name": "tiny", "tokenizer": str(MODEL)}],
        "pods": [pod(url, "prefill", 1.0) for url in prefills] + [pod(url, "decode", 1000.0) for url in decodes],
        "links": {"elsewhere": {"t0_ms": 1.0, "gb_per_s": 100.0}},
        "probes": probes,
    }
