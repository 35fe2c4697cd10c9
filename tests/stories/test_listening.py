"""Where a router listens: with TLS, on IPv6, and several on one port."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.commands.child_processes import Child, RouterUrls, child, configured_router
from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_engine import running_engines
from router.frontends.http.client_deadlines import MIN_NEWCOMERS
from tests.kit.deadlines import DEADLINE_S
from tests.kit.scenes import LLAMA_8B
from tests.redis_process import redis_process
from tests.redis_servers.server import TlsFiles, free_port, tls_material
from tests.stories.conftest import SOURCE, TEMPLATE, Deploy, converse, opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]


# --- TLS ---

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")


def material(folder: Path) -> TlsFiles:
    """A new authority with a certificate, in a folder of its own."""
    folder.mkdir()
    return tls_material(folder)


async def is_live(url: str, verify: ssl.SSLContext | bool = False) -> bool:
    """Whether the router answers over a new connection."""
    try:
        async with httpx.AsyncClient(trust_env=False, verify=verify) as client:
            return (await client.get(f"{url}/livez")).status_code == 200
    except httpx.TransportError:
        return False


async def until_live(url: str, verify: ssl.SSLContext | bool = False) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await is_live(url, verify):
            await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(folder: Path, listen: str) -> AsyncIterator[tuple[int, Child]]:
    """A router with this `listen` section, and its port."""
    port = free_port()
    (folder / "router.yaml").write_text(f"listen: {listen.replace('PORT', str(port))}\n")
    with child("router", ["serve", "--config", str(folder / "router.yaml"), "--admin-port", "0"], folder) as router:
        yield port, router


@needs_openssl
async def test_a_renewed_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    """An unusable one is not used."""
    old, new = material(tmp_path / "old"), material(tmp_path / "new")
    used = TlsFiles(tmp_path / "ca", tmp_path / "tls.crt", tmp_path / "tls.key")
    shutil.copy(old.certificate, used.certificate)
    shutil.copy(old.key, used.key)
    listen = "{port: PORT, tls: {cert_file: tls.crt, key_file: tls.key}}"
    trusts_old, trusts_new = (ssl.create_default_context(cafile=files.ca) for files in (old, new))
    async with serving(tmp_path, listen) as (port, router):
        url = f"https://localhost:{port}"
        await until_live(url, trusts_old)
        shutil.copy(new.certificate, used.certificate)
        shutil.copy(new.key, used.key)
        async with asyncio.timeout(DEADLINE_S):
            while "files read again" not in router.log.read_text():
                await asyncio.sleep(0.02)
        await until_live(url, trusts_new)
        used.key.write_text("no key")
        assert await is_live(url, trusts_new)
        assert not await is_live(url.replace("https", "http"))


@needs_openssl
async def test_clients_that_never_finish_a_handshake_do_not_take_the_connections(tmp_path: Path) -> None:
    """Those that began first are disconnected; one that sent plain HTTP at once."""
    files = material(tmp_path / "files")
    listen = f"{{port: PORT, tls: {{cert_file: {files.certificate}, key_file: {files.key}}}}}"
    async with serving(tmp_path, f"{listen}\nlimits: {{max_connections: 20}}") as (port, _):
        url, trusting = f"https://localhost:{port}", ssl.create_default_context(cafile=files.ca)
        await until_live(url, trusting)
        with ExitStack() as silent:
            clients = [
                silent.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(MIN_NEWCOMERS + 40)
            ]
            assert await is_live(url, trusting)
            for client in clients[:40]:
                client.settimeout(DEADLINE_S)
                assert client.recv(1) == b""
            assert await is_live(url, trusting)
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as plain:
            plain.sendall(b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n")
            assert not plain.recv(1024).startswith(b"HTTP")


# --- one port ---


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


# --- addresses of IPv6 ---


@pytest.fixture
def _has_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"this machine has no IPv6 loopback address: {error}")


@pytest.mark.usefixtures("_has_ipv6")
async def test_a_fleet_of_ipv6_addresses_hits_its_caches(deploy: Deploy) -> None:
    """Requests, KV events and the router's own listener, all over ::1."""
    async with deploy(pods=2, engine={"host": "::1"}, host="::1") as deployment:
        assert all(engine.url.startswith("http://[::1]:") for engine in deployment.engines)
        assert deployment.engines[0].kv_endpoint.startswith("tcp://[::1]:")
        answers = await converse(deployment, opening("fjords"), turns=3)
        assert int(answers[-1].headers["x-warmroute-cached-tokens"]) > 0
        assert len({answer.headers["x-warmroute-pod"] for answer in answers}) == 1
