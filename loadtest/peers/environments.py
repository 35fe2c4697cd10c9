"""Where do the peers' programs live, and how do they get there?

One environment a package under a cache folder, at a pinned version, so that no peer meets another's dependencies or
ours. nginx and haproxy come from the distribution: their packages are unpacked there and never installed. This file
starts no router.
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
"""Requirement by environment; each has a program of the environment's name."""
NGINX, HAPROXY = "nginx", "haproxy"
DISTRIBUTED: Mapping[str, Sequence[str]] = {
    NGINX: ("nginx",),
    HAPROXY: ("haproxy", "liblua5.3-0", "libopentracing-c-wrapper0", "libopentracing1"),
}
"""Packages by environment, with the libraries that a bare system lacks."""


class NotInstalled(Exception):
    """A peer's program is missing; the message says what to run."""


def program(environment: str) -> Path:
    """The program of that name. Raises `NotInstalled`."""
    if environment in DISTRIBUTED and (installed := shutil.which(environment)):
        return Path(installed)
    path = CACHE / environment / ("usr/sbin" if environment in DISTRIBUTED else "bin") / environment
    if not path.exists():
        raise NotInstalled(f"{environment} is not installed; do: python loadtest/peers/compare.py --install")
    return path


def version(environment: str) -> str:
    """What was installed, as results name it."""
    if environment not in DISTRIBUTED:
        return PYTHON_PACKAGES[environment]
    command, known = [str(program(environment)), "-v"], os.environ | libraries(environment)
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=known)
    numbers = re.findall(r"\d+(?:\.\d+)+", said.stdout + said.stderr)
    return f"{environment}/{numbers[0]}" if numbers else environment


def libraries(environment: str) -> dict[str, str]:
    """Variables with which an unpacked program finds the libraries that were unpacked with it."""
    found = ":".join(map(str, (CACHE / environment / "usr" / "lib").glob("*-linux-gnu")))
    return {"LD_LIBRARY_PATH": found} if found else {}


def install() -> None:
    """Make every environment that is not there yet. Raises `CalledProcessError` where a tool failed."""
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
