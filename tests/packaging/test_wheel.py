"""The built wheel is complete: policies, priors, traffic and fleets are found without a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("policies", "config")


def run(*arguments: str, folder: Path, installed: Path | None = None) -> str:
    """The output of `python -m ...` in a folder, with `installed` as the only place of the package."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "COLUMNS")}
    if installed is not None:
        environment["PYTHONPATH"] = str(installed)
    command = [sys.executable, "-m", *arguments]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel of this checkout is installed, without its dependencies."""
    built, folder = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("installed")
    run("hatchling", "build", "-t", "wheel", "-d", str(built), folder=ROOT)
    (wheel,) = built.glob("*.whl")
    run("pip", "install", "-q", "--no-deps", "--no-index", "--target", str(folder), str(wheel), folder=built)
    return folder


def test_every_file_of_the_package_and_all_shipped_files_are_installed(installed: Path) -> None:
    """Templates, scripts and type markers as well as modules; policies and configuration below `_shipped`."""
    shipped = installed / "router" / "_shipped"
    for source, target in (
        (ROOT / "router", installed / "router"),
        *((ROOT / name, shipped / name) for name in SHIPPED),
    ):
        files = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
        wanted = {path for path in files if "__pycache__" not in path.parts}
        assert not {str(path) for path in wanted if not (target / path).is_file()}


def test_the_installed_commands_find_what_is_shipped_from_any_folder(installed: Path, tmp_path: Path) -> None:
    """Policies, the annotated defaults, a traffic mix, the default fleet and priors."""
    assert "cost_aware_pd" in run("router.cli", "policy", "list", folder=tmp_path, installed=installed)
    defaults = run("router.cli", "config", "show", folder=tmp_path, installed=installed)
    (tmp_path / "router.yaml").write_text(defaults)
    assert "valid" in run("router.cli", "config", "check", "router.yaml", folder=tmp_path, installed=installed)
    simulated = run(
        "router.cli", "simulate", "long_context", "--policies", "least_load", folder=tmp_path, installed=installed
    )
    assert "load 1; 16 pods" in simulated and "least_load" in simulated
    assert sorted(path.name for path in tmp_path.iterdir()) == ["router.yaml"]
