"""What does the router know before it serves anything?

Commands that only read: configuration, policies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from router.config.policies import PolicyFolder, load_classes, load_policies
from router.config.router_file import load_router
from router.config.shipped import shipped
from router.policy.spec import Policy


def check_command(
    config: Annotated[Path, typer.Argument(help="The router.yaml to check.")],
    policies: Annotated[Path | None, typer.Option(help="Folder of policies; default: the shipped ones.")] = None,
) -> None:
    """Read everything that `serve` would read."""
    parsed = load_router(config)
    classes = load_classes(parsed.classes).names
    active = PolicyFolder(policies or shipped("policies"), parsed.policy, classes).read().active
    names = ", ".join(policy.name for policy in active)
    print(f"{config}: good. {len(parsed.models)} models, {len(parsed.pods)} pods, policies {names}.")


def show_command() -> None:
    """Print the annotated default configuration."""
    print((shipped("config") / "router.yaml").read_text(encoding="utf-8"), end="")


def policies_command(
    policies: Annotated[Path | None, typer.Option(help="Folder of policies; default: the shipped ones.")] = None,
) -> None:
    """A table of all policies."""
    table = Table("policy", "version", "decides", "costs", "picker")
    for policy in load_policies(policies or shipped("policies")).values():
        costs = ", ".join(name for name, _ in policy.costs) or "-"
        table.add_row(policy.name, policy.version, _what(policy), costs, type(policy.picker).__name__)
    Console().print(table)


def _what(policy: Policy) -> str:
    """Which requests it decides, in the words of its file."""
    if policy.match is None:
        return "as default"
    said = policy.match.model_dump(exclude_defaults=True)
    shown = (f"{key} {' or '.join(value) if isinstance(value, tuple) else value}" for key, value in said.items())
    return f"{policy.percent:g} % of {', '.join(shown) or 'all'}"
