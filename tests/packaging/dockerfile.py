"""Executes the steps of a Dockerfile without a container engine: in a scratch root, with `unshare` and `chroot`.

The operating system below the steps is this machine's, mounted read-only, not that of the Dockerfile's base image, and
so is Python. All other steps are the Dockerfile's own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

DEVICES = ("/dev", "/proc")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ssl", "/etc/ld.so.cache", "/etc/resolv.conf", *DEVICES)
SYSTEM_FILES = ("/etc/pip.conf", "/etc/hosts", "/etc/nsswitch.conf")
PASSED = re.compile(r"(PIP_|SSL_|REQUESTS_)\w+|\w+_PROXY", re.IGNORECASE)
"""Environment variables with which this machine reaches package indexes."""
CACHE = "/root/.cache/pip"


@dataclass
class Stage:
    """The instructions of one stage, in order, and what its image says about containers."""

    steps: list[tuple[str, str]] = field(default_factory=list)

    def last(self, instruction: str) -> str:
        [*_, text] = [text for name, text in self.steps if name == instruction]
        return text

    def pairs(self, instruction: str) -> dict[str, str]:
        """The names and values of all ENV or LABEL instructions."""
        texts = [text for name, text in self.steps if name == instruction]
        return dict(pair.split("=", 1) for text in texts for pair in shlex.split(text))

    @property
    def command(self) -> list[str]:
        """ENTRYPOINT and CMD."""
        return [*json.loads(self.last("ENTRYPOINT")), *json.loads(self.last("CMD"))]


def stages(text: str) -> list[Stage]:
    """The stages of a Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    found: list[Stage] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            found.append(Stage())
        found[-1].steps.append((name, rest.strip()))
    return found


@cache
def own_cache() -> str:
    """The folder of this machine's pip."""
    found = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@dataclass
class ScratchRoot:
    """A folder that becomes the root of processes."""

    folder: Path
    context: Path

    def build(self, stage: Stage) -> None:
        """Execute the stage. Raises `CalledProcessError`."""
        workdir = "/"
        for name, text in stage.steps:
            if name == "WORKDIR":
                workdir = text
                self._inside(workdir).mkdir(parents=True, exist_ok=True)
            elif name == "COPY":
                *sources, target = text.split()
                self._copy(sources, self._inside(workdir, target), is_folder=target.endswith("/"))
            elif name == "RUN":
                command = re.sub(r"^(--\S+\s+)+", "", text)
                environment = {key: value for key, value in os.environ.items() if PASSED.fullmatch(key)}
                paths = {"PATH": "/opt/python:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root"}
                subprocess.run(
                    self._entered(f"cd {workdir} && exec sh -ec {shlex.quote(command)}"),
                    env={**environment, **paths},
                    check=True,
                )

    @contextmanager
    def running(self, command: list[str], environment: Mapping[str, str], user: str) -> Iterator[subprocess.Popen[str]]:
        """A process of this user, without capabilities, on a read-only root with a /tmp of its own."""
        uid, _, gid = user.partition(":")
        limited = (
            f"setpriv --reuid {uid} --regid {gid} --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all"
        )
        with subprocess.Popen(
            self._entered(f"exec {limited} {shlex.join(command)}", read_only=True),
            env={**environment, "PATH": f"{environment['PATH']}:/usr/sbin:/sbin"},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.terminate()

    def _inside(self, *parts: str) -> Path:
        return self.folder / os.path.normpath("/".join(parts)).lstrip("/")

    def _copy(self, sources: list[str], target: Path, *, is_folder: bool) -> None:
        for source in (self.context / one for one in sources):
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            else:
                target.mkdir(parents=True, exist_ok=True) if is_folder else None
                shutil.copy(source, target)

    def _entered(self, script: str, *, read_only: bool = False) -> list[str]:
        """The command that runs a shell script below the root, in a mount namespace of its own."""
        root, prefix = shlex.quote(str(self.folder)), sys.base_prefix
        mounts = [f"mount --bind {root} {root}"]
        for path in (*SYSTEM, prefix):
            if Path(path).exists():
                self._mount_point(path)
                mounts.append(f"mount --bind {path} {root}{path}")
                mounts += [] if path in DEVICES else [f"mount -o remount,bind,ro {root}{path}"]
        self._python(prefix)
        if read_only:
            mounts += [f"mount -o remount,bind,ro {root}", f"mount -t tmpfs tmpfs {root}/tmp"]
        elif Path(own_cache()).is_dir():
            self._inside(CACHE).mkdir(parents=True, exist_ok=True)
            mounts.append(f"mount --bind {own_cache()} {root}{CACHE}")
        whole = " && ".join([*mounts, f"exec chroot {root} sh -ec {shlex.quote(script)}"])
        user = [] if os.geteuid() == 0 else ["--map-root-user"]
        return ["unshare", *user, "--mount", "sh", "-ec", whole]

    def _mount_point(self, path: str) -> None:
        inside = self._inside(path)
        if Path(path).is_dir():
            inside.mkdir(parents=True, exist_ok=True)
        else:
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.touch()

    def _python(self, prefix: str) -> None:
        """`python` of the base image, and files of /etc."""
        for folder in ("/tmp", "/opt/python"):
            self._inside(folder).mkdir(parents=True, exist_ok=True)
        link = self._inside("/opt/python/python")
        if not link.is_symlink():
            link.symlink_to(f"{prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}")
        for file in SYSTEM_FILES:
            if Path(file).is_file():
                shutil.copy(file, self._inside(file))
        own = Path.home() / ".config/pip/pip.conf"
        if own.is_file():
            self._inside("/root/.config/pip").mkdir(parents=True, exist_ok=True)
            shutil.copy(own, self._inside("/root/.config/pip/pip.conf"))
