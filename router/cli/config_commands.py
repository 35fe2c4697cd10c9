"""`warmroute config check`, `warmroute config show` and `warmroute policies`: check and print configuration files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from router.config.load import shipped
from router.config.policy_files import PolicyFolder, load_classes, load_policies
from router.config.router_file import load_router
from router.policy.spec import Policy

config_app = typer.Typer(no_args_is_help=True)
PoliciesOption = Annotated[Path | None, typer.Option(help="Folder of policies. Default: the shipped ones.")]


@config_app.command("check", help="Check a configuration and all policies. Mistakes are listed with file and line.")
def check_command(
    config: Annotated[Path, typer.Argument(help="The router.yaml to check.")], policies: PoliciesOption = None
) -> None:
    parsed = load_router(config)
    classes = load_classes(parsed.classes).names
    active = PolicyFolder(policies or shipped("policies"), parsed.policy, classes).read().active
    names = ", ".join(policy.name for policy in active)
    print(f"{config}: valid. {len(parsed.models)} models, {len(parsed.pods)} pods, policies {names}.")


@config_app.command("show", help="Print the annotated defaults.")
def show_command() -> None:
    print((shipped("config") / "router.yaml").read_text(encoding="utf-8"), end="")


def policies_command(policies: PoliciesOption = None) -> None:
    table = Table("policy", "version", "decides", "costs", "picker")
    for policy in load_policies(policies or shipped("policies")).values():
        costs = ", ".join(name for name, _ in policy.costs) or "-"
        table.add_row(policy.name, policy.version, _matched_requests(policy), costs, type(policy.picker).__name__)
    Console().print(table)


def _matched_requests(policy: Policy) -> str:
    if policy.match is None:
        return "as default"
    conditions = policy.match.model_dump(exclude_defaults=True)
    shown = (f"{key} {' or '.join(value) if isinstance(value, tuple) else value}" for key, value in conditions.items())
    return f"{policy.percent:g} % of {', '.join(shown) or 'all'}"
