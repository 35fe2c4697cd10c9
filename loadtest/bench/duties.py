"""Switches on what a plain load of `hotpath.py` does without: tenants, quotas, the queue, usage, KV events, Redis,
continuation, pods of two front ends.

KV events come from `mock_events.py`, a process next to the mocks. With Redis they take the way of a cluster: `warmroute
publish` writes them to a real Valkey, from which the router reads. None of these processes is in the router's session,
so their CPU is not counted as its.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx

from loadtest.bench.checkout import Checkout
from loadtest.bench.rig import PLAN, Mocks
from loadtest.commands.child_processes import free_port, router_config
from loadtest.peers.processes import launch
from router.admission.tenant import salt_of
from router.config.load import shipped
from router.config.models import load_priors, prior_speed
from router.config.schema import CostPrior
from tests.redis_process import redis_process

TENANTS = 8
GROUP = "all"
"""The tenants share prefixes, so that caches are those of a run without tenants."""
_QUOTA = {
    "requests_per_minute": 10**9,
    "uncached_prompt_tokens_per_minute": 10**12,
    "output_tokens_per_minute": 10**12,
    "concurrent_requests": 1000,
}
_ANY_TPOT = {"ttft_ms": 2000.0, "idle_prefills": 3.0}
"""Tokens after the first may come at any time. With a limit the queue leaves a pod 200 ms between two prompts, so that
four pods would get 20 a second, and the load would measure an idle router."""


class Duty(StrEnum):
    """One of them; `NO_LOG` switches off what is on by default."""

    NO_LOG = "no log"
    TENANTS = "tenants"
    QUOTAS = "quotas"
    QUEUE = "queue"
    USAGE = "usage"
    EVENTS = "events"
    REDIS = "redis"
    CONTINUATION = "continuation"
    FRONT_ENDS = "two front ends"


KEYS: Mapping[Duty, str] = {
    Duty.NO_LOG: "log",
    Duty.TENANTS: "tenants",
    Duty.QUOTAS: "tenants",
    Duty.QUEUE: "admission",
    Duty.USAGE: "usage",
    Duty.CONTINUATION: "continuation",
}
"""Keys of the configuration that older routers lack."""


def lacking(checkout: Checkout, duties: Collection[Duty]) -> list[str]:
    """Keys that these duties need and the router of this checkout does not have."""
    return sorted({KEYS[duty] for duty in duties if duty in KEYS} - checkout.keys)


def tenant_key(number: int) -> str:
    """API key of a tenant, as `lg -k` sends it."""
    return f"wr-key-of-tenant-{number}"


def write_tenants(folder: Path, count: int, quotas: Sequence[Mapping[str, int]] = (_QUOTA,)) -> Path:
    """A file of tenants that share prefixes. The default quotas are of all kinds, and never refuse."""
    rows = [
        {
            "name": f"tenant-{number}",
            "keys": [sha256(tenant_key(number).encode()).hexdigest()],
            "quotas": quotas,
            "share": GROUP,
        }
        for number in range(count)
    ]
    file = folder / "tenants.yaml"
    file.write_text(json.dumps({"tenants": rows}))
    return file


@contextmanager
def on_duty(
    duties: Collection[Duty], bodies: Path, pods: Mocks, folder: Path, checkout: Checkout
) -> Iterator[dict[str, object]]:
    """Run the other processes of these duties inside the block; yields the settings of the router."""
    config = router_config([f"http://127.0.0.1:{port}" for port in pods.ports], PLAN)
    settings: dict[str, object] = {"pods": config["pods"]}
    if Duty.NO_LOG in duties:
        settings["log"] = {"requests": False}
    if Duty.TENANTS in duties:
        settings["tenants"] = str(write_tenants(folder, TENANTS, (_QUOTA,) if Duty.QUOTAS in duties else ()))
    if Duty.QUEUE in duties:
        settings["admission"] = {}
        settings["models"] = [{**model, "slo": _ANY_TPOT} for model in config["models"]]
        for pod in config["pods"]:
            pod["speed"] = _instant_speed()
    if Duty.USAGE in duties:
        settings["usage"] = {"file": str(folder / "usage.jsonl")}
    if Duty.CONTINUATION in duties:
        settings["continuation"] = {"enabled": True}
    with ExitStack() as stack:
        if Duty.EVENTS in duties or Duty.REDIS in duties:
            salt = salt_of("", GROUP) if Duty.TENANTS in duties else ""
            sockets = stack.enter_context(_event_sockets(bodies, pods, folder, salt))
            followed = [{**pod, "kv_events": one} for pod, one in zip(config["pods"], sockets, strict=True)]
            if Duty.REDIS in duties:
                settings["index"] = {"redis": {"url": stack.enter_context(redis_process()).url}}
                published = {**config, "pods": followed, "index": settings["index"]}
                stack.enter_context(_publisher(published, folder, checkout))
            else:
                settings["pods"] = followed
        yield settings


def _instant_speed() -> dict[str, float]:
    """A hundred times the prior's. The queue admits what pods can compute in time, and with the prior it would refuse
    most of a load that the mocks answer at once."""
    prior = prior_speed(
        load_priors(shipped("config") / "models"), CostPrior(model=PLAN.speed_model, hardware=PLAN.speed_hardware)
    )
    return {name: value / 100 for name, value in zip(asdict(prior), prior.coefficients, strict=False)}


@contextmanager
def _event_sockets(bodies: Path, pods: Mocks, folder: Path, salt: str) -> Iterator[list[dict[str, str]]]:
    """Run the process that publishes the mocks' KV events; yields the `kv_events` of each pod."""
    script = str(Path(__file__).with_name("mock_events.py"))
    command = [sys.executable, script, "--bodies", str(bodies), "--salt", salt, *map(str, pods.ports)]
    with launch("events", command, folder, {}) as child:

        async def listed() -> list[dict[str, str]] | None:
            text = child.output.read_text()
            return json.loads(text) if text.endswith("\n") else None

        yield asyncio.run(child.until(listed))


@contextmanager
def _publisher(config: Mapping[str, object], folder: Path, checkout: Checkout) -> Iterator[None]:
    """Run `warmroute publish` of that checkout, which the router's readers of the index understand."""
    path, port = folder / "publisher.yaml", free_port()
    path.write_text(json.dumps(checkout.known({**config, "probes": {"self_test": False}})))
    command = [str(checkout.python), "-m", "router.cli", "publish", "--config", str(path), "--port", str(port)]
    with launch("publisher", command, folder, checkout.variables) as child:
        asyncio.run(child.until(_ready(port)))
        yield


def _ready(port: int) -> Callable[[], Any]:
    async def ready() -> bool | None:
        try:
            async with httpx.AsyncClient(trust_env=False) as client:
                return (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200 or None
        except httpx.TransportError:
            return None

    return ready
