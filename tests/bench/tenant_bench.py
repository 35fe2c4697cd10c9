"""What tenants cost: the memory of 100,000 keys, a look-up, and a request with ten tenants.

    python -m tests.bench.tenant_bench

A request is admitted and read, with its salt written into a body of 2 KB, and compared with one without tenants: in
bytecodes, which are exactly reproducible, and in CPU time of interleaved rounds.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from router.admission.gate import AdmissionGate
from router.admission.keys import Tenants
from router.config.tenant_file import TenantFile
from router.errors import RouterError
from router.types import Endpoint
from tests.api.test_openai_edge import make_edge

KEYS, TENANTS, ROUNDS, REQUESTS = 100_000, 10, 41, 2_000
CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 2_000}]}).encode()


def tenants_of(keys: list[bytes], folder: Path) -> Tenants:
    """The tenants of a file of keys; prints memory and time."""
    entries = ", ".join(f"{{name: t{number}}}" for number in range(TENANTS))
    (folder / "tenants.yaml").write_text(f"tenants: [{entries}]\nkey_files: [keys.txt]\n")
    lines = (f"t{number % TENANTS} {sha256(key).hexdigest()}\n" for number, key in enumerate(keys))
    (folder / "keys.txt").write_text("".join(lines))
    tracemalloc.start()
    found = TenantFile(folder / "tenants.yaml").read()
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    began = time.process_time()
    TenantFile(folder / "tenants.yaml").read()
    took_s = time.process_time() - began
    print(f"{KEYS} keys: {kept / 1e6:.1f} MB, {peak / 1e6:.1f} MB while they are read, in {took_s:.2f} s")
    return found


def look_up_us(tenants: Tenants, keys: list[bytes]) -> float:
    """CPU time of one look-up, with the loop."""
    began, now_s = time.process_time(), time.time()
    for key in keys:
        tenants.find(key, now_s)
    return (time.process_time() - began) / len(keys) * 1e6


def request_us(serve: Callable[[], Any]) -> float:
    began = time.process_time()
    for _ in range(REQUESTS):
        serve()
    return (time.process_time() - began) / REQUESTS * 1e6


def bytecodes(serve: Callable[[], Any]) -> int:
    """Number of bytecodes that run."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    serve()
    sys.settrace(trace)
    serve()
    sys.settrace(None)
    return count


def main() -> None:
    """Measure and print."""
    keys = [b"sk-wr-" + secrets.token_urlsafe(32).encode() for _ in range(KEYS)]
    with TemporaryDirectory() as folder:
        tenants = tenants_of(keys, Path(folder))
    times = sorted(look_up_us(tenants, keys) for _ in range(7))
    print(f"a look-up: {times[0]:.2f} to {times[-1]:.2f} us")
    edge, named = make_edge(), {b"authorization": b"Bearer " + keys[3]}

    def serve(gate: AdmissionGate) -> None:
        tenant = gate.admit(CHAT, named, time.time())
        assert not isinstance(tenant, RouterError)
        edge.inference(Endpoint.CHAT, named, BODY, "r", tenant)

    without, with_tenants = partial(serve, AdmissionGate()), partial(serve, AdmissionGate(lambda: tenants))
    more_us = [request_us(with_tenants) - request_us(without) for _ in range(ROUNDS)]
    print(f"a request: {bytecodes(with_tenants) - bytecodes(without)} bytecodes more, {median(more_us):.2f} us")


if __name__ == "__main__":
    main()
