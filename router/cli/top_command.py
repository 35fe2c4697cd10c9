"""`warmroute top`: shows a running router in the terminal, like its page `/ui`, from the same snapshots.

It is drawn again for every snapshot, one a second, and when the terminal is resized; q or Ctrl-C ends it. Without a
terminal, or with `--once`, it prints one snapshot: sums since the start of the router instead of rates.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn, TypeVar

import httpx
from rich.console import Console
from rich.live import Live

from router.cli.admin_client import DEFAULT_URL, AdminClient, BearerOption, JsonOption, UrlOption, fail
from router.cli.options import flag
from router.cli.top_view import Snapshot, TopView
from router.frontends.admin.live_page import EVENTS_PATH

_T = TypeVar("_T")
RETRY_S = 1.0
DRAWN_PER_S = 4
"""Also without a new snapshot: a resized terminal is drawn again this soon."""

OnceOption = Annotated[bool, flag("--once", "Print one snapshot and exit.")]


def top_command(
    url: UrlOption = DEFAULT_URL,
    bearer_file: BearerOption = None,
    once: OnceOption = False,
    as_json: JsonOption = False,
) -> None:
    router = AdminClient(url, bearer_file)
    if as_json:
        print(json.dumps(_first(router, router.events(EVENTS_PATH, dict)), indent=2))
        return
    if once or not sys.stdout.isatty():
        view = TopView(url, of_all=True)
        view.add(_first(router, router.events(EVENTS_PATH, Snapshot)))
        Console().print(view)
        return
    with _quit_by_key():
        try:
            _watch(router, TopView(url))
        except KeyboardInterrupt:
            return


def _first(router: AdminClient, events: Iterator[_T]) -> _T:
    try:
        found = next(events, None)
    except httpx.TransportError as error:
        router.unreachable(error)
    return found or fail(f"{router.url} is stopping")


def _watch(router: AdminClient, view: TopView) -> None:
    """Draw until interrupted."""
    events = router.events(EVENTS_PATH, Snapshot)
    view.add(_first(router, events))
    live = Live(view, screen=True, refresh_per_second=DRAWN_PER_S)
    try:  # not `with`: an interrupt of its first draw would leave the terminal's other screen
        live.start(refresh=True)
        _draw(router, view, events)
    finally:
        live.stop()


def _draw(router: AdminClient, view: TopView, events: Iterator[Snapshot]) -> NoReturn:
    """Pass the snapshots on. A router that does not answer any more is asked again."""
    while True:
        try:
            for snapshot in events:
                view.add(snapshot)
            view.problem = "no data: the router closed the connection; trying again"
        except httpx.TransportError as error:
            view.problem = f"no data: {error}; trying again"
        time.sleep(RETRY_S)
        events = router.events(EVENTS_PATH, Snapshot)


@contextmanager
def _quit_by_key() -> Iterator[None]:
    """Interrupt this process when q is typed. Keys are read without Enter, and not shown."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    tty.setcbreak(file)
    threading.Thread(target=_interrupt_by_key, args=(file,), daemon=True).start()
    try:
        yield
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _interrupt_by_key(file: int) -> None:
    while key := os.read(file, 1):
        if key in b"qQ":
            os.kill(os.getpid(), signal.SIGINT)
            return
