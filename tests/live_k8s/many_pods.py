"""CPU and memory of following a real API server whose pods change their status all the time.

    python -m tests.live_k8s.many_pods [PODS] [WRITES_PER_S] [SECONDS]

One write in 50 changes what the router uses. Prints one line of JSON; `tests/bench/discovery_bench.py` measures the
same without an API server.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from tests.bench.discovery_bench import follow, is_ready, pod
from tests.live_k8s.api_server import ADMIN_TOKEN, CORE, ApiServer, checked, running

PATH = f"{CORE}/namespaces/models/pods"
SPAWN = get_context("spawn")


def create(server: ApiServer, pods: int) -> None:
    """Pods of 5 to 10 KB, all ready."""
    with server.client() as client:
        checked(client.post(f"{CORE}/namespaces", json={"metadata": {"name": "models"}}))
        for number in range(pods):
            found = pod(number, 0)
            name, status = found["metadata"]["name"], found.pop("status")
            for field in ("managedFields", "uid", "resourceVersion", "creationTimestamp"):
                del found["metadata"][field]
            found["spec"]["volumes"] = [{"name": f"volume-{n}", "emptyDir": {}} for n in range(5)]
            checked(client.post(PATH, json=found))
            _write(client, name, status["podIP"], ready=True, count=0)


def write(url: str, pods: int, writes_per_s: int) -> None:
    """Change the status of one pod after the other."""
    server = ApiServer(Path())
    server.port = int(url.rpartition(":")[2])
    began_s = time.monotonic()
    with server.client() as client:
        for count in range(1, sys.maxsize):
            number = count % pods
            address = f"10.0.{number // 250}.{number % 250 + 1}"
            _write(client, f"vllm-{number}", address, ready=is_ready(count, pods), count=count)
            time.sleep(max(0.0, began_s + count / writes_per_s - time.monotonic()))


def _write(client: Any, name: str, address: str, *, ready: bool, count: int) -> None:
    condition = {"type": "Ready", "status": str(ready), "message": str(count)}
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": [condition]}
    headers = {"content-type": "application/merge-patch+json"}
    checked(client.patch(f"{PATH}/{name}/status", json={"status": status}, headers=headers))


def measure(api: dict[str, str], seconds: int) -> dict[str, float]:
    """In a process of its own."""
    return uvloop.run(follow(api, seconds))


@contextmanager
def writing(server: ApiServer, pods: int, writes_per_s: int) -> Iterator[None]:
    process = SPAWN.Process(target=write, args=(server.url, pods, writes_per_s))
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def main(pods: int = 500, writes_per_s: int = 50, seconds: int = 20) -> None:
    with TemporaryDirectory() as folder, running(Path(folder)) as server:
        create(server, pods)
        token = Path(folder, "token")
        token.write_text(ADMIN_TOKEN)
        api = {"url": server.url, "token_file": str(token), "ca_file": str(server.ca_file)}
        with writing(server, pods, writes_per_s), SPAWN.Pool(1) as pool:
            found = pool.apply(measure, (api, seconds))
    print(json.dumps({name: round(value, 2) for name, value in found.items()}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
