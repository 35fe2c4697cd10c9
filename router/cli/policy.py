"""How does one work on policies?

    warmroute policy lint mine/                 is anything wrong, and on which line? exit code 1 if so
    warmroute policy diff cost_aware mine.yaml  what one decides by and the other does not
    warmroute policy simulate mine.yaml config/traffic/chat.yaml
    warmroute policy docs [--schema]            the reference page, from the code

Names are those of the shipped policies; whatever ends in .yaml is a file. This file never decides a request.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from router.cli.simulate import Source, experiment, run_all, simulated_shelf
from router.cli.simulate_report import summary
from router.config.policy_files import Shelf, check, load_classes
from router.config.shipped import shipped
from router.errors import ConfigError
from router.policy.catalog import COSTS, FILTERS
from router.policy.reference import purpose_of, reference_page, schema_page, unit_of
from router.policy.spec import PolicySpec
from router.sim.virtual.compare import grid

policy_app = typer.Typer(no_args_is_help=True, help="Check, compare, simulate and explain policies.")
ABSENT = "-"


@policy_app.command("lint")
def lint_command(
    paths: Annotated[list[Path] | None, typer.Argument(help="Files or folders; default: the shipped policies.")] = None,
    classes: Annotated[str | None, typer.Option(help="The file of workload classes; default: the shipped one.")] = None,
) -> None:
    """Say what is wrong, with file and line; exit code 1 if anything is."""
    known = load_classes(classes).names
    mistakes = [mistake for path in paths or [shipped("policies")] for mistake in _mistakes(path, known)]
    for mistake in dict.fromkeys(mistakes):
        print(mistake)
    raise SystemExit(1 if mistakes else 0)


@policy_app.command("diff")
def diff_command(
    one: Annotated[str, typer.Argument(help="A name or a file.")],
    other: Annotated[str, typer.Argument(help="Another.")],
) -> None:
    """Compare what two policies decide by, with everything that they extend and every default. Exit code 1 where they
    differ."""
    lines = list(differences(_spec(one), _spec(other)))
    for line in lines:
        print(line)
    raise SystemExit(1 if lines else 0)


@policy_app.command("docs")
def docs_command(
    schema: Annotated[bool, typer.Option("--schema", help="The JSON schema of a file instead.")] = False,
) -> None:
    """Print the reference page."""
    print(schema_page() if schema else reference_page(), end="")


@policy_app.command("simulate")
def simulate_command(
    policy: Annotated[str, typer.Argument(help="A name or a file.")],
    traffic: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="As `warmroute simulate` takes it.")],
    against: Annotated[str, typer.Option(help="Another, to compare it with.")] = "cost_aware",
    fleet: Annotated[Path | None, typer.Option(help="A YAML of pods, links and SLO.")] = None,
    load: Annotated[float, typer.Option(min=0.01, help="Times the traffic's own rate.")] = 1.0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs, with other arrivals.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Play traffic under a policy that need not be in force anywhere. More: `warmroute simulate`."""
    setup = experiment(fleet, Source(traffic))
    asked = {spec.name: spec.build() for spec in (_spec(against), _spec(policy))}
    setup = replace(setup, policies=asked)
    results = run_all(setup, grid(list(asked), [load], [setup.fleet.pods[0].count], seeds, wrong_priors=False), jobs)
    Console().print(summary(results, setup.fleet.slo))


def differences(one: PolicySpec, other: PolicySpec) -> Iterator[str]:
    """A line a field that differs, with its unit; a term that only one has is told with what it is for."""
    ones, others = (dict(_flat(_said(spec))) for spec in (one, other))
    for key in dict.fromkeys((*ones, *others)):
        was, now = ones.get(key, ABSENT), others.get(key, ABSENT)
        if was != now:
            yield f"{key}: {_shown(key, was)} -> {_shown(key, now)}{_purpose(key, was, now)}"


def _said(spec: PolicySpec) -> dict[str, Any]:
    """What it decides by; how it came to be is no difference."""
    said = spec.model_dump(exclude={"name", "about", "extends"}, by_alias=True)
    for choice, does in (("filters", "filters"), ("costs", "priced"), ("picker", "picks")):
        said[choice] = {name: {"": does} | fields for name, fields in said[choice].items() if fields is not None}
    return said


def _flat(said: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in said.items():
        key = f"{above}.{name}".strip(".")
        if isinstance(value, dict):
            yield from _flat(value, key)
        elif value is not None:
            yield key, value


def _shown(key: str, value: Any) -> str:
    if value is ABSENT:
        return "nothing"
    text = ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    unit = "" if isinstance(value, str | tuple | list | bool) else unit_of(key)
    return f"{text} {unit}".strip()


def _purpose(key: str, was: Any, now: Any) -> str:
    """Why one would have the term, where one has it and the other has not."""
    section, _, name = key.partition(".")
    kind = {"costs": COSTS, "filters": FILTERS}.get(section, {}).get(name)
    return f"   ({purpose_of(kind)})" if kind and ABSENT in (was, now) else ""


def _spec(name: str) -> PolicySpec:
    """Raises `ConfigError`."""
    if not name.endswith(".yaml"):
        return simulated_shelf().spec(name)
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    return simulated_shelf(path.resolve().parent).spec(path.stem)


def _mistakes(path: Path, classes: frozenset[str]) -> Iterator[str]:
    """Line by line; a folder is checked as the router would read it, and each of its files."""
    folder = path if path.is_dir() else path.parent
    try:
        shelf = Shelf(folder)
    except ConfigError as error:
        yield str(error)
        return
    for name in shelf.own if path.is_dir() else (path.stem,):
        try:
            check(shelf, name, classes)
        except ConfigError as error:
            yield from str(error).splitlines()
