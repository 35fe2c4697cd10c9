"""Starts the container of a pod as a process: its command, environment, mounted files and ServiceAccount token.

The files are mounted where the pod has them, in a mount namespace of its own. There is no network namespace: what a
container says about its own addresses, 0.0.0.0 and 127.0.0.1, becomes the address of the pod.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Object = dict[str, Any]
Lookup = Callable[[str, str], Mapping[str, str]]
"""The files of a volume: (`configmaps` or `secrets`, name)."""
TREE = Path(__file__).parents[2]
ACCOUNT = "var/run/secrets/kubernetes.io/serviceaccount"
MOUNT = """
mount --bind "$1/run" /run
mount -t overlay -o "lowerdir=/etc,upperdir=$1/etc,workdir=$1/work" overlay /etc
[ ! -d "$1/etc/warmroute" ] || mount --bind "$1/etc/warmroute" /etc/warmroute  # so that updates are seen
shift
exec "$@"
"""


@dataclass(frozen=True, slots=True)
class Container:
    """The first container of a pod, that has an address and a folder for its files."""

    pod: Object
    address: str
    folder: Path
    environment: Mapping[str, str]
    """In addition to that of its specification."""

    @property
    def spec(self) -> Object:
        first: Object = self.pod["spec"]["containers"][0]
        return first

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def write_files(self, lookup: Lookup) -> None:
        """Write what is mounted, also again after it has changed; files with a `subPath` are not updated."""
        for name in ("run", "etc", "work"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        volumes = {volume["name"]: volume for volume in self.pod["spec"].get("volumes", ())}
        for mount in self.spec.get("volumeMounts", ()):
            files, place = _files(volumes[mount["name"]], lookup), self._place(mount["mountPath"])
            if "subPath" in mount:
                if not place.exists():
                    self._write(place, files[mount["subPath"]])
                continue
            place.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                self._write(place / name, text)

    def write_account(self, files: Mapping[str, str]) -> None:
        """Write the token, the authority and the namespace, as the kubelet does."""
        for name, text in files.items():
            self._write(self.folder / ACCOUNT.removeprefix("var/") / name, text)

    @property
    def token(self) -> str:
        return (self.folder / ACCOUNT.removeprefix("var/") / "token").read_text()

    def write_hosts(self, names: Mapping[str, str]) -> None:
        """Addresses by name of Services."""
        self._write(self.folder / "etc/hosts", "".join(f"{address} {name}\n" for name, address in names.items()))

    def start(self) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-m", "router.cli"]
        if given := self.spec.get("command"):
            program = [sys.executable if given[0] == "python3" else given[0], *given[1:]]
        return self._run([*program, *self.spec.get("args", ())])

    def run_hook(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Run a command of its lifecycle."""
        return self._run([sys.executable if command[0] == "python3" else command[0], *command[1:]])

    def _run(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        own = [self._own(word) for word in command]
        isolated = ["unshare", "--map-root-user", "--mount", "sh", "-ec", MOUNT, "sh", str(self.folder), *own]
        environment = {**os.environ, "PYTHONPATH": str(TREE), **self.environment, **self._variables()}
        with self.log.open("ab") as log:
            return subprocess.Popen(isolated, stdout=log, stderr=log, env=environment, cwd=TREE, start_new_session=True)

    def _variables(self) -> dict[str, str]:
        return {one["name"]: one.get("value", self.address) for one in self.spec.get("env", ())}

    def _place(self, path: str) -> Path:
        return self.folder / path.lstrip("/").removeprefix("var/")

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_text(self._own(text))
        part.rename(path)

    def _own(self, text: str) -> str:
        return text.replace("0.0.0.0", self.address).replace("127.0.0.1", self.address)


def _files(volume: Object, lookup: Lookup) -> Mapping[str, str]:
    if "configMap" in volume:
        return lookup("configmaps", volume["configMap"]["name"])
    if "secret" in volume:
        found = lookup("secrets", volume["secret"]["secretName"])
        items = volume["secret"].get("items") or [{"key": key, "path": key} for key in found]
        return {item["path"]: base64.b64decode(found[item["key"]]).decode() for item in items}
    return {}
