"""A pod reached over a Unix socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from loadtest.mock_engine.mock_engine import MockEngine
from tests.stories.conftest import Deploy
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward every byte in both directions."""
    try:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def test_all_requests_to_the_pod_use_the_socket(deploy: Deploy, tmp_path: Path) -> None:
    """Probes, self-test, scrapes and requests: the pod's host name does not resolve."""
    path, ports = tmp_path / "pod.sock", list[int]()

    async def through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_engine, to_engine = await asyncio.open_connection("127.0.0.1", ports[0])
        await asyncio.gather(carry(reader, to_engine), carry(from_engine, writer))

    def reach(engine: MockEngine) -> dict[str, Any]:
        ports.append(int(engine.url.rpartition(":")[2]))
        return {"url": "http://pod-at-a-socket", "socket": str(path), "kv_events": "off"}

    async with await asyncio.start_unix_server(through, path), deploy(pods=1, reach=reach) as deployment:
        first, second = [await deployment.chat(opening("coves")) for _ in range(2)]
        assert (first.status_code, second.status_code) == (200, 200)
        assert second.headers["x-warmroute-pod"] == "pod-at-a-socket"
        assert int(second.headers["x-warmroute-cached-tokens"]) > 0
        await deployment.until(lambda: deployment.program.fleet.snapshot.pods[0].load.scraped_at_s > 0)
