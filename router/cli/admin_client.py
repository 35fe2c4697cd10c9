"""The client of a running router's admin listener, for the commands that ask it.

Every failure is one line on stderr and exit code 1: no router, an unreadable token file, or a refused request.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import httpx
import msgspec
import typer

from router.cli.options import flag

DEFAULT_URL = "http://127.0.0.1:9480"
URL_VARIABLE, TOKEN_VARIABLE = "WARMROUTE_ADMIN_URL", "WARMROUTE_ADMIN_TOKEN"
TOKEN_FILE_VARIABLE = f"{TOKEN_VARIABLE}_FILE"
UrlOption = Annotated[str, typer.Option(help="The router's admin listener; or unix:PATH.", envvar=URL_VARIABLE)]
_BEARER_HELP = f"A file whose first line is a token; else {TOKEN_FILE_VARIABLE}, or the token in {TOKEN_VARIABLE}."
BearerOption = Annotated[Path | None, typer.Option(help=_BEARER_HELP, show_default="no token")]
JsonOption = Annotated[bool, flag("--json", "Print JSON instead, for scripts.")]
MAX_SHOWN_CHARS = 500
TIMEOUT_S = 10.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AdminClient:
    """One admin listener, and the file of its token. None: the token of the environment, if there is one."""

    url: str = DEFAULT_URL
    bearer_file: Path | None = None

    def ask(self, method: str, path: str, kind: type[T], body: Any = None, missing: T | None = None) -> T:
        """The decoded answer. `body` is sent as JSON; bytes are sent as they are. `missing` is the answer of an
        older router, which does not know the path."""
        content = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
        try:
            with self.open() as client:
                answer = client.request(method, path, content=content)
            if answer.status_code == 404 and missing is not None:
                return missing
            if not answer.is_success:
                fail(f"{self.url} answered {answer.status_code}: {_message(answer)}")
            return msgspec.json.decode(answer.content, type=kind)
        except httpx.TransportError as error:
            fail(f"{self.url}: {error}. Does the router run? --url names its admin listener, not the port for clients.")
        except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError) as error:
            fail(f"{self.url}: {str(error) or type(error).__name__}")

    def open(self) -> httpx.Client:
        return httpx.Client(**self._options(httpx.HTTPTransport))

    def open_async(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(**self._options(httpx.AsyncHTTPTransport))

    def _options(self, transport: Callable[..., Any]) -> dict[str, Any]:
        path = self.url.removeprefix("unix:") if self.url.startswith("unix:") else None
        token = _token(self.bearer_file)
        return {
            "base_url": "http://localhost" if path else self.url.rstrip("/"),
            "transport": transport(uds=path),
            "headers": {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {}),
            "timeout": TIMEOUT_S,
            "trust_env": False,
        }


def _token(bearer_file: Path | None) -> str:
    """The token of the file, else of the environment; "" without one. The values of variables are not printed: one
    that should name a file may be the token."""
    file = bearer_file or os.environ.get(TOKEN_FILE_VARIABLE)
    where = f"--bearer-file {bearer_file}" if bearer_file else TOKEN_FILE_VARIABLE if file else TOKEN_VARIABLE
    try:
        text = Path(file).read_text() if file else os.environ.get(TOKEN_VARIABLE, "")
    except (OSError, UnicodeError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeError) else error.strerror
        fail(f"{where}: cannot be read: {reason}")
    token = text.partition("\n")[0].strip()
    if not (token.isascii() and token.isprintable()):
        fail(f"{where}: the token has a character that no header may have; is it the right file?")
    return token


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
