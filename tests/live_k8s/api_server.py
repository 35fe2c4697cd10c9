"""Runs a real etcd and kube-apiserver, as `install.sh` built them, and talks to them as an administrator.

No scheduler, controller or kubelet runs: `fake_node.py` does their part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from loadtest.commands.child_processes import free_port, stop_process
from tests.live_k8s.certificates import make_chain, make_signing_key

Object = dict[str, Any]
HOME = Path(os.environ.get("WARMROUTE_LIVE_K8S_HOME", Path.home() / ".cache" / "warmroute" / "k8s"))
ADMIN_TOKEN = "token-of-the-administrator"
START_TIMEOUT_S = 180.0
CORE = "/api/v1"
APPS = "/apis/apps/v1"
RBAC = "/apis/rbac.authorization.k8s.io/v1"


class ClusterFailed(Exception):
    """The cluster did not start, or refused a request."""


class ApiServer:
    """etcd and the API server. The latter can be stopped and started again, with the same objects and port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._etcd: subprocess.Popen[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._etcd_port = free_port()
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def certificates(self) -> Path:
        """Folder of its certificate (`server.crt`, `server.key`) and keys."""
        return self._folder / "certificates"

    @property
    def ca_file(self) -> Path:
        """The authority that signed the certificate of the one that signed the API server's."""
        return self.certificates / "ca.crt"

    def start(self) -> None:
        """Returns when the API server is ready. Raises `ClusterFailed`."""
        (self._folder / "tokens.csv").write_text(f"{ADMIN_TOKEN},admin,admin,system:masters\n")
        if not self.ca_file.exists():
            self.certificates.mkdir()
            make_chain(self.certificates)
            make_signing_key(self.certificates)
        if self._etcd is None:
            self._etcd = self._run("etcd", self._etcd_arguments())
        self._process = self._run("kube-apiserver", self._api_arguments())
        self._await_ready()

    def kill(self) -> None:
        """End the API server at once. etcd stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End both."""
        for process in filter(None, (self._process, self._etcd)):
            stop_process(process)
        self._process = self._etcd = None

    def client(self, **options: Any) -> httpx.Client:
        """A client with all permissions."""
        headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        return httpx.Client(base_url=self.url, headers=headers, verify=False, trust_env=False, timeout=20, **options)

    def write_kubeconfig(self) -> Path:
        """A file for Helm and kubectl."""
        cluster = {"server": self.url, "certificate-authority": str(self.ca_file)}
        context = {"cluster": "live", "user": "admin"}
        path = self._folder / "kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "live", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": ADMIN_TOKEN}}],
            "contexts": [{"name": "live", "context": context}],
            "current-context": "live",
        }
        path.write_text(json.dumps(config))  # JSON is YAML
        path.chmod(0o600)
        return path

    def _etcd_arguments(self) -> list[str]:
        url, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{free_port()}"
        return [
            f"--data-dir={self._folder}/etcd",
            *(f"--listen-client-urls={url}", f"--advertise-client-urls={url}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
            f"--initial-cluster=default={peer}",
        ]

    def _api_arguments(self) -> list[str]:
        certificates = self.certificates
        return [
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            *("--bind-address=127.0.0.1", f"--secure-port={self.port}"),
            *(f"--tls-cert-file={certificates}/server.crt", f"--tls-private-key-file={certificates}/server.key"),
            "--advertise-address=192.0.2.1",  # must not be loopback; nobody connects to it
            "--service-cluster-ip-range=10.96.0.0/24",
            *("--authorization-mode=RBAC", f"--token-auth-file={self._folder}/tokens.csv"),
            *(
                "--service-account-issuer=https://kubernetes.default.svc",
                "--api-audiences=https://kubernetes.default.svc",
            ),
            *(f"--service-account-{what}={certificates}/accounts.key" for what in ("key-file", "signing-key-file")),
            "--disable-admission-plugins=ServiceAccount",  # it waits for a controller
        ]

    def _run(self, name: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen([HOME / name, *arguments], stdout=log, stderr=log, start_new_session=True)

    def _await_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        with self.client() as client:
            while time.monotonic() < deadline_s:
                if self._process is None or self._process.poll() is not None:
                    break
                try:
                    if client.get("/readyz").status_code == 200:
                        return
                except httpx.HTTPError:
                    pass  # not started yet
                time.sleep(0.1)
        raise ClusterFailed(
            f"the API server does not start:\n{(self._folder / 'kube-apiserver.log').read_text()[-4000:]}"
        )


def checked(response: httpx.Response) -> Any:
    """The JSON of a successful response. Raises `ClusterFailed`."""
    if response.is_error:
        raise ClusterFailed(
            f"{response.request.method} {response.request.url}: {response.status_code} {response.text[:500]}"
        )
    return response.json()


@contextmanager
def running(folder: Path) -> Iterator[ApiServer]:
    """A cluster with nothing in it."""
    server = ApiServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()


if not (HOME / "kube-apiserver").exists() and "pytest" in sys.modules:
    raise ClusterFailed("no kube-apiserver: run `make live-k8s`, or tests/live_k8s/install.sh")
