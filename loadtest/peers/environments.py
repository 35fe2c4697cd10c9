"""Installs the peers' programs and finds them.

One environment per package under a cache folder, with a pinned version, so that dependencies do not conflict. The
packages of nginx and haproxy are unpacked there and not installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "warmroute" / "peers"
PYTHON_PACKAGES: Mapping[str, str] = {
    "sglang-router": "sglang-router==0.3.2",
    "smg": "smg==1.13.0",
    "vllm-router": "vllm-router==0.1.17",
    "litellm": "litellm[proxy]==1.106.2",
}
"""Requirement by environment; the program has the environment's name."""
NGINX, HAPROXY = "nginx", "haproxy"
DISTRIBUTED: Mapping[str, Sequence[str]] = {
    NGINX: ("nginx",),
    HAPROXY: ("haproxy", "liblua5.3-0", "libopentracing-c-wrapper0", "libopentracing1"),
}
"""Packages by environment, with libraries that a minimal system lacks."""


class NotInstalled(Exception):
    """A peer's program is missing. The message has the command to install it."""


def program(environment: str) -> Path:
    """Path of an environment's program. Raises `NotInstalled`."""
    if environment in DISTRIBUTED and (installed := shutil.which(environment)):
        return Path(installed)
    path = CACHE / environment / ("usr/sbin" if environment in DISTRIBUTED else "bin") / environment
    if not path.exists():
        raise NotInstalled(f"{environment} is not installed; run: python loadtest/peers/compare.py --install")
    return path


def version(environment: str) -> str:
    """The installed version, for results."""
    if environment not in DISTRIBUTED:
        return PYTHON_PACKAGES[environment]
    command, known = [str(program(environment)), "-v"], os.environ | libraries(environment)
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=known)
    numbers = re.findall(r"\d+(?:\.\d+)+", said.stdout + said.stderr)
    return f"{environment}/{numbers[0]}" if numbers else environment


def libraries(environment: str) -> dict[str, str]:
    """Environment variables with which an unpacked program finds its unpacked libraries."""
    found = ":".join(map(str, (CACHE / environment / "usr" / "lib").glob("*-linux-gnu")))
    return {"LD_LIBRARY_PATH": found} if found else {}


def install() -> None:
    """Install every missing environment. Raises `CalledProcessError`."""
    for environment in (*PYTHON_PACKAGES, *DISTRIBUTED):
        try:
            program(environment)
        except NotInstalled:
            print(f"installing {environment} ...")
            _unpack(environment) if environment in DISTRIBUTED else _install_python(environment)
        print(f"{environment}: {version(environment)}, {program(environment)}")


def _install_python(environment: str) -> None:
    folder = CACHE / environment
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", PYTHON_PACKAGES[environment]], check=True)


def _unpack(environment: str) -> None:
    folder = CACHE / environment
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "--quiet", *DISTRIBUTED[environment]], cwd=folder, check=True)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
