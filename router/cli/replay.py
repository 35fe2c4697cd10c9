"""`warmroute replay`: decides recorded requests again with other policies.

Compares each new decision with the recorded choice. Whether that pays, `warmroute compare` says.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from router.cli.options import PoliciesOption, flag
from router.cli.receipt_files import lines_of, recorded
from router.cli.terminal import folded_table, printable
from router.config.load import shipped
from router.config.policy_files import PolicyFolder, find_policy, load_policies
from router.errors import ConfigError
from router.policy.price import Choice
from router.policy.recording import RecordedScene
from router.policy.review import Review, review

LIMIT = (
    "Each request is decided alone, with the caches as they were; under another policy, later ones would find others. "
    "Does it pay? `warmroute compare` says."
)


def replay_command(
    receipts: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="File of receipts with replay_data.")],
    policy: Annotated[
        str | None,
        typer.Option(help="Name or YAML file of one policy for all requests.", show_default="each by its own"),
    ] = None,
    policies: PoliciesOption = None,
    default: Annotated[
        str, typer.Option(help="Without --policy: the policy of requests that match no other.")
    ] = "cost_aware",
    limit: Annotated[int, typer.Option(min=1, help="Number of moves and changes to list.")] = 10,
    json: Annotated[bool, flag("--json", "Print JSON instead of tables.")] = False,
) -> None:
    without_fleet = Counter[Path]()
    found = _review(choices(receipts, without_fleet), policy, policies or shipped("policies"), default, limit)
    if not found.decisions:
        raise ConfigError(f"{receipts}: no recorded scenes; enable receipts.replay_data")
    if skipped := without_fleet[receipts]:
        print(f"skipped {skipped} scenes: the lines of their fleets are missing", file=sys.stderr)
    if json:
        print(msgspec.json.encode(found).decode())
    else:
        Console().print(page(found))


Choices: TypeAlias = Iterator[tuple[RecordedScene, Choice | None, str]]
"""The scenes of a file, each with its choice and the policy that decided."""


def choices(path: Path, without_fleet: Counter[Path]) -> Choices:
    """Raises `ConfigError` with the line number of an invalid line; counts the scenes `without_fleet`."""
    for receipt, scene in recorded(lines_of(path)):
        if scene is not None:
            yield scene, receipt.candidates[0].choice if receipt.candidates else None, receipt.policy
        elif receipt.scene:
            without_fleet[path] += 1


def _review(decided: Choices, policy: str | None, folder: Path, default: str, limit: int) -> Review:
    """The review with one policy, or with those of a folder as `serve` would use them."""
    if policy is not None:
        found = find_policy(load_policies(folder), policy)
        return review(((scene.scene(), was, found) for scene, was, _ in decided), found.name, limit=limit)
    every = PolicyFolder(folder, default).read()
    rows = ((scene.scene(), was, every.for_recorded(scene, by)) for scene, was, by in decided)
    return review(rows, str(folder), limit=limit)


def page(found: Review) -> RenderableType:
    parts: list[RenderableType] = [printable(found), LIMIT]
    if found.moves:
        parts.append(Padding(_moves(found), (1, 0, 0, 0)))
    if found.largest:
        parts.append(Padding(_largest(found), (1, 0, 0, 0)))
    return Group(*parts)


def _moves(found: Review) -> Table:
    table = folded_table("moves from", "to", numbers=("requests",), box=None)
    for move in found.moves:
        table.add_row(printable(move.was), printable(move.now), f"{move.requests:,}")
    return table


def _largest(found: Review) -> Table:
    table = folded_table("largest changes", "from", "to", numbers=("recorded, ms", "new, ms"), box=None)
    for one in found.largest:
        names = (one.request_id, one.was or "refused", one.now or "refused")
        table.add_row(*map(printable, names), _ms(one.was_ms), _ms(one.now_ms))
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
