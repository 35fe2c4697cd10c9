"""Two real vLLM pods are struck, again and again, while streams run: each is the uncut one, or ends with an error event
where the router has announced that it may.

30 faults and 300 streams, half an hour. Prints a table by fault and kind of request. Needs a model that knows
its answers (`answer_bodies.py`).
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import httpx
import pytest

from loadtest.commands.child_processes import JSON_CALL, RouterUrls, free_port
from tests.live.answer_bodies import CASES, CHAT, COMPLETIONS, FORMAT, MODEL, chat, completion, streamed
from tests.live.answer_scripts import TOOLS
from tests.live.engines import EngineProcess, start_vllm, started_together
from tests.live.live_fleet import AGENT_FLAGS, DEADLINE_S
from tests.live.router_process import await_continuation, router
from tests.request.continuation.recorded import Received

STREAMS = 10
"""At once, in each round."""
ERROR = b"\n\nevent: error\ndata: "

Bodies = dict[str, tuple[str, dict[str, Any]]]
KINDS: Bodies = {
    **{name: (CHAT, body) for name, body in CASES.items()},
    "languages": (CHAT, chat("languages")),
    "languages, log probabilities": (CHAT, chat("languages", logprobs=True)),
    "sampled stop": (CHAT, chat("stops", temperature=0.02, stop=["STO three EN"])),
    "sampled tool": (CHAT, chat("tool", temperature=0.02, tools=TOOLS)),
    "sampled tools": (CHAT, chat("tools", thinks=True, temperature=0.02, tools=TOOLS)),
    "sampled json": (CHAT, chat("json", temperature=0.02, response_format=FORMAT)),
    "sampled json after thinking": (CHAT, chat("thinkjson", thinks=True, temperature=0.02, response_format=FORMAT)),
    "seed": (CHAT, chat("bytes", temperature=0.02, seed=7)),
    "completion": (COMPLETIONS, completion("plain", max_tokens=120)),
    "completion, usage": (COMPLETIONS, completion("bytes", stream_options={"include_usage": True})),
    "completion, log probabilities": (COMPLETIONS, completion("bytes", logprobs=1)),
    "completion, stop": (COMPLETIONS, completion("stops", stop=["STO three EN"])),
    "sampled completion": (COMPLETIONS, completion("languages", max_tokens=120, temperature=0.02)),
}
FAULTS = Random(1).sample(["SIGKILL", "SIGSTOP", "SIGTERM", "drain", "drain, SIGTERM"], counts=[7, 8, 4, 7, 4], k=30)

pytestmark = [
    pytest.mark.live,
    pytest.mark.net,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason=f"no model that knows its answers in {MODEL}"),
]


@dataclass
class Fleet:
    """`ports`: of each pod, for requests and for KV events; it keeps them when it starts again."""

    pods: list[EngineProcess]
    ports: list[tuple[int, int]]
    urls: RouterUrls
    expected: dict[str, Any]
    results: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def strike(self, pod: EngineProcess, fault: str) -> None:
        if "drain" in fault:
            self._order(pod, "drain")
        if fault in ("SIGKILL", "SIGSTOP"):
            os.killpg(pod.process.pid, signal.Signals[fault])
        elif "SIGTERM" in fault:
            os.kill(pod.process.pid, signal.SIGTERM)

    def heal(self, pod: EngineProcess, fault: str) -> None:
        """Make the fleet whole again."""
        if fault == "SIGSTOP":
            os.killpg(pod.process.pid, signal.SIGCONT)
        elif fault != "drain":
            pod.kill()
            number = self.pods.index(pod)
            self.pods[number] = start_pod(number, *self.ports[number])
        if "drain" in fault:
            self._order(pod, "undrain")
        await_continuation(self.urls.admin)

    def _order(self, pod: EngineProcess, order: str) -> None:
        httpx.post(f"{self.urls.admin}/admin/pods/{pod.address}/{order}", headers=JSON_CALL).raise_for_status()

    def continued(self) -> Counter[str]:
        """Broken streams by what became of them."""
        found: Counter[str] = Counter()
        for line in httpx.get(f"{self.urls.admin}/metrics").text.splitlines():
            if line.startswith("warmroute_continuations_total{"):
                labels, value = line.rsplit(" ", 1)
                found[labels.partition("{")[2].rstrip("}")] = int(float(value))
        return found

    def table(self) -> str:
        """Streams by fault and kind: those that the pod in trouble had, and of them the equal ones and the errors."""
        faults = sorted(set(FAULTS))
        lines = [f"{'hit: equal + announced error':32}" + "".join(f"{fault:>16}" for fault in faults)]
        for kind in KINDS:
            cells = [[self.results[fault, kind, end] for end in ("equal", "error")] for fault in faults]
            lines.append(f"{kind:32}" + "".join(f"{f'{equal} + {errors}':>16}" for equal, errors in cells))
        for name, ends in (("all hit", ("equal", "error", "differs")), ("not hit", ("aside",))):
            sums = [sum(self.results[fault, kind, end] for kind in KINDS for end in ends) for fault in faults]
            lines.append(f"{name:32}" + "".join(f"{one:>16}" for one in sums))
        return "\n".join(lines)


def start_pod(number: int, port: int, kv_port: int) -> EngineProcess:
    return start_vllm(f"struck-{number}", port, MODEL, kv_port=kv_port, extra_args=AGENT_FLAGS)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    ports = [(free_port(), free_port()) for _ in range(2)]
    with started_together([partial(start_pod, number, *both) for number, both in enumerate(ports)]) as pods:
        config = {
            "models": [{"name": "tiny", "tokenizer": str(MODEL)}],
            "pods": [{"url": pod.url, "engine": "vllm"} for pod in pods],
            "continuation": {"enabled": True, "silence_s": 2},
            "edge": {"route_headers": True},
            "limits": {"retry_budget": 1.0},
        }
        with router(tmp_path_factory.mktemp("router"), config) as urls:
            await_continuation(urls.admin)
            expected = {kind: whole(streamed(pods[0].url, body, path)) for kind, (path, body) in KINDS.items()}
            fleet = Fleet(pods, ports, urls, expected)
            yield fleet
            print(f"\n{fleet.table()}")
            for labels, count in sorted(fleet.continued().items()):
                print(f"{count:6} {labels}")
            for pod in fleet.pods:
                pod.kill()


def whole(received: bytes) -> Any:
    return Received(received).whole[:7]


class Round:
    """Streams at once, of which the pod of one is struck once that one has sent a number of events."""

    def __init__(self, fleet: Fleet, fault: str, kinds: list[str], at_event: int) -> None:
        self.fleet, self.fault, self.kinds, self.at_event = fleet, fault, kinds, at_event
        self.victim: EngineProcess | None = None
        self.events: dict[str, int] = {}
        self.headers: dict[str, httpx.Headers] = {}
        self.streams: dict[str, bytes] = {}
        self.hit: dict[str, int] = {}
        """Events of the streams that the victim had, when it was struck."""
        self._lock = threading.Lock()

    def run(self) -> None:
        threads = [threading.Thread(target=self._ask, args=(kind,)) for kind in self.kinds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * DEADLINE_S)

    def _ask(self, kind: str) -> None:
        path, body = KINDS[kind]

        def note(events: int, headers: httpx.Headers) -> None:
            with self._lock:
                self.events[kind], self.headers[kind] = events, headers
                if events >= self.at_event and self.victim is None:
                    self._strike(headers["x-warmroute-pod"])

        self.streams[kind] = streamed(self.fleet.urls.public, body, path, note)

    def _strike(self, address: str) -> None:
        self.victim = next(pod for pod in self.fleet.pods if pod.address == address)
        self.fleet.strike(self.victim, self.fault)
        for kind, headers in self.headers.items():
            if headers["x-warmroute-pod"] == address and kind not in self.streams:
                self.hit[kind] = self.events[kind]

    def outcome(self, kind: str) -> str:
        """How a stream ended: `equal`, `error` where it was announced, or what is wrong with it."""
        said, _, error = self.streams[kind].partition(ERROR)
        if not error:
            return "equal" if whole(said) == self.fleet.expected[kind] else f"differs: {whole(said)}"
        if error.count(b"\n\n") != 1 or b"[DONE]" in said + error:
            return f"no single error: {error!r}"
        return "error" if self._is_announced(kind, said) else f"error where none was announced: {error!r}"

    def _is_announced(self, kind: str, said: bytes) -> bool:
        announced, had = self.headers[kind]["x-warmroute-continuable"], Received(said)
        if announced == "until=tool-call":
            return bool(had.calls)
        return announced.startswith("no") or (announced == "until=content" and "content" in had.texts)


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_streams_of_a_struck_pod_are_the_uncut_ones(fleet: Fleet, number: int) -> None:
    random, fault, kinds = Random(number), FAULTS[number], list(KINDS)
    chosen = [kinds[(number * STREAMS + place) % len(kinds)] for place in range(STREAMS)]
    before = fleet.continued()
    one = Round(fleet, fault, chosen, random.randrange(2, 40))
    try:
        one.run()
    finally:
        if one.victim is not None:
            fleet.heal(one.victim, fault)
    assert one.victim is not None, "no stream was long enough"
    outcomes = {kind: one.outcome(kind) for kind in chosen}
    for kind, outcome in outcomes.items():
        end = outcome if outcome in ("equal", "error") else "differs"
        fleet.results[fault, kind, "aside" if kind not in one.hit and end == "equal" else end] += 1
    print(f"\n{fault}: {one.hit} of {chosen}; {dict(fleet.continued() - before)}")
    wrong = {kind: outcome for kind, outcome in outcomes.items() if outcome not in ("equal", "error")}
    assert not wrong
    assert not (fault == "drain" and "error" in outcomes.values())
