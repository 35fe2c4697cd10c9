"""What every test has: asyncio as the only event loop, and no network unless it says so."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from collections import Counter
from collections.abc import Generator, Iterator
from functools import cache
from typing import Any

import pytest
from httpx import _config as httpx_config
from httpx._transports import default as httpx_transports
from hypothesis import HealthCheck, settings

TIMELESS: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", max_examples=15, derandomize=True, **TIMELESS)  # `make quick`
settings.register_profile("ci", max_examples=40, derandomize=True, **TIMELESS)  # `make test`: the same examples in each
settings.register_profile("night", max_examples=1000, **TIMELESS)  # other examples every night
settings.load_profile("ci")

SLOWEST, SLOW_S = 5, 1.0
MOST_LINE = 110


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without searches for cycles, and exempt what was collected from later ones: with nine thousand tests in
    memory each full search takes half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The slowest tests, and what was skipped and why."""
    reports = [report for kind in terminalreporter.stats.values() for report in kind]
    taken_s, skipped = Counter[str](), Counter[str]()
    for report in reports:
        if isinstance(report, pytest.TestReport):
            taken_s[report.nodeid] += report.duration  # type: ignore[assignment]
        if getattr(report, "skipped", False) and isinstance(report.longrepr, tuple):
            skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
    lines = [f"{seconds:6.1f} s  {name}" for name, seconds in taken_s.most_common(SLOWEST) if seconds >= SLOW_S]
    lines += [f"{number:6} skipped: {reason}" for reason, number in skipped.most_common()]
    if lines:
        terminalreporter.section("slowest, and skipped")
        for line in lines:
            terminalreporter.line(line if len(line) <= MOST_LINE else f"{line[: MOST_LINE - 3]}...")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """asyncio alone: nothing here runs on trio."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def _shared_certificates() -> Iterator[None]:
    """Read the certificates of the system once: httpx reads them for every client, in 20 ms."""
    create, shared = httpx_config.create_ssl_context, cache(httpx_config.create_ssl_context)

    def created(verify: ssl.SSLContext | str | bool = True, **options: Any) -> ssl.SSLContext:
        return shared(verify, **options) if isinstance(verify, bool) else create(verify, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx_transports, "create_ssl_context", created)
        yield


@pytest.fixture(scope="session", autouse=True)
def _late_connections_are_not_lost() -> Iterator[None]:
    """Serve a connection that was accepted just before its server was closed. asyncio forgets it, open, until a search
    for cycles finds it (https://github.com/python/cpython/issues/109564); uvloop does not."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_make_socket_transport", "_make_ssl_transport"):
            make = getattr(asyncio.SelectorEventLoop, name)

            def made(*args: Any, make: Any = make, server: Any = None, **options: Any) -> Any:
                return make(*args, server=server if server and server.is_serving() else None, **options)

            patch.setattr(asyncio.SelectorEventLoop, name, made)
        yield


@pytest.fixture(autouse=True)
def _no_network_unless_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core test that opens a connection is a test of something else: it fails."""
    if request.node.get_closest_marker("net"):
        return

    def refuse(self: socket.socket, *args: Any) -> None:
        raise AssertionError("this test is not marked `net` and must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "bind", refuse)
