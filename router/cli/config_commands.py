"""The commands about configuration files: `config check`, `config show`, and `tenants key`.

A new API key is stored nowhere; the file of tenants gets the line with its digest.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import typer

from router.admission.tenant import MAX_KEY_BYTES
from router.cli.options import PoliciesOption, flag
from router.config.load import shipped
from router.config.models import without_cost

config_app = typer.Typer(no_args_is_help=True)
PREFIX = "sk-wr-"
"""Start of new keys: some clients require `sk-`, and scanners for secrets recognize a fixed beginning."""
KEY_BYTES = 32
MIN_CHARACTERS = 20
"""Minimum length of an existing key: its digest must not be found by trying."""


@config_app.command("check", help="Check a configuration and all policies. Mistakes are listed with file and line.")
def check_command(
    config: Annotated[Path, typer.Argument(help="The router.yaml to check.")],
    policies: PoliciesOption = None,
    offline: Annotated[bool, flag("--offline", "Skip tokenizers that come from the hub.")] = False,
    no_files: Annotated[
        bool,
        flag("--no-files", "For CI: skip the files, keys and folders of the router's machine, and all tokenizers."),
    ] = False,
    probe: Annotated[bool, flag("--probe", "Ask pods, Redis, providers, collector. Exit code 1 if one fails.")] = False,
) -> None:
    from router.cli.admin_client import AdminClient
    from router.cli.config_check import check_router
    from router.cli.doctor import PROBES, findings, report

    if probe and no_files:
        raise typer.BadParameter("--probe needs the keys and tokenizers that --no-files skips; leave one out")
    parsed, found = check_router(config, policies or shipped("policies"), offline=offline, files=not no_files)
    names = ", ".join(policy.name for policy in found.active)
    listed: dict[str, Sequence[object]] = {"model": parsed.models, "pod": parsed.pods}
    listed |= {"provider": parsed.providers} if parsed.providers else {}
    counts = ", ".join(f"{len(of)} {what}{'' if len(of) == 1 else 's'}" for what, of in listed.items())
    print(f"{config}: valid. {counts}, policies {names}.")
    for model, hint in without_cost(parsed.models).items():
        print(f"note: model {model} has no `cost`: it {hint}.")
    if parsed.discovery.groups and not probe:
        print("note: the pods of `discovery` are not looked up; `--probe` does.")
    if probe:
        report(asyncio.run(findings(parsed, PROBES, AdminClient(), offline=offline)))


@config_app.command("show", help="Print the annotated defaults.")
def show_command() -> None:
    print((shipped("config") / "router.yaml").read_text(encoding="utf-8"), end="")


tenants_app = typer.Typer(no_args_is_help=True)


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
