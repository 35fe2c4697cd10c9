"""The `warmroute policy` commands.

An argument that ends in .yaml is a file; any other is the name of a shipped policy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML

from router.cli.options import PoliciesOption, flag
from router.cli.terminal import printable
from router.config.load import shipped
from router.config.policy_files import PolicyLibrary, check, load_classes, policy_spec
from router.errors import ConfigError
from router.policy.catalog import COSTS, FILTERS
from router.policy.reference import purpose_of, unit_of
from router.policy.spec import PolicySpec

policy_app = typer.Typer(no_args_is_help=True, help="List, check and compare policies.")
ABSENT = "-"
USED = "used"


@policy_app.command("list")
def list_command(policies: PoliciesOption = None) -> None:
    """List the policies: name, requests, and what each is for."""
    library = PolicyLibrary(policies or shipped("policies"))
    table = Table("policy", "decides", "about", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.columns[0].no_wrap = True
    for name in library.own:
        spec = library.spec(name)
        table.add_row(*map(printable, (name, _matched_requests(spec), spec.about)))
    Console().print(table)


def _matched_requests(spec: PolicySpec) -> str:
    if spec.match is None:
        return "as default"
    conditions = spec.match.model_dump(exclude_defaults=True)
    shown = (f"{key} {' or '.join(value) if isinstance(value, tuple) else value}" for key, value in conditions.items())
    return f"{spec.percent:g} % of {', '.join(shown) or 'all'}"


@policy_app.command("show")
def show_command(policy: Annotated[str, typer.Argument(help="A name or a file.")]) -> None:
    """Print a policy as one file, with everything that it extends and every default."""
    YAML(typ="safe").dump(policy_spec(policy).model_dump(mode="json", by_alias=True, exclude_none=True), sys.stdout)


@policy_app.command("lint")
def lint_command(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Files or folders.", show_default="the shipped policies")
    ] = None,
    classes: Annotated[
        str | None, typer.Option(help="File of workload classes.", show_default="the shipped one")
    ] = None,
) -> None:
    """Report errors with file and line; exit code 1 if there are any."""
    known = load_classes(classes).names
    errors = [error for path in paths or [shipped("policies")] for error in _errors(path, known)]
    for error in dict.fromkeys(errors):
        print(error)
    raise SystemExit(1 if errors else 0)


@policy_app.command("diff")
def diff_command(
    one: Annotated[str, typer.Argument(help="A name or a file.")],
    other: Annotated[str, typer.Argument(help="Another name or file.")],
) -> None:
    """Compare two policies, with everything they extend and every default; exit code 1 if they differ."""
    lines = list(differences(policy_spec(one), policy_spec(other)))
    for line in lines:
        print(line)
    raise SystemExit(1 if lines else 0)


@policy_app.command("docs")
def docs_command(
    schema: Annotated[bool, flag("--schema", "Print the JSON schema of a policy file instead.")] = False,
) -> None:
    """Print the reference page."""
    print((shipped("policies") / ("schema.json" if schema else "REFERENCE.md")).read_text(encoding="utf-8"), end="")


def differences(one: PolicySpec, other: PolicySpec) -> Iterator[str]:
    """One line per field that differs, with its unit; for a term that only one policy has, with its purpose."""
    ones, others = (dict(_flat(_content(spec))) for spec in (one, other))
    for key in dict.fromkeys((*ones, *others)):
        was, now = ones.get(key, ABSENT), others.get(key, ABSENT)
        if was != now:
            yield f"{key}: {_shown(key, was)} -> {_shown(key, now)}{_purpose(key, was, now)}"


def _content(spec: PolicySpec) -> dict[str, Any]:
    content = spec.model_dump(exclude={"name", "about", "extends"}, by_alias=True)
    for choice in ("filters", "costs", "picker"):
        content[choice] = {name: {"": USED} | fields for name, fields in content[choice].items() if fields is not None}
    return content


def _flat(content: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        key = f"{above}.{name}".strip(".")
        if isinstance(value, dict):
            yield from _flat(value, key)
        elif value is not None:
            yield key, value


def _shown(key: str, value: Any) -> str:
    if value is ABSENT:
        return "none"
    text = ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    unit = "" if isinstance(value, str | tuple | list | bool) else unit_of(key)
    return f"{text} {unit}".strip()


def _purpose(key: str, was: Any, now: Any) -> str:
    section, _, name = key.partition(".")
    kind = {"costs": COSTS, "filters": FILTERS}.get(section, {}).get(name)
    return f"   ({purpose_of(kind)})" if kind and ABSENT in (was, now) else ""


def _errors(path: Path, classes: frozenset[str]) -> Iterator[str]:
    """The errors, one per line. A folder is read as the router does; then each of its files is checked."""
    if not path.exists():
        yield f"{path}: file not found"
        return
    folder = path if path.is_dir() else path.parent
    try:
        library = PolicyLibrary(folder)
    except ConfigError as error:
        yield str(error)
        return
    for name in library.own if path.is_dir() else (path.stem,):
        try:
            check(library, name, classes)
        except ConfigError as error:
            yield from str(error).splitlines()
