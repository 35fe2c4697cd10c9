"""The command `warmroute`: a table of its commands, each in a module that is only imported to run it."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer

from router import __version__
from router.errors import ConfigError

COMMANDS = {
    "serve": ("router.cli.serve:serve_command", "Run the router."),
    "picker": ("router.cli.serve:picker_command", "Run the router as the endpoint picker of a gateway."),
    "publish": ("router.cli.publish:publish_command", "Publish the blocks of a cache tier to the cluster index."),
    "doctor": ("router.cli.doctor:doctor_command", "Check each part of a deployment; say what to do."),
    "explain": ("router.cli.explain_command:explain_command", "Show why a running router sent a request to its pod."),
    "preview": ("router.cli.explain_command:preview_command", "Show where a running router would send a request."),
    "pods": ("router.cli.pods_command:pods_command", "List, add, remove, drain and undrain a running router's pods."),
    "replay": ("router.cli.replay:replay_command", "Decide recorded requests again with another policy."),
}
GROUPS = {
    "config": ("router.cli.config_commands:config_app", "Check a configuration, show the defaults."),
    "receipts": ("router.cli.receipts_command:receipts_app", "Sum up files of receipts by hour, class and pod."),
    "tenants": ("router.cli.config_commands:tenants_app", "Make API keys of tenants."),
    "policy": ("router.cli.policy:policy_app", "List, check and compare policies."),
}
REMOVED = {
    "index lookup": "`warmroute preview` shows how many tokens of a prompt each pod has",
    "index stats": "use `warmroute doctor`, and `INFO memory` of the Redis",
    "index verify": "`warmroute doctor` lists publishers whose events were lost",
    "index holders": "`warmroute doctor` lists publishers with their blocks and age",
    "policy simulate": "use `warmroute simulate --policies`, which takes names and files",
    "top": "open /ui on the router's admin port, or use `warmroute pods`",
}
"""Commands of earlier versions, with what to use instead."""
ADDED = "warmroute.commands"
"""Other packages add commands by this entry point. An installation of an earlier version in a clone has none."""


def commands() -> dict[str, tuple[str, str]]:
    """Those of the router, and those that other packages add: a table of the same kind, which cannot replace any."""
    added = (entry.load() for entry in entry_points(group=ADDED))
    return {name: command for table in (COMMANDS, *added, COMMANDS) for name, command in table.items()}


def main() -> None:
    """The entry point. A wrong configuration ends with a message and exit code 2; an error of the operating system
    with a message and exit code 1."""
    words = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    for name in ("".join(words[:1]), " ".join(words[:2])):
        if name in REMOVED:
            print(f"`warmroute {name}` was removed: {REMOVED[name]}", file=sys.stderr)
            sys.exit(2)
    if words and words[0] not in COMMANDS | GROUPS and not entry_points(group=ADDED):
        print(f"`warmroute {words[0]}` is not installed: run `pip install .` again in the clone", file=sys.stderr)
        sys.exit(2)
    try:
        _app("".join(words[:1]))()
    except ConfigError as error:
        print(f"configuration: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}" if error.filename else error, file=sys.stderr)
        sys.exit(1)


def _app(requested: str) -> typer.Typer:
    """All commands for `--help`. Only the requested one is imported and can run."""
    app = typer.Typer(
        no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Prefix-aware router."
    )
    app.callback()(_common_options)
    is_own = requested in COMMANDS or requested in GROUPS
    for name, (target, text) in (COMMANDS if is_own else commands()).items():
        app.command(name, help=text)(_load(target) if name == requested else _not_loaded)
    for name, (target, text) in GROUPS.items():
        app.add_typer(_load(target) if name == requested else _empty_group(), name=name, help=text)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        print(f"warmroute {__version__}")
        raise typer.Exit


def _common_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit.", show_default="off"
        ),
    ] = False,
) -> None:
    """Prefix-aware router."""


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def _not_loaded() -> None:
    raise AssertionError("another command was requested")


def _empty_group() -> typer.Typer:
    group = typer.Typer()
    group.callback()(_not_loaded)
    return group
