"""The operators' page: who watches, what is computed for them, and what the page may do in a browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI
from starlette.types import Message

from router.errors import Saturated
from router.frontends.admin.page_snapshot import (
    _FILE,
    EVENTS_PATH,
    INTERVAL_S,
    MAX_VIEWERS,
    SnapshotStream,
    add_page_routes,
    page_headers,
)
from router.observe.log import LINE_FIELDS

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]
PAGE = _FILE.read_bytes()


class Computed:
    """Counts how often a snapshot is computed."""

    def __init__(self) -> None:
        self.count = 0
        self.stream = SnapshotStream(self._compute)

    async def _compute(self) -> bytes:
        self.count += 1
        return b"%d" % self.count

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.stream.run())
        await asyncio.sleep(0)
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def seen_for(stream: SnapshotStream, seconds: float) -> list[bytes]:
    """The events of a viewer that reads at once and leaves after some seconds."""
    found: list[bytes] = []

    async def read() -> None:
        with stream.viewer() as events:
            async for event in events:
                found.append(event)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(read(), seconds)
    return found


async def test_nothing_is_computed_while_nobody_watches() -> None:
    computed = Computed()
    async with computed.running():
        await asyncio.sleep(60)
        assert computed.count == 0
        await seen_for(computed.stream, 2.5 * INTERVAL_S)
        before = computed.count
        await asyncio.sleep(60)
        assert computed.count == before == 3


async def test_all_viewers_share_one_snapshot_a_second() -> None:
    computed = Computed()
    async with computed.running():
        seen = await asyncio.gather(*(seen_for(computed.stream, 5.5 * INTERVAL_S) for _ in range(MAX_VIEWERS)))
    assert computed.count == 6
    assert all(events == [b"data: %d\n\n" % number for number in range(1, 7)] for events in seen)


async def test_a_slow_viewer_skips_snapshots() -> None:
    computed = Computed()
    async with computed.running():
        with computed.stream.viewer() as events:
            assert await anext(events) == b"data: 1\n\n"
            await asyncio.sleep(9.5 * INTERVAL_S)
            assert await anext(events) == b"data: 11\n\n"


async def test_the_number_of_viewers_is_bounded() -> None:
    """One that leaves makes room for another."""
    computed = Computed()
    async with computed.running():
        viewers = [asyncio.create_task(seen_for(computed.stream, 2 * INTERVAL_S)) for _ in range(MAX_VIEWERS)]
        await asyncio.sleep(INTERVAL_S)
        with pytest.raises(Saturated), computed.stream.viewer():
            pass
        await asyncio.gather(*viewers)
        assert await seen_for(computed.stream, 2 * INTERVAL_S)


async def test_pages_that_are_opened_at_once_do_not_exceed_the_limit() -> None:
    """A viewer counts before its first byte is sent. One that is gone by then, too, makes room for another."""
    computed = Computed()
    app, started = FastAPI(), []
    add_page_routes(app, computed.stream)

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            started.append(message["status"])
            await asyncio.sleep(60)

    async def receive() -> Message:
        await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "GET", "path": EVENTS_PATH, "headers": [], "query_string": b""}
    async with computed.running():
        tasks = [asyncio.create_task(app({**scope}, receive, send)) for _ in range(MAX_VIEWERS + 4)]
        await asyncio.sleep(1)
        assert (started.count(200), computed.stream.viewers) == (MAX_VIEWERS, MAX_VIEWERS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert computed.stream.viewers == 0


async def test_viewers_are_released_when_the_router_stops() -> None:
    computed = Computed()
    async with computed.running() as task:
        with computed.stream.viewer() as events:
            await anext(events)
            task.cancel()
            assert [event async for event in events] == []
        with computed.stream.viewer() as events:
            assert [event async for event in events] == [], "a page that is opened too late"


def test_the_page_may_run_its_own_script_only_and_reach_its_own_listener_only() -> None:
    """By hashes, so that an injected script or style does not run; and strings cannot become HTML."""
    policy = page_headers(PAGE)["content-security-policy"]
    for wanted in ("default-src 'none'", "script-src 'sha256-", "style-src 'sha256-", "connect-src 'self'"):
        assert wanted in policy
    assert "require-trusted-types-for 'script'" in policy and "unsafe" not in policy
    changed = page_headers(PAGE.replace(b"use strict", b"use strict "))["content-security-policy"]
    assert changed != policy


def test_the_page_names_nothing_outside_and_writes_no_html() -> None:
    allowed = {b"http://www.w3.org/2000/svg"}
    """A namespace, which is not fetched."""
    assert set(re.findall(rb"https?://[^\"'\s]+", PAGE)) <= allowed
    assert not re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", PAGE)
    assert not re.search(rb"\s(on\w+|style)=[\"']", PAGE)


def test_the_page_computes_nothing_from_metrics() -> None:
    """Its figures are those of the snapshot."""
    assert b"warmroute_" not in PAGE


def test_a_fact_of_a_request_has_the_name_that_it_has_in_the_log() -> None:
    """In the list of recent decisions and in the details, so that what is read here is found there."""
    logged = {name.removesuffix("_ms").replace("_", " ") for name in LINE_FIELDS}
    details = re.search(r"function facts\(.*?\n}", PAGE.decode(), re.DOTALL)
    headings = re.search(r'<table id="recent".*?</thead>', PAGE.decode(), re.DOTALL)
    assert details is not None and headings is not None
    named = set(re.findall(r'\["([^"]+)", ', details[0]))
    assert named - logged == {"tenant"}, "the log does not have it"
    listed = set(re.findall(r">([^<>]+)</th>", headings[0]))
    assert listed - logged == {"request", "time", "TTFT expected", "actual"}
