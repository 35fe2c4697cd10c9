"""Do children come up, go down, and say why when they do not?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from router.cli.child_processes import Child, FleetPlan, StageError, mock_fleet

pytestmark = [pytest.mark.net, pytest.mark.anyio]


async def test_engines_answer_while_the_block_is_open_and_are_gone_even_after_an_error(tmp_path: Path) -> None:
    """Every engine serves the model of the plan; nothing listens once the block is left, whatever went wrong in it."""
    urls: list[str] = []
    async with httpx.AsyncClient(trust_env=False) as client:
        with pytest.raises(ZeroDivisionError):
            async with mock_fleet(FleetPlan(pods=2, num_blocks=256), tmp_path) as urls:
                served = [(await client.get(f"{url}/v1/models")).json()["data"][0]["id"] for url in urls]
                assert served == ["demo", "demo"]
                _ = 1 // 0
        for url in urls:
            with pytest.raises(httpx.ConnectError):
                await client.get(url)


async def test_a_child_that_fails_shows_what_it_wrote_and_how_to_run_it(tmp_path: Path) -> None:
    """A wrong plan is told in the child's own words, with the command to try it alone."""
    with pytest.raises(StageError) as raised:
        async with mock_fleet(FleetPlan(pods=1, num_blocks=256, speed_hardware="abacus"), tmp_path):
            pytest.fail("it must not come up")
    assert "no prior of 'llama-3.1-70b' on 'abacus'" in str(raised.value)
    assert "mock-engine --count 1" in str(raised.value)


def test_a_child_that_died_is_noticed_with_its_last_words(tmp_path: Path) -> None:
    """Whatever failed because a child was gone, the reader learns that it was gone."""
    output, log = tmp_path / "out", tmp_path / "log"
    output.write_text("last words")
    log.write_text("")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    with pytest.raises(StageError, match=r"ended with exit code 3(.|\n)*last words"):
        Child("fleet", process, output, log).check_alive()
