"""The log line of each request."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from select import PIPE_BUF
from typing import Any, Literal

import msgspec
import pytest
import structlog
from msgspec.structs import replace

from router.decision import Candidate, Cost, Direct
from router.observe.ended import Ended
from router.observe.log import (
    MAX_FIELD_CHARACTERS,
    MAX_FIELD_ITEMS,
    LogLevel,
    RequestLog,
    configure_logging,
)
from router.types import Endpoint
from tests.kit.scenes import pod

FIELDS: dict[str, Any] = {"id": "r-1", "endpoint": "chat", "model": "m", "pod": "a", "policy": "p", "status": 200}
ENDED_AT_S = datetime(2026, 1, 2, tzinfo=UTC).timestamp()
ENDED = Ended(
    "r-1",
    ENDED_AT_S - 2,
    "m",
    "chat",
    "ok",
    200,
    policy="p",
    ttft_ms=12.34,
    e2e_ms=2000.0,
    served=Candidate(Direct(pod("a")), Cost((), (), 0.0)),
)


def lines(log_format: Literal["console", "json"], **facts: Any) -> list[str]:
    written: list[str] = []
    RequestLog(log_format, write=written.append).ended(replace(ENDED, **facts))
    return written


def test_a_json_line_holds_the_fields_and_what_structlog_adds() -> None:
    """Event, level and time."""
    (line,) = lines("json")
    assert line.endswith("\n")
    found = msgspec.json.decode(line)
    assert datetime.fromisoformat(found.pop("timestamp")).timestamp() == ENDED_AT_S, "when the request ended"
    added = {"event": "request", "level": "info"}
    assert found == {**FIELDS, **added, "result": "ok", "ttft_ms": 12.3, "e2e_ms": 2000.0}


def test_lines_are_written_together() -> None:
    """In pieces that a pipe takes at once; a longer line alone. When the log is closed, what waits is written."""
    written, timers = list[str](), list[Callable[[], None]]()

    log = RequestLog("json", 1.0, written.append, lambda _, call: timers.append(call))
    for number in range(20):
        policy = "é" * (PIPE_BUF if number == 3 else PIPE_BUF // 10)
        log.ended(replace(ENDED, id=f"r-{number}", policy=policy))
    assert not written and len(timers) == 1
    timers[0]()
    assert all(len(piece.encode()) <= PIPE_BUF or piece.count("\n") == 1 for piece in written)
    assert len(written) < 20
    log.ended(replace(ENDED, id="r-20"))
    log.close()
    log.ended(replace(ENDED, id="r-21"))
    found = [msgspec.json.decode(line)["id"] for line in "".join(written).splitlines()]
    assert found == [f"r-{number}" for number in range(22)]


def test_a_console_line_is_readable() -> None:
    """The event first, then fields in order."""
    (line,) = lines("console")
    time, rest = line.split(" ", 1)
    datetime.fromisoformat(time)
    fields = " ".join(f"{name}={value}" for name, value in FIELDS.items())
    assert rest == f"[info     ] request  {fields} result=ok ttft_ms=12.3 e2e_ms=2000.0\n"


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_fields_without_a_value_are_left_out(log_format: Literal["console", "json"]) -> None:
    """A request that reached no pod has no status; a status of 0 or no cached tokens are values."""
    (line,) = lines(log_format, served=None, status=0, cached_tokens=0)
    assert "pod" not in line
    assert "status" not in line
    assert "cached_tokens" in line


def test_a_line_says_why_a_fallback_served() -> None:
    (line,) = lines("json", name="gpt-4o", fallback="no_ready_pod")
    found = msgspec.json.decode(line)
    assert (found["name"], found["fallback"]) == ("gpt-4o", "no_ready_pod")


def test_a_client_cannot_forge_a_line() -> None:
    """Control characters and spaces of a model's name are quoted."""
    (line,) = lines("console", model="m\n2026-01-01 [info     ] request  id=forged")
    assert line.count("\n") == 1
    assert r"model='m\n2026-01-01 [info     ] request  id=forged'" in line


def test_a_quoted_endpoint_is_its_path() -> None:
    """As in a line without quotes."""
    (line,) = lines("console", endpoint=Endpoint.CHAT, model="a b")
    assert "endpoint='/v1/chat/completions' model='a b'" in line


@pytest.mark.parametrize(("share", "written"), [(1.0, 100), (0.25, 25), (0.01, 1)])
def test_a_share_of_the_requests_is_written(share: float, written: int) -> None:
    """Evenly: one in every 1 / share."""
    lines: list[str] = []
    log = RequestLog("json", share, lines.append)
    for _ in range(100):
        log.ended(ENDED)
    assert len(lines) == written


def test_a_long_field_is_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    """Also a traceback, of which the beginning and the end remain."""
    configure_logging("json")
    try:
        raise ValueError("x" * 10 * MAX_FIELD_CHARACTERS + " the end")
    except ValueError:
        structlog.get_logger().exception("failed", models=["m"] * 1000, other=5)
    structlog.reset_defaults()
    found = msgspec.json.decode(capsys.readouterr().err)
    assert len(found["exception"]) <= MAX_FIELD_CHARACTERS + 5
    assert found["exception"].startswith("Traceback") and found["exception"].endswith("the end")
    assert (len(found["models"]), found["other"]) == (MAX_FIELD_ITEMS, 5)


@pytest.fixture
def restored() -> Iterator[None]:
    """Undoes the configuration of the log."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.contextvars.clear_contextvars()
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("restored")
def test_every_line_is_json_where_the_log_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Also those of requests and of libraries."""
    configure_logging("auto")
    structlog.get_logger().info("pod state changed", pod="a")
    logging.getLogger("a.library").error("%d tasks cancelled", 2)
    RequestLog("auto").ended(ENDED)
    found = [msgspec.json.decode(line) for line in capsys.readouterr().err.splitlines()]
    assert [one["event"] for one in found] == ["pod state changed", "2 tasks cancelled", "request"]
    assert [one["level"] for one in found] == ["info", "error", "info"]
    assert all("timestamp" in one for one in found)


@pytest.mark.usefixtures("restored")
def test_lines_are_readable_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As without `auto`."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    configure_logging("auto")
    structlog.get_logger().info("pod state changed", pod="a")
    RequestLog("auto").ended(ENDED)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("info" in line and not line.startswith("{") for line in lines)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(("level", "shown"), [("debug", 3), ("info", 2), ("error", 0)])
def test_less_important_lines_are_omitted(capsys: pytest.CaptureFixture[str], level: LogLevel, shown: int) -> None:
    """`--log-level`."""
    configure_logging("auto", level)
    log = structlog.get_logger()
    for write in (log.debug, log.info, log.warning):
        write("x")
    assert len(capsys.readouterr().err.splitlines()) == shown
