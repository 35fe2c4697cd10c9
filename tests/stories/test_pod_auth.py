"""Engines with an API key: the router has its own, and the client's stays at the router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.mock_engine.mock_engine import MockEngine
from router.config.schema import Edge
from tests.stories.conftest import Deploy
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]
KEYED = {"api_key": "engine-key"}


async def test_all_requests_to_a_pod_have_the_routers_key(deploy: Deploy, tmp_path: Path) -> None:
    """Probes, self-test, scrapes and requests; the engine refuses everything else. The client's own key is not used,
    also where it would be forwarded."""
    key = tmp_path / "key"
    key.write_text("engine-key\n")

    def reach(engine: MockEngine) -> dict[str, Any]:
        return {"url": engine.url, "auth": {"bearer_file": str(key)}}

    edge = Edge(forward_headers=("authorization",))
    async with deploy(pods=1, engine=KEYED, reach=reach, edge=edge) as deployment:
        deployment.client.headers["authorization"] = "Bearer client-key"
        first, second = [await deployment.chat(opening("coves")) for _ in range(2)]
        assert (first.status_code, second.status_code) == (200, 200)
        assert int(second.headers["x-warmroute-cached-tokens"]) > 0
        await deployment.until(lambda: deployment.program.fleet.snapshot.pods[0].load.scraped_at_s > 0)
