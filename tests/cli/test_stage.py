"""Do children come up, go down, and say why when they do not?"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from router.cli.stage import FleetPlan, StageError, mock_fleet

pytestmark = [pytest.mark.net, pytest.mark.anyio]


async def test_a_fleet_answers_while_it_is_open_and_is_gone_afterwards(tmp_path: Path) -> None:
    """Every engine serves the model of the plan; nothing listens once the block is left."""
    async with httpx.AsyncClient(trust_env=False) as client:
        async with mock_fleet(FleetPlan(pods=2, num_blocks=256), tmp_path) as urls:
            served = [(await client.get(f"{url}/v1/models")).json()["data"][0]["id"] for url in urls]
            assert served == ["demo", "demo"]
        with pytest.raises(httpx.ConnectError):
            await client.get(urls[0])


async def test_a_child_that_fails_shows_what_it_wrote_and_how_to_run_it(tmp_path: Path) -> None:
    """A wrong plan is told in the child's own words, with the command to try it alone."""
    with pytest.raises(StageError) as raised:
        async with mock_fleet(FleetPlan(pods=1, num_blocks=256, speed_hardware="abacus"), tmp_path):
            pytest.fail("it must not come up")
    assert "no prior of 'llama-3.1-70b' on 'abacus'" in str(raised.value)
    assert "mock-engine --count 1" in str(raised.value)


async def test_an_error_inside_the_block_ends_the_children_too(tmp_path: Path) -> None:
    """Whatever goes wrong in the demo, no engine outlives it."""
    url = ""
    with pytest.raises(ZeroDivisionError):
        async with mock_fleet(FleetPlan(pods=1, num_blocks=256), tmp_path) as urls:
            url = urls[0]
            _ = 1 // 0
    async with httpx.AsyncClient(trust_env=False) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
