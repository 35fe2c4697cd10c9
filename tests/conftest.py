"""What every test has: asyncio as the only event loop, and no network unless it says so."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("no clock", deadline=None)  # timings are benchmarks, never tests
settings.register_profile("quick", deadline=None, max_examples=15)  # `make quick`
settings.load_profile("no clock")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """asyncio alone: nothing here runs on trio."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_network_unless_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core test that opens a connection is a test of something else: it fails."""
    if request.node.get_closest_marker("net"):
        return

    def refuse(self: socket.socket, *args: Any) -> None:
        raise AssertionError("this test is not marked `net` and must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "bind", refuse)
