"""Requests to an API server over TLS: its authority is checked, the token is sent and read again."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from router.config.pod_schema import KubernetesApi
from router.errors import ConfigError
from router.feeds.discovery.kube_api import KubeApi, KubeApiError
from router.frontends.http.upstream import UpstreamPool
from router.types import PodTls
from router.wiring import kube_sources
from router.wiring.kube_sources import api_server
from tests.kit.deadlines import DEADLINE_S
from tests.redis_servers.server import TlsFiles, tls_material

pytestmark = [
    pytest.mark.net,
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates"),
]
LINE = b'{"type":"MODIFIED","object":"%b"}'
LINES = [LINE % (b"x" * size) for size in (1, 5_000, 40_000, 7)]


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may stand still for as long as a router waits for a connection."""
    monkeypatch.setattr(kube_sources, "CONNECT_TIMEOUT_S", DEADLINE_S)


@dataclass
class TlsServer:
    """Answers each GET with 200, a watch with `LINES` in chunks that do not end where lines do."""

    tokens: list[str] = field(default_factory=list)
    """As received, one a request."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return writer.close()
            self.tokens += [
                line.partition(b" ")[2].decode() for line in head.split(b"\r\n") if line.startswith(b"authorization")
            ]
            if b"watch=1" not in head:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                continue
            body = b"".join(line + b"\n" for line in LINES)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for piece in (body[at : at + 3000] for at in range(0, len(body), 3000)):
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")


@asynccontextmanager
async def running(files: TlsFiles) -> AsyncIterator[tuple[TlsServer, str]]:
    """The server and its URL."""
    context, server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), TlsServer()
    context.load_cert_chain(files.certificate, files.key)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context) as listener:
        yield server, f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


def made(folder: Path, name: str) -> TlsFiles:
    """An authority of its own and a certificate."""
    (folder / name).mkdir()
    return tls_material(folder / name)


@contextmanager
def kube_api(url: str, ca: Path, token: Path) -> Iterator[KubeApi]:
    api = KubeApi(KubernetesApi(url=url, ca_file=str(ca), token_file=str(token)), api_server)
    try:
        yield api
    finally:
        api.close()


async def test_the_server_needs_a_certificate_of_the_configured_authority(tmp_path: Path) -> None:
    """No other server receives the token."""
    ours, others = made(tmp_path, "ours"), made(tmp_path, "others")
    token = tmp_path / "token"
    token.write_text("secret")
    async with running(ours) as (server, url), asyncio.timeout(DEADLINE_S):
        with kube_api(url, ours.ca, token) as api:
            assert await api.get("/api", {}) == b"{}"
        assert server.tokens == ["Bearer secret"]
        with (
            kube_api(url, others.ca, token) as api,
            pytest.raises(KubeApiError, match=f"^{url}: cannot connect: .*certificate verify failed") as refused,
        ):
            await api.get("/api", {})
        assert refused.value.status == 0
        assert server.tokens == ["Bearer secret"]


async def test_a_rotated_token_is_sent_with_the_next_request(tmp_path: Path) -> None:
    """Also over a connection that is already open. A missing file means no token."""
    files, token = made(tmp_path, "ours"), tmp_path / "token"
    async with running(files) as (server, url), asyncio.timeout(DEADLINE_S):
        with kube_api(url, files.ca, token) as api:
            for written in ("", "first", "second\n"):
                if written:
                    token.write_text(written)
                await api.get("/api", {})
        assert server.tokens == ["Bearer first", "Bearer second"]


async def test_an_authority_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    """A cluster may renew it while the router runs."""
    old, new = made(tmp_path, "old"), made(tmp_path, "new")
    async with running(new) as (_, url), asyncio.timeout(DEADLINE_S):
        with kube_api(url, old.ca, tmp_path / "token") as api:
            with pytest.raises(KubeApiError, match="certificate verify failed"):
                await api.get("/api", {})
            old.ca.write_bytes(new.ca.read_bytes())
            assert await api.get("/api", {}) == b"{}"


@pytest.mark.parametrize("content", [None, "no certificate"])
async def test_an_authority_that_cannot_be_read_is_an_error_at_the_start(tmp_path: Path, content: str | None) -> None:
    """The system's authorities must not stand in for it."""
    ca = tmp_path / "ca.crt"
    if content is not None:
        ca.write_text(content)
    with pytest.raises(
        ConfigError,
        match=rf"^discovery\.kubernetes\.api\.ca_file: .*{ca}.*ServiceAccount",
    ):
        KubeApi(KubernetesApi(url="https://10.0.0.1", ca_file=str(ca)), api_server)
    KubeApi(KubernetesApi(url="https://10.0.0.1", ca_file=""), api_server).close()
    KubeApi(KubernetesApi(url="http://10.0.0.1", ca_file=str(ca)), api_server).close()


async def test_lines_of_a_watch_are_whole_whatever_the_records_are(tmp_path: Path) -> None:
    """They come in order, and none is lost at the end."""
    files = made(tmp_path, "ours")
    async with running(files) as (_, url), asyncio.timeout(DEADLINE_S):
        with kube_api(url, files.ca, tmp_path / "token") as api:
            read = [line async for lines in api.lines("/api", {"watch": "1"}, DEADLINE_S) for line in lines]
        assert read == LINES


# --- the address ---


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [("10.0.0.1", "443", "https://10.0.0.1:443"), ("fd00::1", "6443", "https://[fd00::1]:6443")],
)
def test_the_api_server_of_the_cluster_is_the_default(
    host: str, port: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    asked: list[str] = []

    def connect(to: str, tls: PodTls) -> UpstreamPool:
        asked.append(to)
        return api_server(to, tls)

    KubeApi(KubernetesApi(ca_file=""), connect).close()
    assert asked == [url]


def test_outside_a_cluster_the_api_server_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=r"KUBERNETES_SERVICE_HOST is not set\); set discovery\.kubernetes\.api\.url"):
        KubeApi(KubernetesApi(), api_server)
