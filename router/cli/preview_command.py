"""`warmroute preview`: prints where a running router would send a chat request, and why. Nothing is sent to a pod."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer
from rich.console import Console

from router.cli.admin_client import DEFAULT_URL, AdminClient, BearerOption, UrlOption, fail
from router.cli.explain_command import FormulasOption, page
from router.observe.receipts import Explained


def preview_command(
    body: Annotated[
        str | None,
        typer.Argument(help="File with the JSON body of a chat request; - for stdin.", show_default="use --prompt"),
    ] = None,
    model: Annotated[str, typer.Option(help="With --prompt: the model.", show_default="none")] = "",
    prompt: Annotated[str, typer.Option(help="A user message, instead of a file.", show_default="none")] = "",
    tenant: Annotated[str, typer.Option(help="On behalf of this tenant.", show_default="none")] = "",
    formulas: FormulasOption = False,
    url: UrlOption = DEFAULT_URL,
    bearer_file: BearerOption = None,
) -> None:
    if bool(body) == bool(model and prompt):
        raise typer.BadParameter("give either a file with a request, or --model and --prompt")
    asked = _read(body) if body else {"model": model, "messages": [{"role": "user", "content": prompt}]}
    path = f"/admin/preview?tenant={quote(tenant)}" if tenant else "/admin/preview"
    found = AdminClient(url, bearer_file).ask("POST", path, Explained, asked)
    Console().print(page(found, unfinished="not sent", formulas=formulas))


def _read(body: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if body == "-" else Path(body).read_bytes()
    except OSError as error:
        fail(f"{body}: cannot be read: {error.strerror}")
