"""A pod that is reached over a Unix socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from router.sim.mock_engine import MockEngine
from tests.stories.conftest import OpenCity
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Every byte, to the end."""
    try:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def test_everything_goes_over_the_socket(open_city: OpenCity, tmp_path: Path) -> None:
    """Probes, self-test, scrapes and requests: nobody could resolve the pod's name."""
    path, ports = tmp_path / "pod.sock", list[int]()

    async def through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_engine, to_engine = await asyncio.open_connection("127.0.0.1", ports[0])
        await asyncio.gather(carry(reader, to_engine), carry(from_engine, writer))

    def reach(engine: MockEngine) -> dict[str, Any]:
        ports.append(int(engine.url.rpartition(":")[2]))
        return {"url": "http://pod-at-a-socket", "socket": str(path), "kv_events": "off"}

    async with await asyncio.start_unix_server(through, path), open_city(pods=1, reach=reach) as city:
        first, second = [await city.chat(opening("coves")) for _ in range(2)]
        assert (first.status_code, second.status_code) == (200, 200)
        assert second.headers["x-warmroute-pod"] == "pod-at-a-socket"
        assert int(second.headers["x-warmroute-cached-tokens"]) > 0
        await city.until(lambda: city.program.fleet.snapshot.pods[0].load.scraped_at_s > 0)
