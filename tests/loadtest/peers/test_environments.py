"""The peers' programs are found where they are installed, at pinned versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.peers import environments
from loadtest.peers.environments import (
    DISTRIBUTED,
    HAPROXY,
    NGINX,
    PYTHON_PACKAGES,
    NotInstalled,
    libraries,
    program,
    version,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no nginx on the PATH."""
    monkeypatch.setattr(environments, "CACHE", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    return tmp_path


@pytest.mark.parametrize("environment", [*PYTHON_PACKAGES, *DISTRIBUTED])
def test_a_missing_program_says_how_to_install_it(environment: str, cache: Path) -> None:
    """Before any router is started."""
    with pytest.raises(NotInstalled, match=f"{environment} is not installed; run: .* --install"):
        program(environment)


def test_each_program_has_its_own_environment(cache: Path) -> None:
    """No two peers share dependencies."""
    path = cache / "smg" / "bin" / "smg"
    path.parent.mkdir(parents=True)
    path.touch()
    assert program("smg") == path


def test_an_installed_nginx_is_preferred(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache / "nginx"
    path.write_text("#!/bin/sh\necho 'nginx version: nginx/9.9.9' >&2\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{cache}:/bin:/usr/bin")
    assert program(NGINX) == path
    assert version(NGINX) == "nginx/9.9.9"


def test_an_unpacked_program_finds_its_libraries_and_says_its_version(cache: Path) -> None:
    """As haproxy's package needs it."""
    path = cache / HAPROXY / "usr" / "sbin" / HAPROXY
    path.parent.mkdir(parents=True)
    (cache / HAPROXY / "usr" / "lib" / "x86_64-linux-gnu").mkdir(parents=True)
    path.write_text('#!/bin/sh\necho "HAProxy version 2.6.12-1+deb12u4 $LD_LIBRARY_PATH"\n')
    path.chmod(0o755)
    assert libraries(HAPROXY) == {"LD_LIBRARY_PATH": str(cache / HAPROXY / "usr" / "lib" / "x86_64-linux-gnu")}
    assert version(HAPROXY) == "haproxy/2.6.12"


def test_every_python_peer_is_pinned() -> None:
    """Results state the version."""
    assert all("==" in version(environment) for environment in PYTHON_PACKAGES)
