"""What tenants cost: the memory of 100,000 keys, a look-up, and a request with ten tenants.

    python -m tests.bench.tenant_bench

A request is admitted and read, with its salt written into a body of 2 KB, and compared with one without tenants: in
bytecodes, which are exactly reproducible, and in CPU time of interleaved rounds. Quotas of all four kinds, their
headers and usage are called without the rest of the router; each answer corrects the counted tokens.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, cast

from router.admission.gate import AdmissionGate
from router.admission.quotas import Quota, Quotas
from router.admission.tenant import Tenant, Tenants
from router.config.tenant_file import TenantFile
from router.errors import RouterError
from router.observe.class_metrics import ClassMetrics
from router.observe.ended import Ended
from router.observe.fast_metrics import Registry
from router.observe.receipts import ReceiptLog, UsageWriter
from router.phases import Phases
from router.policy.decide import decide
from router.request.context import RequestContext
from router.request.effects import Effects
from router.request.endings import usage_of
from router.request.inbound import Head
from router.request.quota_charges import QuotaCharges
from router.request.response_reader import ResponseReader
from router.types import Endpoint
from router.wiring.router import SYSTEM_CLOCK
from tests.kit import scenes
from tests.kit.scenes import POLICIES, pod, ready, scene
from tests.request.test_reading import make_reader

KEYS, TENANTS, ROUNDS, REQUESTS = 100_000, 10, 41, 2_000
CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 2_000}]}).encode()
ANSWER = b'{"usage": {"prompt_tokens": 500, "completion_tokens": 64}}'
QUOTA = Quota(
    requests_per_minute=10**9,
    uncached_prompt_tokens_per_minute=10**12,
    output_tokens_per_minute=10**12,
    concurrent_requests=1000,
)


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


WAITS = cast(Effects, None)
"""No request has to wait."""


def quotas_and_usage(log: ReceiptLog, quotas: tuple[Quota, ...]) -> Callable[[], None]:
    """A request of the tenants in turn, counted and recorded if they have quotas, and nothing else of it."""
    charges, metrics, writer = (
        QuotaCharges(Quotas(), SYSTEM_CLOCK),
        ClassMetrics(Registry()),
        UsageWriter("bench", log.write),
    )
    tenants = cycle([Tenant(name=f"t{number}", quotas=quotas) for number in range(TENANTS)])
    head, decision = Head("r", "POST", b"/", []), decide(scene(*ready(pod("a"))), POLICIES["least_load"])
    reader = ResponseReader()
    reader.feed(ANSWER)

    def serve() -> None:
        tenant = next(tenants)
        request = scenes.request(body=BODY, tenant=tenant.name)
        phases = Phases(SYSTEM_CLOCK.now_s())
        context = RequestContext(request, head, phases, tenant=tenant, reader=reader, status=200, decision=decision)
        if tenant.quotas:
            for counting in (charges.begin(context, WAITS), charges.charge(context, 256, WAITS)):
                with suppress(StopIteration):
                    counting.send(None)
            context.candidate, context.result = decision.candidates[0], "ok"
            used = usage_of(context, 64)
            assert context.hold is not None
            charges.end(context.hold, used, is_unknown=False)
            metrics.observe_usage(tenant.name, "m", used)
            writer.ended(Ended("r", 1.0, "m", CHAT, "ok", tenant=tenant.name, used=used))

    return serve


def print_difference(what: str, with_it: Callable[[], Any], without: Callable[[], Any]) -> None:
    """In bytecodes, and in CPU time of interleaved rounds."""
    more_us = [request_us(with_it) - request_us(without) for _ in range(ROUNDS)]
    print(f"{what}: {bytecodes(with_it) - bytecodes(without)} bytecodes more, {median(more_us):.2f} us")


def main() -> None:
    """Measure and print."""
    keys = [b"sk-wr-" + secrets.token_urlsafe(32).encode() for _ in range(KEYS)]
    with TemporaryDirectory() as folder:
        tenants = tenants_of(keys, Path(folder))
    times = sorted(look_up_us(tenants, keys) for _ in range(7))
    print(f"a look-up: {times[0]:.2f} to {times[-1]:.2f} us")
    reader, named = make_reader(), {b"authorization": b"Bearer " + keys[3]}

    def serve(gate: AdmissionGate) -> None:
        tenant = gate.admit(CHAT, named, time.time())
        assert not isinstance(tenant, RouterError)
        reader.read(Endpoint.CHAT, named, BODY, "r", tenant)

    without, with_tenants = partial(serve, AdmissionGate()), partial(serve, AdmissionGate(lambda: tenants))
    print_difference("keys and salts", with_tenants, without)
    with TemporaryDirectory() as folder:
        log = ReceiptLog(Path(folder, "usage.jsonl"), lambda _delay_s, _call: None)
        counted, uncounted = quotas_and_usage(log, (QUOTA,)), quotas_and_usage(log, ())
        print_difference("quotas, headers and usage", counted, uncounted)
        log.close()


if __name__ == "__main__":
    main()
