"""The client of a running router's admin listener, for the commands that ask it.

Every failure is one line on stderr and exit code 1: no router, an unreadable token file, or a refused request.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import httpx
import msgspec
import typer

from router.cli.options import flag

DEFAULT_URL = "http://127.0.0.1:9480"
UrlOption = Annotated[str, typer.Option(help="The router's admin listener; or unix:PATH.")]
BearerOption = Annotated[Path | None, typer.Option(help="A file whose first line is a token.", show_default="no token")]
JsonOption = Annotated[bool, flag("--json", "Print JSON instead, for scripts.")]
MAX_SHOWN_CHARS = 500
TIMEOUT_S = 10.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AdminClient:
    """One admin listener, and the file of its token."""

    url: str = DEFAULT_URL
    bearer_file: Path | None = None

    def ask(self, method: str, path: str, kind: type[T], body: Any = None) -> T:
        """The decoded answer. `body` is sent as JSON; bytes are sent as they are."""
        content = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
        try:
            with self.open() as client:
                answer = client.request(method, path, content=content)
            if not answer.is_success:
                fail(f"{self.url} answered {answer.status_code}: {_message(answer)}")
            return msgspec.json.decode(answer.content, type=kind)
        except httpx.TransportError as error:
            fail(f"{self.url}: {error}. Does the router run? --url names its admin listener, not the port for clients.")
        except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError) as error:
            fail(f"{self.url}: {str(error) or type(error).__name__}")

    def open(self) -> httpx.Client:
        path = self.url.removeprefix("unix:") if self.url.startswith("unix:") else None
        token = _first_line(self.bearer_file) if self.bearer_file else ""
        return httpx.Client(
            base_url="http://localhost" if path else self.url.rstrip("/"),
            transport=httpx.HTTPTransport(uds=path),
            headers={"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {}),
            timeout=TIMEOUT_S,
            trust_env=False,
        )


def _first_line(file: Path) -> str:
    try:
        return file.read_text().partition("\n")[0].strip()
    except (OSError, UnicodeError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeError) else error.strerror
        fail(f"--bearer-file {file}: cannot be read: {reason}")


def _message(answer: httpx.Response) -> str:
    """The message of an error in OpenAI's shape, or the beginning of the text."""
    try:
        text = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = answer.text
    return text[:MAX_SHOWN_CHARS]


def fail(message: str) -> NoReturn:
    """Print the message, without control characters, and end with exit code 1."""
    print("".join(char if char.isprintable() or char == "\n" else "?" for char in message), file=sys.stderr)
    raise typer.Exit(1)
