"""A pod that cannot be used says why, in the log and in /admin/pods."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_engine import running_engines
from tests.kit.closed_port import closed_port
from tests.kit.raw_pods import RawPod, answering
from tests.redis_servers.server import tls_material
from tests.stories.conftest import Deploy

pytestmark = [pytest.mark.net, pytest.mark.anyio]
NO_MODELS = b'HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{"data": []}'


@dataclass(frozen=True)
class Servers:
    """What the URLs of pods lead to."""

    engine: str
    keyed: str
    """An engine that asks for a key."""
    nobody: str
    no_models: str
    tls: str
    """With a certificate of a private authority."""


@asynccontextmanager
async def serving(keyed: str, engine: str, folder: Path) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:

        async def lists_no_models(context: ssl.SSLContext | None = None) -> str:
            pod = RawPod((answering(NO_MODELS),))
            server = await stack.enter_async_context(await asyncio.start_server(pod, "127.0.0.1", 0, ssl=context))
            return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

        files, context = tls_material(folder), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(files.certificate, files.key)
        nobody = stack.enter_context(closed_port())
        yield Servers(
            *(engine, keyed, f"http://127.0.0.1:{nobody}"),
            *(f"http://{await lists_no_models()}", f"https://{await lists_no_models(context)}"),
        )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")
async def test_a_pod_that_cannot_be_used_says_why(
    deploy: Deploy, engine_config: Callable[..., MockEngineConfig], tmp_path: Path
) -> None:
    """In /admin/pods, and once in the log. A pod that is ready has no reason."""
    with capture_logs() as logs:
        async with (
            deploy(pods=1) as deployment,
            running_engines([engine_config(api_key="engine-key")]) as (keyed,),
            serving(keyed.url, deployment.engines[0].url, tmp_path) as at,
        ):
            expected = {
                at.nobody: f"connection refused by {at.nobody[7:]}; check that the engine runs",
                "http://pod.invalid:8000": "unknown host name 'pod.invalid'; correct pods[].url",
                f"{at.engine}/v1/": "404 Not Found from /health; remove /v1, which the router appends, from pods[].url",
                f"{at.engine}/team": "404 Not Found from /health; check the path /team of pods[].url",
                at.keyed: "401 Unauthorized from /health; set pods[].auth.bearer_file",
                at.no_models: "/v1/models lists no models; check",
                at.tls: "TLS certificate not trusted (",
                at.engine.replace("http:", "https:"): "TLS handshake failed",
            }
            logged, pods = dict[str, Any](), dict[str, Any]()
            entries: list[dict[str, str]] = [{"url": url, "id": f"pod {n}"} for n, url in enumerate(expected)]
            for entry in entries:
                assert (await deployment.admin.post("/admin/pods", json=entry)).status_code == 201, entry

            async def all_are_explained() -> bool:
                logged.update({line["pod"]: line for line in logs if line["event"] == "pod cannot be used"})
                pods.update({pod["id"]: pod for pod in await deployment.pods()})
                return all(pods[entry["id"]]["state_reason"] and entry["id"] in logged for entry in entries)

            await deployment.until(all_are_explained)
    for entry, (url, reason) in zip(entries, expected.items(), strict=True):
        pod, line = pods[entry["id"]], logged[entry["id"]]
        assert pod["state"] == "joining" and pod["state_reason"].startswith(reason), url
        assert (line["log_level"], line["reason"]) == ("warning", pod["state_reason"]), url
    assert pods["pod 6"]["state_reason"].endswith("set pods[].tls.ca_file to the certificate of its authority")
    (well,) = [pod for pod in pods.values() if pod["id"] not in logged]
    assert (well["state"], well["state_reason"]) == ("ready", "")
