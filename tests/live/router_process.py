"""Starts `warmroute serve` or `publish` with a configuration file, in front of real engines."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from loadtest.commands.child_processes import RouterUrls, free_port

START_TIMEOUT_S = 180.0


@contextmanager
def router(folder: Path, config: dict[str, Any], *, policies: Path | None = None) -> Iterator[RouterUrls]:
    """Run a router; yields its URLs once all of its pods are trusted."""
    port, admin_port = free_port(), free_port()
    log = folder / f"router-{port}.log"
    more = ["--policies", str(policies)] if policies else []
    process = _start("serve", folder, {**config, "admin": {"port": admin_port}}, port, log, more)
    try:
        urls = RouterUrls(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}")
        _await_trust(urls.admin, process, log)
        yield urls
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@contextmanager
def publisher(folder: Path, config: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a publisher; yields once all its holders are in the index."""
    port = free_port()
    log = folder / f"publisher-{port}.log"
    process = _start("publish", folder, config, port, log)
    try:
        _await_ready(f"http://127.0.0.1:{port}", process, log)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def _start(
    command: str, folder: Path, config: dict[str, Any], port: int, log: Path, more: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    file = folder / f"{command}-{port}.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    arguments = [sys.executable, "-m", "router.cli", command, "--config", str(file), "--port", str(port), *more]
    with log.open("wb") as output:
        return subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT)


def _await_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        except httpx.HTTPError:
            pass  # not started yet
        time.sleep(0.1)
    raise AssertionError(f"the publisher is not ready\n{log.read_text()[-4000:]}")


def _await_trust(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    pods: list[dict[str, Any]] = []
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            pods = httpx.get(f"{url}/admin/pods").raise_for_status().json()
        except httpx.HTTPError:
            pods = []
        if pods and all(pod["trust"] == "trusted" for pod in pods):
            return
        time.sleep(0.1)
    raise AssertionError(f"the router does not trust all of {pods}\n{log.read_text()[-4000:]}")


def await_conversions(admin_url: str, endpoint: str) -> None:
    """Wait until the router has proven for all pods how they convert the bodies of an endpoint."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    pods: list[dict[str, Any]] = []
    while time.monotonic() < deadline_s:
        pods = httpx.get(f"{admin_url}/admin/pods").json()
        if all(endpoint in pod["converts"] for pod in pods):
            return
        time.sleep(0.1)
    raise AssertionError(f"{endpoint} is not proven for all of {pods}")


def await_pictures(admin_url: str) -> None:
    """Wait until the router has proven for all pods how they identify pictures."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    pods: list[dict[str, Any]] = []
    while time.monotonic() < deadline_s:
        pods = httpx.get(f"{admin_url}/admin/pods").json()
        if all(pod["reads_pictures"] for pod in pods):
            return
        time.sleep(0.1)
    raise AssertionError(f"pictures are not proven for all of {pods}")


def await_continuation(admin_url: str) -> None:
    """Wait until the router has proven for all pods that they continue chats and completions, and all are ready."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    pods: list[dict[str, Any]] = []
    while time.monotonic() < deadline_s:
        pods = httpx.get(f"{admin_url}/admin/pods").json()
        if all(len(pod["continues"]) > 1 and pod["state"] == "ready" for pod in pods):
            return
        time.sleep(0.1)
    raise AssertionError(f"continuation is not proven for all of {pods}")
