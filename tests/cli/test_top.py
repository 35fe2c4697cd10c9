"""`warmroute top`: what fits in a terminal, and its figures."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from router.cli.top_view import Snapshot, TopView
from router.frontends.admin.page_figures import BEYOND, MetricsGrowth, PageFigures, Quantiles
from router.frontends.admin.page_notices import Notice
from router.frontends.admin.page_snapshot import DecisionRow, PodRow
from tests.cli.conftest import Typed

DEADLINE_S = 30.0
HOSTILE = "[red]x\x1b[31m\u202e\n" + "y" * 200


def figures(requests: float = 10.0) -> PageFigures:
    """First tokens took 8 ms; hits saved ten times as much as with round robin."""
    return msgspec.structs.replace(
        MetricsGrowth({}, {}).figures(),
        requests=1.1 * requests,
        failures=requests / 10,
        ttft_s=Quantiles(requests, p50=0.008, p95=BEYOND),
        token_shares={"available": 0.9, "captured": 0.5, "delivered": None},
        saved_s={"chosen": 5.0 * requests, "round_robin": 0.5 * requests},
        saved_gpu_s={"chosen": 20.0 * requests, "round_robin": 1.0},
    )


def snapshot(pods: int = 3, **facts: Any) -> Snapshot:
    usual: dict[str, Any] = {
        "at_s": 100.0,
        "span_s": 10.0,
        "in_flight": 2.0,
        "last_minute": figures(100.0),
        "since_start": figures(),
        "pods": [PodRow(f"pod-{number}", "vllm", ["m"], load_age_s=0.1) for number in range(pods)],
        "decisions": [DecisionRow(f"r{number}", 1.0, "m", "pod-1", "p") for number in range(30)],
    }
    return Snapshot(**usual | facts)


def drawn(view: TopView, width: int = 80, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(view)
    return captured.get().splitlines()


def view_of(found: Snapshot, of_all: bool = False) -> TopView:
    view = TopView("http://router", of_all=of_all)
    view.add(found)
    return view


@given(
    st.integers(0, 600),
    st.integers(0, 30),
    st.integers(0, 9),
    st.sampled_from([(80, 24), (80, 16), (40, 24), (200, 60)]),
)
def test_it_fits_the_terminal(pods: int, decisions: int, notices: int, size: tuple[int, int]) -> None:
    """However many pods, decisions and notices there are, with any names."""
    rows = [PodRow(f"{HOSTILE}{number}", "vllm", [HOSTILE], state_reason=HOSTILE) for number in range(pods)]
    recent = [DecisionRow(HOSTILE, 1.0, HOSTILE, HOSTILE, "p", workload=HOSTILE) for _ in range(decisions)]
    found = snapshot(pods=0, notices=[Notice("slow", HOSTILE)] * notices)
    found.pods, found.decisions = rows, recent
    lines = drawn(view_of(found), *size)
    assert len(lines) <= size[1]
    assert max(map(len, lines)) <= size[0]
    assert not any(char in line for line in lines for char in "\x1b\u202e")


def test_80_columns_show_every_figure() -> None:
    """Rates are those of the last minute."""
    lines = drawn(view_of(snapshot(since_start=figures(110.0))))
    text = "\n".join(lines)
    for wanted in ("11.0 requests/s", "2 in flight", "10 failed", "p50 8 ms, p95 more", "pods ready 3 of 3"):
        assert wanted in text
    assert "available 90%, captured 50%, delivered -" in text
    assert "hits saved 500.0 s prefill (round robin 50.0 s), in all 0.611 GPU-h" in text
    assert "…" not in text
    assert [line.split()[0] for line in lines if line.startswith("pod-")] == ["pod-0", "pod-1", "pod-2"]


def test_one_snapshot_shows_sums_and_every_pod() -> None:
    lines = drawn(view_of(snapshot(pods=400, price=3.6, currency="EUR"), of_all=True))
    assert sum(line.startswith("pod-") for line in lines) == 400
    assert any("11 requests since start" in line for line in lines)
    assert any("in all 0.0556 GPU-h, 0.20 EUR" in line for line in lines)


def test_pods_that_do_not_fit_are_counted() -> None:
    lines = drawn(view_of(snapshot(pods=400, pods_not_shown=100)))
    shown = sum(line.startswith("pod-") for line in lines)
    assert f"and {500 - shown} more pods" in lines


def test_a_pod_shows_why_it_needs_attention() -> None:
    ejected = PodRow(
        "a", "vllm", ["m"], state="ejected", state_reason="refused", matching="off", kv_events="incomplete"
    )
    ejected = msgspec.structs.replace(ejected, matching_reason="self-test mismatch: token 3 differs")
    found = snapshot()
    found.pods = [ejected]
    (line,) = [line for line in drawn(view_of(found), width=160) if line.startswith("a ")]
    assert "refused; self-test mismatch: token 3 differs; KV events incomplete" in line and "off" in line


def test_no_rate_is_invented_at_the_first_snapshot() -> None:
    assert any("- requests/s" in line for line in drawn(view_of(snapshot(span_s=0.0))))


# --- the command ---


@contextmanager
def router(events: int = 10**6) -> Iterator[str]:
    """The URL of a listener that sends some snapshots, ten a second."""
    stopping = threading.Event()

    class Events(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_refused = self.headers.get("authorization") == "Bearer wrong"
            self.send_response(401 if is_refused else 200)
            self.end_headers()
            if is_refused:
                return
            for number in range(events):
                if stopping.is_set():
                    return
                body = msgspec.json.encode(snapshot(at_s=100.0 + number))
                with suppress(OSError):  # the command has ended
                    self.wfile.write(b"data: " + body + b"\n\n")
                stopping.wait(0.1)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Events)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        stopping.set()
        server.shutdown()
        server.server_close()
        thread.join(DEADLINE_S)


@pytest.mark.net
def test_without_a_terminal_one_snapshot_is_printed_without_colors(typed: Typed) -> None:
    with router() as url:
        ended = typed("top", "--url", url)
    assert ended.code == 0 and "pods ready 3 of 3" in ended.out and "\x1b" not in ended.out


@pytest.mark.net
def test_a_router_that_does_not_run_is_an_error_of_one_line(typed: Typed) -> None:
    ended = typed("top", "--once", "--url", "http://127.0.0.1:9")
    assert ended.code == 1 and "Does the router run?" in ended.err and len(ended.err.splitlines()) == 1


@pytest.mark.net
def test_a_refused_token_is_an_error(typed: Typed, tmp_path: Any) -> None:
    (tmp_path / "token").write_text("wrong\n")
    with router() as url:
        ended = typed("top", "--once", "--url", url, "--bearer-file", tmp_path / "token")
    assert ended.code == 1 and "answered 401" in ended.err


CONTROLLED = (
    "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "import sys; sys.argv[0] = 'warmroute'; from router.cli import main; main()"
)
"""A program in a terminal that sends it Ctrl-C as a signal."""


def read_until(terminal: int, wanted: bytes) -> bytes:
    """What is written to the terminal, until it contains `wanted`."""
    found, deadline_s = b"", time.monotonic() + DEADLINE_S
    while wanted not in found:
        assert select.select([terminal], [], [], max(deadline_s - time.monotonic(), 0))[0], found[-500:]
        found += os.read(terminal, 65536)
    return found


@pytest.mark.net
@pytest.mark.parametrize("end", [b"q", b"\x03"])
def test_in_a_terminal_it_is_drawn_again_until_a_key_ends_it(end: bytes) -> None:
    """q or Ctrl-C; then the terminal is as before. The figures of the second draw are rates."""
    terminal, inside = pty.openpty()
    with router() as url:
        command = [sys.executable, "-c", CONTROLLED, "top", "--url", url]
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        process = subprocess.Popen(
            command, stdin=inside, stdout=inside, stderr=inside, env=environment, start_new_session=True
        )
        try:
            read_until(terminal, b"requests/s")
            os.write(terminal, end)
            read_until(terminal, b"\x1b[?1049l")
            assert process.wait(DEADLINE_S) == 0
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
            os.close(inside)
            os.close(terminal)
