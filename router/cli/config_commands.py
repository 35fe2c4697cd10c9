"""The commands that check and print configuration files: `config check` and `config show`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from router.cli.options import PoliciesOption, flag
from router.config.load import shipped
from router.config.models import without_cost

config_app = typer.Typer(no_args_is_help=True)


@config_app.command("check", help="Check a configuration and all policies. Mistakes are listed with file and line.")
def check_command(
    config: Annotated[Path, typer.Argument(help="The router.yaml to check.")],
    policies: PoliciesOption = None,
    offline: Annotated[bool, flag("--offline", "Skip tokenizers that come from the hub.")] = False,
    no_files: Annotated[
        bool,
        flag("--no-files", "For CI: skip the files, keys and folders of the router's machine, and all tokenizers."),
    ] = False,
    probe: Annotated[bool, flag("--probe", "Ask pods, Redis and collector too. Exit code 1 if one fails.")] = False,
) -> None:
    from router.cli.admin_client import AdminClient
    from router.cli.config_check import check_router
    from router.cli.doctor import PROBES, findings, report

    if probe and no_files:
        raise typer.BadParameter("--probe needs the keys and tokenizers that --no-files skips; leave one out")
    parsed, found = check_router(config, policies or shipped("policies"), offline=offline, files=not no_files)
    names = ", ".join(policy.name for policy in found.active)
    listed: dict[str, Sequence[object]] = {"model": parsed.models, "pod": parsed.pods}
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
