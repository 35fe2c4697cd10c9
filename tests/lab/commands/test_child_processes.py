"""Child processes start, stop, and report failures."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from loadtest.commands.child_processes import Child, ChildError, FleetPlan, mock_fleet, temporary_folder

pytestmark = [pytest.mark.net, pytest.mark.anyio]


async def test_engines_run_inside_the_block_and_stop_even_after_an_error(tmp_path: Path) -> None:
    """Every engine serves the model of the plan; nothing listens after the block, even after an error."""
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


async def test_the_error_of_a_failed_child_has_its_output_and_command(tmp_path: Path) -> None:
    """The error has the child's output and the command to reproduce it."""
    with pytest.raises(ChildError) as raised:
        async with mock_fleet(FleetPlan(pods=1, num_blocks=0), tmp_path):
            pytest.fail("must not start")
    assert "0 is not in the range" in str(raised.value)
    assert "mock-engine --port 0" in str(raised.value) and "--count 1" in str(raised.value)


def test_the_error_of_a_dead_child_has_its_output(tmp_path: Path) -> None:
    """The failure of the child is reported, not the error that it caused."""
    output, log = tmp_path / "out", tmp_path / "log"
    output.write_text("last words")
    log.write_text("")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    with pytest.raises(ChildError, match=r"ended with exit code 3(.|\n)*last words"):
        Child("fleet", process, output, log).check_alive()


def test_without_a_temporary_folder_the_message_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All folders of the standard library may be read-only in a container."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ChildError, match=r"missing.*set TMPDIR to a writable folder"), temporary_folder("x-"):
        pass
