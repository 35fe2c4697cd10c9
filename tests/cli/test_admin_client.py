"""Where commands find the admin listener and its token: options, else the environment."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.kit.command_line import Typed

pytestmark = pytest.mark.net
TOKEN = "hush-4711"


class Asked(BaseHTTPRequestHandler):
    """Answers that there are no pods, and keeps the token of the last caller."""

    last = ""
    pods: ClassVar[list[dict[str, str]]] = []

    def do_GET(self) -> None:
        Asked.last = self.headers.get("authorization", "")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(Asked.pods if self.path == "/admin/pods" else {}).encode())

    def do_POST(self) -> None:
        """A drain, as answered by versions that know no labels."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "draining", "pod": "a"}')

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a listener, also in the environment."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Asked) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        found = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("WARMROUTE_ADMIN_URL", found)
        yield found
        server.shutdown()
        thread.join()


def test_commands_find_the_router_and_the_token_in_the_environment(
    url: str, typed: Typed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file wins over the token, an option over both."""
    assert (typed("pods").out, Asked.last) == ("no pods\n", "")
    monkeypatch.setenv("WARMROUTE_ADMIN_TOKEN", TOKEN)
    assert typed("pods").code == 0 and Asked.last == f"Bearer {TOKEN}"
    (tmp_path / "named").write_text("of-the-file\nolder\n")
    monkeypatch.setenv("WARMROUTE_ADMIN_TOKEN_FILE", str(tmp_path / "named"))
    assert typed("pods").code == 0 and Asked.last == "Bearer of-the-file"
    (tmp_path / "option").write_text("of-the-option")
    assert typed("pods", "--bearer-file", tmp_path / "option").code == 0 and Asked.last == "Bearer of-the-option"
    assert typed("pods", "--url", "http://127.0.0.1:1").err.startswith("http://127.0.0.1:1: ")


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("WARMROUTE_ADMIN_TOKEN", f"{TOKEN}\x01", "no header may have"),
        ("WARMROUTE_ADMIN_TOKEN", f"{TOKEN}é", "no header may have"),
        ("WARMROUTE_ADMIN_TOKEN_FILE", TOKEN, "cannot be read: No such file"),
    ],
)
def test_no_message_prints_a_token(
    url: str, typed: Typed, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    """Not even one where the name of a file should be; the message names the variable."""
    monkeypatch.setenv(variable, value)
    ended = typed("pods")
    assert ended.code == 1 and ended.err.startswith(f"{variable}: ") and said in ended.err
    assert TOKEN not in ended.err + ended.out


@pytest.mark.parametrize("command", ["pods", "explain", "preview"])
def test_help_names_the_variables(typed: Typed, command: str) -> None:
    shown = typed(command, "--help").out
    assert all(f"WARMROUTE_ADMIN_{name}" in shown for name in ("URL", "TOKEN", "TOKEN_FILE"))


def test_a_pod_of_an_older_router_is_drained(url: str, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer names no routers: it knows of its own drains alone."""
    monkeypatch.setattr(Asked, "pods", [{"id": "a", "url": "http://a"}])
    ended = typed("pods", "drain", "a")
    assert (ended.code, ended.out, ended.err) == (0, "a: draining\n", "a: drained; known to this router alone\n")
