"""`warmroute serve` on a TLS listener, and on all addresses of the machine."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from loadtest.commands.child_processes import Child, child
from router.frontends.http.client_deadlines import MIN_NEWCOMERS
from tests.kit.deadlines import DEADLINE_S
from tests.redis_servers.server import TlsFiles, free_port, tls_material

pytestmark = [
    pytest.mark.net,
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates"),
]


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
