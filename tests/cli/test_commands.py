"""The table of commands: each loads only its own modules."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from router import __version__
from router.cli import COMMANDS, GROUPS, REMOVED, _load, commands
from tests.kit.command_line import Typed

LOADED = """
import sys
from importlib.metadata import EntryPoint
from router.cli import main
sys.argv = ["warmroute", *sys.argv[1:]]
try:
    main()
except SystemExit:
    print("MODULES", *sys.modules)
"""


def test_help_lists_all_commands(typed: Typed) -> None:
    """With their descriptions."""
    ended = typed("--help")
    for name, (_, text) in {**commands(), **GROUPS}.items():
        assert any(name in line and text in line for line in ended.out.splitlines()), name


@pytest.mark.parametrize("name", [*commands(), *GROUPS])
def test_every_command_has_help(typed: Typed, name: str) -> None:
    """Its target in the table exists."""
    target, text = {**commands(), **GROUPS}[name]
    assert callable(_load(target))
    ended = typed(name, "--help")
    assert ended.code == 0 and text in ended.out


def test_the_version_is_printed(typed: Typed) -> None:
    """For scripts and bug reports."""
    ended = typed("--version")
    assert (ended.code, ended.out) == (0, f"warmroute {__version__}\n")


def test_an_unknown_command_is_refused(typed: Typed) -> None:
    """Exit code 2."""
    ended = typed("srve")
    assert ended.code == 2 and "srve" in ended.err


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_command_names_what_to_use_instead(typed: Typed, name: str) -> None:
    """Exit code 2."""
    ended = typed(*name.split(), "--url", "x")
    assert ended.code == 2 and ended.err == f"`warmroute {name}` was removed: {REMOVED[name]}\n"


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        ("--help", ("fastapi", "numpy", "router.cli.serve", "loadtest.mock_engine", "transformers")),
        (
            "serve --help",
            ("matplotlib", "loadtest.commands.demo", "router.publisher", "loadtest.mock_engine", "transformers"),
        ),
        ("config show", ("fastapi", "router.proxy", "loadtest.mock_engine", "transformers")),
    ],
)
def test_a_command_imports_only_what_it_needs(arguments: str, unneeded: tuple[str, ...]) -> None:
    """In a new process."""
    command = [sys.executable, "-c", LOADED, *arguments.split()]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    modules = set(printed.partition("MODULES ")[2].split())
    assert modules and not modules.intersection(unneeded)


def test_a_running_router_imports_no_simulator_publisher_or_plots() -> None:
    """Nor `transformers`, unless a tokenizer needs it."""
    program = (
        "import sys, router.cli.serve, router.frontends.http.protocol, router.frontends.http.server, "
        "router.feeds.process_memory, router.wiring.router, router.frontends.prompts; "
        "print(*sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    unneeded = {
        "matplotlib",
        "pandas",
        "router.publisher",
        "loadtest.tables",
        "loadtest.mock_engine",
        "torch",
        "transformers",
    }
    assert not unneeded.intersection(printed.split())


def add_commands(monkeypatch: pytest.MonkeyPatch, *targets: str) -> None:
    """As if other packages were installed, and `loadtest` not."""
    found = [EntryPoint("x", target, "warmroute.commands") for target in targets]
    monkeypatch.setattr("router.cli.entry_points", lambda group: found)


def test_another_package_neither_replaces_nor_breaks_a_command_of_the_router(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is installed in part."""
    monkeypatch.setattr("router.cli.REPLACING", {"serve": ("x:y", "Other.")}, raising=False)
    add_commands(monkeypatch, "router.cli:REPLACING")
    assert commands()["serve"] == COMMANDS["serve"]
    add_commands(monkeypatch, "no_such_module:COMMANDS")
    assert typed("serve", "--help").code == 0


def test_a_command_of_the_laboratory_that_is_not_installed_names_the_next_step(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an update of a clone, whose entry points are those of the installation."""
    add_commands(monkeypatch)
    ended = typed("demo")
    message = "`warmroute demo` is not installed: run `pip install .` again in the clone\n"
    assert (ended.code, ended.err) == (2, message)
