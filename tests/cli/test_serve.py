"""`warmroute serve` raises its limit of open files."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from router.cli.child_processes import child, free_port
from router.cli.serve import allow_all_open_files

FEW = 256


@pytest.fixture
def few_open_files() -> Iterator[int]:
    """The hard limit of this process, while its soft limit is low."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_to_the_hard_limit(few_open_files: int) -> None:
    assert allow_all_open_files() == few_open_files
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (few_open_files, few_open_files)


@pytest.mark.net
@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are read from /proc")
async def test_a_running_router_has_raised_its_limit(few_open_files: int, tmp_path: Path) -> None:
    """The child inherits a low limit; /proc shows the limit it runs with."""
    port = free_port()
    async with httpx.AsyncClient(trust_env=False) as client:

        async def lives() -> httpx.Response | None:
            try:
                return await client.get(f"http://127.0.0.1:{port}/livez")
            except httpx.TransportError:
                return None

        with child("router", ["serve", "--port", str(port)], tmp_path) as router:
            await router.until(lives)
            found = limits_of(router.process.pid)
    assert found == (few_open_files, few_open_files)


def limits_of(pid: int) -> tuple[int, int]:
    """Soft and hard limit of that process's open files."""
    found = re.search(r"^Max open files +(\d+) +(\d+)", Path(f"/proc/{pid}/limits").read_text(), re.MULTILINE)
    assert found
    return int(found.group(1)), int(found.group(2))
