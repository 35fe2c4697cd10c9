"""`warmroute tenants key`: prints a new API key, which is stored nowhere, and the line with its digest for the file of
tenants."""

from __future__ import annotations

import secrets
import sys
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Annotated

import typer

from router.admission.tenant import MAX_KEY_BYTES
from router.cli.options import flag

tenants_app = typer.Typer(no_args_is_help=True)
PREFIX = "sk-wr-"
"""Start of new keys: some clients require `sk-`, and scanners for secrets recognize a fixed beginning."""
KEY_BYTES = 32
MIN_CHARACTERS = 20
"""Minimum length of an existing key: its digest must not be found by trying."""


@tenants_app.callback()
def _group() -> None:
    """Without it, Typer would make the only command the group itself."""


@tenants_app.command("key", help="Make an API key. It is shown once; the router only gets its digest.")
def key_command(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant.")],
    days: Annotated[int | None, typer.Option(min=1, help="Days until it expires.", show_default="never")] = None,
    existing: Annotated[bool, flag("--existing", "Read an existing key from standard input.")] = False,
) -> None:
    key = _read_key() if existing else PREFIX + secrets.token_urlsafe(KEY_BYTES)
    until = f" until {(datetime.now(UTC) + timedelta(days=days)):%Y-%m-%dT%H:%M:%SZ}" if days else ""
    line = f"{sha256(key.encode()).hexdigest()}{until}"
    if not existing:
        print(f"key of {tenant}, shown only now:\n  {key}")
    print(f'under `keys` of {tenant} in the file of tenants:\n  - "{line}"')
    print(f"or in one of its `key_files`:\n  {tenant} {line}")


def _read_key() -> str:
    key = sys.stdin.readline().strip()
    if not MIN_CHARACTERS <= len(key) <= MAX_KEY_BYTES or not key.isascii() or not key.isprintable() or " " in key:
        raise typer.BadParameter(
            f"standard input must have one key of {MIN_CHARACTERS} to {MAX_KEY_BYTES} visible ASCII characters"
        )
    return key
