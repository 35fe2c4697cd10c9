"""The routers to compare with, and their command lines.

One entry per router: the environment of its program, its command line for given pods, and its readiness check. Routing
stays at the defaults, except for a policy that the name states.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

import httpx

from loadtest.commands.child_processes import FleetPlan, all_pods_trusted, free_port, router_config
from loadtest.peers.environments import HAPROXY, NGINX, libraries, program


@dataclass(frozen=True, slots=True)
class Pod:
    """An engine's base URL and ZMQ addresses."""

    url: str
    kv_endpoint: str
    kv_replay_endpoint: str


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Port of a router, its pods, and its own folder for files. `admin_port` is for our own."""

    port: int
    pods: Sequence[Pod]
    plan: FleetPlan
    folder: Path
    admin_port: int = field(default_factory=free_port)

    @property
    def urls(self) -> list[str]:
        """Base URLs of the pods."""
        return [pod.url for pod in self.pods]


Command: TypeAlias = Callable[[LaunchPlan], list[str]]
Ready: TypeAlias = Callable[[httpx.AsyncClient, int], Awaitable[bool]]
"""Whether the router has this number of pods."""


async def all_workers_healthy(client: httpx.AsyncClient, pods: int) -> bool:
    """The readiness of sglang-router and its forks."""
    answer = await client.get("/readiness")
    return answer.status_code == 200 and answer.json().get("healthy_workers") == pods


async def responds(client: httpx.AsyncClient, _: int) -> bool:
    """Whether a router responds; for routers that do not check their pods."""
    return (await client.get("/")).status_code < 500


@dataclass(frozen=True, slots=True)
class Peer:
    """One router under one policy. `environment` is None for our own."""

    environment: str | None
    command: Command
    ready: Ready
    variables: Mapping[str, str] = field(default_factory=dict)
    has_admin_port: bool = False
    """Whether `ready` calls the admin port."""

    def status_url(self, place: LaunchPlan) -> str:
        """The address that `ready` calls."""
        return f"http://127.0.0.1:{place.admin_port if self.has_admin_port else place.port}"


# --- Rust ---


def _gateway(environment: str, before: Sequence[str], options: Sequence[str], place: LaunchPlan) -> list[str]:
    """sglang-router, smg and vllm-router share these options."""
    return [
        *(str(program(environment)), *before, "--host", "127.0.0.1", "--port", str(place.port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
        *(*options, "--worker-urls", *place.urls),
    ]


def _kv_aware(place: LaunchPlan) -> list[str]:
    """vllm-router with the engines' KV events."""
    sources = [
        *(("--kv-event-source", f"{pod.url}={pod.kv_endpoint}") for pod in place.pods),
        *(("--kv-event-replay-source", f"{pod.url}={pod.kv_replay_endpoint}") for pod in place.pods),
    ]
    options = [
        "--policy",
        "kv_aware",
        "--kv-event-model",
        place.plan.model,
        *(part for pair in sources for part in pair),
    ]
    return _gateway("vllm-router", [], options, place)


# --- nginx ---


def _nginx(balancing: str, place: LaunchPlan) -> list[str]:
    """Without response buffering and with upstream keepalive, as its manual recommends."""
    path = place.folder / "nginx.conf"
    path.write_text(nginx_conf(balancing, place))
    return [str(program(NGINX)), "-p", str(place.folder), "-c", str(path), "-e", "stderr"]


def nginx_conf(balancing: str, place: LaunchPlan) -> str:
    """`balancing` is a directive of an upstream block; empty for round robin."""
    servers = "\n    ".join(f"server {url.removeprefix('http://')};" for url in place.urls)
    temporary = "\n  ".join(
        f"{kind}_temp_path {place.folder / kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""daemon off;
worker_processes auto;
pid {place.folder / "nginx.pid"};
events {{ worker_connections 16384; }}
http {{
  access_log off;
  {temporary}
  upstream pods {{
    zone pods 256k;
    {balancing}
    {servers}
    keepalive 64;
  }}
  server {{
    listen 127.0.0.1:{place.port};
    client_max_body_size 64m;
    client_body_buffer_size 1m;
    location / {{
      proxy_pass http://pods;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


# --- haproxy ---


def _haproxy(place: LaunchPlan) -> list[str]:
    """Its defaults, with shared keepalive connections to pods."""
    path = place.folder / "haproxy.cfg"
    path.write_text(haproxy_conf(place))
    return [str(program(HAPROXY)), "-db", "-f", str(path)]


def haproxy_conf(place: LaunchPlan) -> str:
    """Round robin over the pods."""
    servers = "\n  ".join(f"server pod{n} {url.removeprefix('http://')}" for n, url in enumerate(place.urls))
    return f"""global
  maxconn 9000
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
  http-reuse always
frontend clients
  bind 127.0.0.1:{place.port}
  default_backend pods
backend pods
  balance roundrobin
  {servers}
"""


# --- Python ---


def _litellm(place: LaunchPlan) -> list[str]:
    """Each pod is a deployment of the same model, with its default strategy simple-shuffle."""
    path = place.folder / "litellm.yaml"
    path.write_text(json.dumps({"model_list": list(_deployments(place))}))
    command = [str(program("litellm")), "--config", str(path), "--host", "127.0.0.1", "--port", str(place.port)]
    return [*command, "--telemetry", "False"]


def _deployments(place: LaunchPlan) -> Iterator[Mapping[str, object]]:
    for url in place.urls:
        how = {"model": f"openai/{place.plan.model}", "api_base": f"{url}/v1", "api_key": "none"}
        yield {"model_name": place.plan.model, "litellm_params": how}


def _warmroute(policy: str, place: LaunchPlan) -> list[str]:
    path = place.folder / "warmroute.yaml"
    path.write_text(json.dumps(router_config(place.urls, place.plan)))
    serve = [sys.executable, "-m", "router.cli", "serve", "--config", str(path)]
    return [*serve, "--policy", policy, *ports(place)]


def ports(place: LaunchPlan) -> list[str]:
    """Options of `warmroute serve`."""
    return ["--port", str(place.port), "--admin-port", str(place.admin_port)]


PEERS: Mapping[str, Peer] = {
    "warmroute": Peer(None, partial(_warmroute, "cost_aware"), all_pods_trusted, has_admin_port=True),
    "warmroute-ring": Peer(None, partial(_warmroute, "ring_bounded_load"), all_pods_trusted, has_admin_port=True),
    "sglang-router": Peer("sglang-router", partial(_gateway, "sglang-router", ["launch"], []), all_workers_healthy),
    "smg": Peer("smg", partial(_gateway, "smg", ["launch"], []), all_workers_healthy),
    "smg-prefix-hash": Peer(
        "smg", partial(_gateway, "smg", ["launch"], ["--policy", "prefix_hash"]), all_workers_healthy
    ),
    "vllm-router": Peer("vllm-router", partial(_gateway, "vllm-router", [], []), all_workers_healthy),
    "vllm-router-kv": Peer("vllm-router", _kv_aware, all_workers_healthy),
    "nginx": Peer(NGINX, partial(_nginx, ""), responds),
    "nginx-least-conn": Peer(NGINX, partial(_nginx, "least_conn;"), responds),
    "haproxy": Peer(HAPROXY, _haproxy, responds, libraries(HAPROXY)),
    "litellm": Peer(
        "litellm",
        _litellm,
        responds,
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"},
    ),
}
"""Routers by name."""
