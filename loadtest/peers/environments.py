"""Where do the peers' programs live, and how do they get there?

One environment a package under a cache folder, at a pinned version, so that no peer meets another's dependencies or
ours. nginx comes from the distribution: its package is unpacked there and never installed. This file starts no router.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "warmroute" / "peers"
PYTHON_PACKAGES: Mapping[str, str] = {
    "sglang-router": "sglang-router==0.3.2",
    "smg": "smg==1.13.0",
    "vllm-router": "vllm-router==0.1.17",
    "litellm": "litellm[proxy]==1.106.2",
}
"""Requirement by environment; each has a program of the environment's name."""
NGINX = "nginx"


class NotInstalled(Exception):
    """A peer's program is missing; the message says what to run."""


def program(environment: str) -> Path:
    """The program of that name. Raises `NotInstalled`."""
    if environment == NGINX and (installed := shutil.which(NGINX)):
        return Path(installed)
    path = CACHE / environment / ("usr/sbin" if environment == NGINX else "bin") / environment
    if not path.exists():
        raise NotInstalled(f"{environment} is not installed; do: python loadtest/peers/compare.py --install")
    return path


def version(environment: str) -> str:
    """What was installed, as results name it."""
    if environment != NGINX:
        return PYTHON_PACKAGES[environment]
    said = subprocess.run([program(NGINX), "-v"], capture_output=True, text=True, check=True)
    return said.stderr.strip().rpartition(" ")[2]


def install() -> None:
    """Make every environment that is not there yet. Raises `CalledProcessError` where a tool failed."""
    for environment in (*PYTHON_PACKAGES, NGINX):
        try:
            program(environment)
        except NotInstalled:
            print(f"installing {environment} ...")
            _install_nginx() if environment == NGINX else _install_python(environment)
        print(f"{environment}: {version(environment)}, {program(environment)}")


def _install_python(environment: str) -> None:
    folder = CACHE / environment
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", PYTHON_PACKAGES[environment]], check=True)


def _install_nginx() -> None:
    folder = CACHE / NGINX
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "--quiet", NGINX], cwd=folder, check=True)
    (package,) = folder.glob("nginx_*.deb")
    subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
