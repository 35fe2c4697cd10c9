"""A pod that cannot be used says why, in the log and in /admin/pods."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from loadtest.mock_engine.mock_engine import MockEngine
from tests.proxy.test_upstream import ScriptedPod, answering
from tests.redis_servers.server import free_port, tls_material
from tests.stories.conftest import Deploy, Deployment

pytestmark = [pytest.mark.net, pytest.mark.anyio]
NO_MODELS = b'HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{"data": []}'


async def reason_of(deploy: Deploy, reach: Callable[[MockEngine], dict[str, Any]], **engine: Any) -> tuple[str, str]:
    """The reason in /admin/pods, and that in the log; waits for both."""
    with capture_logs() as logs:
        async with deploy(pods=1, engine=engine, reach=reach, wait=False) as deployment:
            await deployment.until(lambda: is_explained(deployment))
            [pod] = await deployment.pods()
    lines = [line for line in logs if line["event"] == "pod cannot be used"]
    assert [line["log_level"] for line in lines] == ["warning"], lines
    assert (pod["state"], lines[0]["pod"]) == ("joining", pod["id"])
    return pod["state_reason"], lines[0]["reason"]


async def is_explained(deployment: Deployment) -> bool:
    return any(pod["state_reason"] for pod in await deployment.pods())


async def test_a_refused_connection(deploy: Deploy) -> None:
    """No process listens on the port."""
    port = free_port()
    shown, logged = await reason_of(deploy, lambda _: {"url": f"http://127.0.0.1:{port}"})
    assert shown == logged
    assert shown.startswith(f"connection refused by 127.0.0.1:{port}; check that the engine runs")


async def test_an_unknown_host_name(deploy: Deploy) -> None:
    """A name that no resolver knows."""
    shown, logged = await reason_of(deploy, lambda _: {"url": "http://pod.invalid:8000"})
    assert shown == logged
    assert shown.startswith("unknown host name 'pod.invalid'; correct pods[].url")


async def test_a_url_with_a_path_of_the_api(deploy: Deploy) -> None:
    """The router appends /v1 itself."""
    shown, logged = await reason_of(deploy, lambda engine: {"url": f"{engine.url}/v1/"})
    assert shown == logged
    assert shown == "404 Not Found from /health; remove /v1, which the router appends, from pods[].url"


async def test_a_url_with_a_wrong_prefix(deploy: Deploy) -> None:
    """A prefix may be right: it is only named."""
    shown, logged = await reason_of(deploy, lambda engine: {"url": f"{engine.url}/team"})
    assert shown == logged
    assert shown == "404 Not Found from /health; check the path /team of pods[].url"


async def test_a_missing_key(deploy: Deploy) -> None:
    """The engine asks for one."""
    shown, logged = await reason_of(deploy, lambda engine: {"url": engine.url}, api_key="engine-key")
    assert shown == logged
    assert shown.startswith("401 Unauthorized from /health; set pods[].auth.bearer_file")


async def test_a_wrong_key(deploy: Deploy, tmp_path: Path) -> None:
    """The file is named, the key is not."""
    key = tmp_path / "key"
    key.write_text("canary7sesame")
    auth = {"bearer_file": str(key)}
    shown, logged = await reason_of(deploy, lambda engine: {"url": engine.url, "auth": auth}, api_key="engine-key")
    assert shown == logged
    assert shown == f"401 Unauthorized; the engine does not accept the key of {key}"


async def test_no_models(deploy: Deploy) -> None:
    """The engine answers, with an empty list."""
    server = await asyncio.start_server(ScriptedPod((answering(NO_MODELS),)), "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        shown, logged = await reason_of(deploy, lambda _: {"url": url})
    assert shown == logged
    assert shown.startswith("/v1/models lists no models; check")


@asynccontextmanager
async def tls_engine(folder: Path) -> AsyncIterator[str]:
    """The URL of a server with a certificate of a private authority."""
    files = tls_material(folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    async with await asyncio.start_server(ScriptedPod((answering(NO_MODELS),)), "127.0.0.1", 0, ssl=context) as server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")
async def test_a_certificate_that_is_not_trusted(deploy: Deploy, tmp_path: Path) -> None:
    """It is from a private authority."""
    async with tls_engine(tmp_path) as url:
        shown, logged = await reason_of(deploy, lambda _: {"url": url})
    assert shown == logged
    assert shown.startswith("TLS certificate not trusted (")
    assert shown.endswith("set pods[].tls.ca_file to the certificate of its authority")


async def test_tls_to_a_port_without_tls(deploy: Deploy) -> None:
    """An https URL of an engine that speaks plain HTTP."""
    shown, logged = await reason_of(deploy, lambda engine: {"url": engine.url.replace("http:", "https:")})
    assert shown == logged
    assert shown.startswith("TLS handshake failed")


async def test_the_reason_ends_when_the_pod_is_ready(deploy: Deploy) -> None:
    """A ready pod has none."""
    async with deploy(pods=1) as deployment:
        [pod] = await deployment.pods()
    assert (pod["state"], pod["state_reason"]) == ("ready", "")
