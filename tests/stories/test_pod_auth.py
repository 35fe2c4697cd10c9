"""Engines with an API key: the router has its own, and the client's stays at the router."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from loadtest.mock_engine.faults import Fault, FaultKind
from loadtest.mock_engine.mock_engine import MockEngine
from router.config.schema import Edge
from tests.stories.conftest import Deploy
from tests.stories.test_failures import holder_of
from tests.stories.test_fault_matrix import attempts
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


async def test_a_pod_whose_key_is_unknown_gets_no_request(deploy: Deploy) -> None:
    """Its probes fail; the client's key is not tried."""
    async with deploy(pods=1, engine=KEYED, wait=False) as deployment:
        deployment.client.headers["authorization"] = "Bearer engine-key"
        assert (await deployment.chat(opening("coves"))).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("has_key", "status"), [(True, 502), (False, 401)])
async def test_a_pod_that_refuses_the_routers_key_is_at_fault(
    deploy: Deploy, tmp_path: Path, has_key: bool, status: int, stream: bool
) -> None:
    """The client's key may be right: a 401 would send its owner looking for the mistake. The key is not shown."""
    key = tmp_path / "key"
    key.write_text("engine-key\n")

    def reach(engine: MockEngine) -> dict[str, Any]:
        return {"url": engine.url} | ({"auth": {"bearer_file": str(key)}} if has_key else {})

    async with deploy(pods=1, reach=reach) as deployment:
        deployment.engines[0].inject(Fault(kind=FaultKind.STATUS, status=HTTPStatus.UNAUTHORIZED))
        answer = await deployment.chat(opening("coves"), stream=stream)
        assert answer.status_code == status
        if has_key:
            assert "does not accept the router's key (`auth` of the pod)" in answer.json()["error"]["message"]
            assert "engine-key" not in answer.text
        assert (await deployment.chat(opening("coves"))).status_code == 200


async def test_another_pod_serves_where_one_refuses_the_routers_key(deploy: Deploy, tmp_path: Path) -> None:
    """The client sees no error."""
    key = tmp_path / "key"
    key.write_text("engine-key\n")

    def reach(engine: MockEngine) -> dict[str, Any]:
        return {"url": engine.url, "auth": {"bearer_file": str(key)}}

    async with deploy(pods=2, reach=reach) as deployment:
        at = await holder_of(deployment, "coves")
        deployment.engines[at].inject(Fault(kind=FaultKind.STATUS, status=HTTPStatus.UNAUTHORIZED))
        assert (await deployment.chat(opening("coves"))).status_code == 200
        assert await attempts(deployment, at, "upstream_broken") == 1
