"""The pods and routers of all tests here, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live_clients.sides import Sides, running_sides


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Only asyncio, not trio."""
    return "asyncio"


@pytest.fixture(scope="session")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Sides]]:
    with running_sides(tmp_path_factory.mktemp("clients")) as found:
        yield found
