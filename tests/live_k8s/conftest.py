"""One real API server for all tests, and one release with two routers and three mock engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.live_k8s.api_server import ApiServer, running
from tests.live_k8s.release import NAME, Release, release, values


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """httpx leaks a socket where a time limit ends the connecting to a router that starts or stops."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with running(tmp_path_factory.mktemp("cluster")) as server:
        yield server


@pytest.fixture(scope="module")
async def installed(
    api_server: ApiServer, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Release]:
    """`helm install`, and all pods in use, in a namespace of the module."""
    namespace = request.module.__name__.rpartition(".")[2].removeprefix("test_").replace("_", "-")
    async with release(api_server, namespace, tmp_path_factory.mktemp("release")) as found:
        await found.helm("install", NAME, found.chart(), "--server-side=false", values=values())
        await found.settled()
        yield found


@pytest.fixture
async def cluster(installed: Release) -> Release:
    """The release with three engines, as installed."""
    installed.proxy.refuse = False
    await installed.upgrade()
    await installed.settled()
    return installed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests have measured."""
    for report in (one for reports in terminalreporter.stats.values() for one in reports):
        for name, value in getattr(report, "user_properties", ()):
            if getattr(report, "when", "") == "call":
                terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {name}: {value}")
