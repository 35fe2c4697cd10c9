"""A fleet that has IPv6 addresses only."""

from __future__ import annotations

import socket

import pytest

from tests.stories.conftest import Deploy
from tests.stories.test_disaggregation import open_pair
from tests.stories.test_first_light import converse, opening

__all__ = ["open_pair"]

pytestmark = [pytest.mark.net, pytest.mark.anyio]


@pytest.fixture(autouse=True)
def _has_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"this machine has no IPv6 loopback address: {error}")


async def test_a_fleet_of_ipv6_addresses_hits_its_caches(deploy: Deploy) -> None:
    """Requests, KV events and the router's own listener, all over ::1."""
    async with deploy(pods=2, engine={"host": "::1"}, host="::1") as deployment:
        assert all(engine.url.startswith("http://[::1]:") for engine in deployment.engines)
        assert deployment.engines[0].kv_endpoint.startswith("tcp://[::1]:")
        answers = await converse(deployment, opening("fjords"), turns=3)
        assert int(answers[-1].headers["x-warmroute-cached-tokens"]) > 0
        assert len({answer.headers["x-warmroute-pod"] for answer in answers}) == 1
