"""A tenant that opens all connections, and finishes no request, keeps nobody else out."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from router.config.schema import Limits
from tests.stories.conftest import Deploy

pytestmark = [pytest.mark.anyio, pytest.mark.net]
KEYS = {"evil": "sk-evil", "good": "sk-good"}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nauthorization: Bearer sk-evil\r\ncontent-length: 99\r\n\r\n{"
CONNECTIONS = 80


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    """Two tenants; the first may send one request at a time."""
    file = tmp_path / "tenants.yaml"
    evil, good = (sha256(key.encode()).hexdigest() for key in KEYS.values())
    file.write_text(f"""
tenants:
- {{name: evil, keys: [{evil}], quotas: [{{concurrent_requests: 1}}]}}
- {{name: good, keys: [{good}]}}
""")
    return file


@pytest.mark.parametrize("sent", [b"", HEAD[:40], HEAD], ids=["nothing", "half a head", "a head and a byte"])
async def test_connections_of_one_tenant_refuse_no_request_of_another(
    deploy: Deploy, tenants: Path, sent: bytes
) -> None:
    """It opens each again when it is closed, from the same address."""
    async with deploy(1, tenants=tenants, limits=Limits(max_connections=64)) as deployment:
        url, opened = deployment.client.base_url, asyncio.Semaphore(0)

        async def hold() -> None:
            while True:
                reader, writer = await asyncio.open_connection(url.host, url.port)
                try:
                    writer.write(sent)
                    opened.release()
                    while await reader.read(4096):
                        pass
                except ConnectionError:
                    pass
                finally:
                    writer.close()

        holders = [asyncio.create_task(hold()) for _ in range(CONNECTIONS)]
        for _ in holders:
            await opened.acquire()
        statuses = []
        for _ in range(30):
            async with httpx.AsyncClient(base_url=url, headers={"authorization": "Bearer sk-good"}) as client:
                chat = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
                statuses.append((await client.post("/v1/chat/completions", json=chat)).status_code)
        for holder in holders:
            holder.cancel()
        await asyncio.gather(*holders, return_exceptions=True)
        assert statuses == [200] * 30
