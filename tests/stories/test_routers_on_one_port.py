"""Several routers on one machine listen on one port (`listen.reuse_port`) and share Redis."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.commands.child_processes import RouterUrls, child, configured_router
from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_engine import running_engines
from tests.kit.deadlines import DEADLINE_S
from tests.kit.scenes import LLAMA_8B
from tests.redis_process import redis_process
from tests.redis_servers.server import free_port
from tests.stories.conftest import SOURCE, TEMPLATE
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]


@asynccontextmanager
async def running_router(
    engine_config: Callable[..., MockEngineConfig], folder: Path, **settings: Any
) -> AsyncIterator[RouterUrls]:
    """A router in front of two engines with real step times, ready and trusted. `settings`: of its configuration."""
    async with asyncio.timeout(DEADLINE_S), running_engines([engine_config(time_scale=1.0)] * 2) as engines:
        speed = {name: getattr(LLAMA_8B, name) for name in LLAMA_8B.__dataclass_fields__}
        config = {
            "models": [{"name": "demo", "tokenizer": SOURCE.path, "chat_template": TEMPLATE, "fast_tokenizer": False}],
            "pods": [{"url": engine.url, "speed": speed} for engine in engines],
            "probes": {"health_interval_s": 0.1, "load_interval_s": 0.05, "self_test_interval_s": 0.2},
            "limits": {"drain_delay_s": 0.0, "retries": 0},
            **settings,
        }
        async with configured_router("router", config, folder, free_port(), free_port()) as urls:
            yield urls


async def chat(url: str, **fields: Any) -> httpx.Response:
    """A chat over a new connection, which any of the routers may accept."""
    body = {"model": "demo", "messages": opening("tides"), "max_tokens": 4, **fields}
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client:
        return await client.post(f"{url}/v1/chat/completions", json=body)


async def metrics(router: RouterUrls) -> str:
    """Its metrics; empty while it does not answer."""
    async with httpx.AsyncClient(trust_env=False) as client:
        try:
            return (await client.get(f"{router.admin}/metrics")).text
        except httpx.TransportError:
            return ""


async def served_by(router: RouterUrls) -> bool:
    """Whether this router has served a chat."""
    return (
        re.search(r'^warmroute_requests_total\{.*result="ok"\} [1-9]', await metrics(router), re.MULTILINE) is not None
    )


async def test_two_routers_serve_one_port_until_one_is_stopped(
    engine_config: Callable[..., MockEngineConfig], tmp_path: Path
) -> None:
    """Both get connections, each knows of the other, and of a client that goes on asking no request fails."""
    with redis_process("valkey") as redis:
        settings = {"index": {"redis": {"url": redis.url}}, "listen": {"reuse_port": True}}
        async with running_router(engine_config, tmp_path, **settings) as one:
            port, admin_port = one.public.rpartition(":")[2], str(free_port())
            two = RouterUrls(one.public, f"http://127.0.0.1:{admin_port}")
            options = ["--config", str(tmp_path / "router.yaml"), "--port", port, "--admin-port", admin_port]
            with child("second", ["serve", *options], tmp_path) as second:
                while "warmroute_other_replicas 1.0" not in await metrics(two):
                    second.check_alive()
                while not (await served_by(one) and await served_by(two)):
                    assert (await chat(one.public)).status_code == 200
                while "warmroute_other_replicas 1.0" not in await metrics(one):
                    second.check_alive()
                second.process.send_signal(signal.SIGTERM)
                while second.process.poll() is None:
                    assert (await chat(one.public)).status_code == 200
                assert '"stopped"' in second.log.read_text()
            assert (await chat(one.public)).status_code == 200
