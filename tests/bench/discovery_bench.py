"""CPU and memory of following a Kubernetes cluster whose pods change their status all the time.

    python -m tests.bench.discovery_bench [PODS] [EVENTS_PER_S] [SECONDS]

A server process sends pods of 7 KB, as kubelets and managed fields make them. One event in 50 changes something that
the router uses. Prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import uvloop

RELEVANT = 50


def is_ready(count: int, pods: int) -> bool:
    """Whether write number `count` reports its pod as ready: one in `RELEVANT` changes that."""
    return bool(count % RELEVANT) or bool(count // pods % 2)


def pod(number: int, version: int, *, ready: bool = True) -> dict[str, Any]:
    fields: dict[str, Any] = {f"f:field-{n}": {".": {}, "f:name": {}, "f:value": {}} for n in range(60)}
    container = {
        "name": "engine",
        "image": "vllm/vllm-openai:v0.31.0",
        "ports": [{"name": "http", "containerPort": 8000}],
        "env": [{"name": f"VARIABLE_{n}", "value": "value" * 4} for n in range(20)],
        "volumeMounts": [{"name": f"volume-{n}", "mountPath": f"/mnt/volume-{n}"} for n in range(5)],
    }
    kinds = ("Initialized", "ContainersReady", "PodScheduled")
    conditions = [{"type": kind, "status": "True", "lastProbeTime": None} for kind in kinds]
    return {
        "metadata": {
            "name": f"vllm-{number}",
            "namespace": "models",
            "uid": f"00000000-0000-0000-0000-{number:012d}",
            "resourceVersion": str(version),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"app": "vllm", "llm-d.ai/role": "both", **{f"label-{n}": "value" for n in range(10)}},
            "annotations": {"example.com/applied": "x" * 1500},
            "managedFields": [{"manager": "kubelet", "fieldsV1": fields}],
        },
        "spec": {"nodeName": f"node-{number % 60}", "containers": [container]},
        "status": {
            "phase": "Running",
            "podIP": f"10.0.{number // 250}.{number % 250 + 1}",
            "conditions": [*conditions, {"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def serve(pipe: Connection, pods: int, events_per_s: int) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        if b"watch=1" not in target:
            body = json.dumps({"metadata": {"resourceVersion": "1"}, "items": [pod(n, 1) for n in range(pods)]})
            writer.write(f"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
            await writer.drain()
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for count in range(2, 1_000_000):
            found = pod(count % pods, count, ready=is_ready(count, pods))
            line = json.dumps({"type": "MODIFIED", "object": found}).encode() + b"\n"
            writer.write(b"%x\r\n%b\r\n" % (len(line), line))
            await writer.drain()
            await asyncio.sleep(1 / events_per_s)

    async def main() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def rss_mib() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def follow(api: dict[str, str], seconds: float) -> dict[str, float]:
    """`api`: the fields of `KubernetesApi`."""
    began_mib = rss_mib()
    from router.config.pod_schema import KubernetesApi, KubernetesPods
    from router.feeds.discovery.kube_api import KubeApi
    from router.feeds.discovery.kubernetes_pods import KubernetesSource
    from router.feeds.discovery.membership import Membership, SourceStatus
    from router.fleet.fleet import Fleet
    from router.types import PodSpeed
    from router.wiring.kube_sources import api_server

    imported_mib = rss_mib()
    entry = KubernetesPods(
        selector="app=vllm",
        namespaces=("models",),
        node_labels=False,
        api=KubernetesApi.model_validate(api),
    )
    status, speed, fleet = SourceStatus("kubernetes"), PodSpeed(1.0, 0.02, 0.0), Fleet()
    source = KubernetesSource(entry, KubeApi(entry.api, api_server), {"models": status})
    members = Membership(fleet, lambda *_: (speed, 0), {"kubernetes": source})
    tasks = [asyncio.ensure_future(run()) for run in members.feeds.values()]
    began_cpu_s, began_s = time.process_time(), time.monotonic()
    while not fleet.snapshot.pods:
        await asyncio.sleep(0.01)
    listed_cpu_s = time.process_time() - began_cpu_s
    watch = source._watches[0]
    began_version = int(watch.table.version)
    began_cpu_s, began_s = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - began_s
    cpu_share = (time.process_time() - began_cpu_s) / took_s
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "pods": len(fleet.snapshot.pods),
        "events_per_s": (int(watch.table.version) - began_version) / took_s,
        "list_cpu_ms": listed_cpu_s * 1000,
        "cpu_percent": cpu_share * 100,
        "imports_mib": imported_mib - began_mib,
        "state_mib": rss_mib() - imported_mib,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - imported_mib,
    }


def decode_us() -> dict[str, float]:
    """Microseconds for one event."""
    from router.feeds.discovery.kube_api import pod_reader, read_event

    line, read = json.dumps({"type": "MODIFIED", "object": pod(1, 1)}).encode(), pod_reader(frozenset())
    found = {}
    readers: dict[str, Callable[[], object]] = {
        "typed": lambda: read_event(line, read),
        "msgspec": lambda: msgspec.json.decode(line),
        "json": lambda: json.loads(line),
    }
    for name, call in readers.items():
        began_s = time.process_time()
        for _ in range(2000):
            call()
        found[f"{name}_us"] = (time.process_time() - began_s) / 2000 * 1e6
    return {"event_bytes": len(line), **found}


def main(pods: int = 500, events_per_s: int = 50, seconds: int = 20) -> None:
    ours, theirs = Pipe()
    server = Process(target=serve, args=(theirs, pods, events_per_s), daemon=True)
    server.start()
    try:
        api = {"url": f"http://127.0.0.1:{ours.recv()}", "token_file": "/none"}
        found = uvloop.run(follow(api, seconds))
    finally:
        server.terminate()
    print(json.dumps({name: round(value, 2) for name, value in (found | decode_us()).items()}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
