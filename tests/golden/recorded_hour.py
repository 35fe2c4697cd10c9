"""An hour of mixed traffic through the core, in virtual time, and all that is recorded of it.

    python -m tests.golden.recorded_hour    writes `recorded_hour.xz` again

Three fleets serve for twenty minutes each: pods that pull KV, prefill and decode pods, and pods behind a queue. Their
clients chat, complete, embed and send messages, in streams or not. Pods fail, break off and refuse; clients leave; a
tenant exceeds its quota. Nothing depends on the machine: seeds are fixed, and numbers have `DIGITS` digits.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from router.admission.admission_queue import AdmissionConfig
from router.admission.quotas import Quota
from router.admission.tenant import OPEN_TENANT, Slo, Tenant
from router.endpoints import Endpoint
from router.errors import ConnectFailed, UpstreamBroken, UpstreamError, UpstreamTimeout
from router.fleet.fleet import PodEvent
from router.observe.receipts import explained
from router.request.fleet_state import Clock
from router.request.reading import RequestReader
from router.types import (
    InferenceRequest,
    Link,
    Links,
    Pod,
    PodLoad,
    PodSpeed,
    PodState,
    PrefixTrust,
    PromptPrefix,
    Role,
)
from tests.kit.cores import CoreOfPods
from tests.kit.memory_front import MemoryExchange, MemoryFront
from tests.kit.scenes import make_pod, prompt_of

GOLDEN = Path(__file__).with_name("recorded_hour.xz")
DIGITS = 7
PART_S = 1200.0
EXPLAINED = 25
"""One of as many decisions is explained with all its inputs."""
CHAT, COMPLETIONS, MESSAGES, EMBEDDINGS = (
    one.value for one in (Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.MESSAGES, Endpoint.EMBEDDINGS)
)
TENANTS = (
    OPEN_TENANT,
    Tenant(name="steady", quotas=(Quota(requests_per_minute=1000, output_tokens_per_minute=10**6),)),
    Tenant(
        name="greedy",
        quotas=(Quota(requests_per_minute=4, uncached_prompt_tokens_per_minute=9000, concurrent_requests=2),),
    ),
)
SPEED = PodSpeed(2.0, 0.08, 4e-7, 12.0, 0.05, 4e-5)
SLOW = PodSpeed(2.0, 0.13, 6e-7, 20.0, 0.05, 6e-5)
BUSY = PodSpeed(2.0, 0.9, 6e-7, 20.0, 0.05, 6e-5)


@dataclass
class Talk:
    """A conversation, whose prompt grows by each turn."""

    tokens: list[int]
    tenant: Tenant
    path: str
    streams: bool
    turns: int


def _pods(**facts: Any) -> list[Pod]:
    usual: dict[str, Any] = {
        "capacity_tokens": 60_000,
        "block_size_tokens": 16,
        "kv_bytes_per_token": 131_072,
        "max_model_len_tokens": 16_384,
        "hardware": "h100",
        "converts": frozenset({Endpoint.MESSAGES}),
    }
    return [make_pod(name, **{**usual, "speed": SLOW if name == "c" else SPEED, **facts}) for name in "abcd"]


def _roles(pods: list[Pod]) -> list[Pod]:
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.BOTH)
    return [replace(pod, role=role) for pod, role in zip(pods, roles, strict=True)]


@dataclass
class Part:
    """One fleet, and its traffic for `PART_S`."""

    name: str
    pods: list[Pod]
    starts_s: float
    """Mean time between two conversations."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now_s = 1000.0
        self._random = Random(self.name)
        clock = Clock(lambda: self.now_s, lambda: 1.8e9 + self.now_s)
        self.known = CoreOfPods(self.pods, clock=clock, records_all=True, **self.settings)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._free_s = {pod.id: 0.0 for pod in self.pods}
        """When each pod has computed the prompts that it was sent."""
        self._prompt: PromptPrefix | None = None
        self._waiting: list[tuple[MemoryExchange, Talk]] = []
        self._common = [self._random.randrange(100_000) for _ in range(700)]
        known = self.known
        known.policy = "cost_aware_pd" if self.name == "handoffs" else "cost_aware"
        for pod in self.pods:
            known.fleet.trust(pod.id, PrefixTrust.TRUSTED, "tested")
        known.fleet.calibrate({}, Links(elsewhere=Link(t0_ms=2.0, bytes_per_ms=25e6)))
        reader = RequestReader(known.fleet, known.config.edge, 100, frozenset())
        self._front = MemoryFront(known.core, reader, self._tokens)

    def play(self) -> None:
        until_s = self.now_s + PART_S
        self._at(0.0, self._begin)
        self._at(1.0, self._tick)
        while self._due and (self._due[0][0] < until_s or self.known.ledger.inflight()):
            self.now_s, _, call = heappop(self._due)
            self._is_open = self.now_s < until_s
            call()
            self._send_waiting()
        self._tick()

    def _at(self, delay_s: float, call: Callable[[], None]) -> None:
        heappush(self._due, (self.now_s + delay_s, next(self._order), call))

    def _tokens(self, _request: InferenceRequest) -> PromptPrefix | None:
        return self._prompt

    def _tick(self) -> None:
        """What happens at times: loads are scraped, probes pass again, shadow caches follow."""
        known = self.known
        for status in known.fleet.snapshot.pods:
            pod = status.pod.id
            if status.state is not PodState.READY and self._free_s[pod] < self.now_s - 5:
                known.fleet.event(pod, PodEvent.PROBE_OK, self.now_s)
            work = known.ledger.inflight().get(pod)
            running = work.requests if work else 0
            known.fleet.observe_load(pod, PodLoad(running, running // 5, min(running / 20, 1.0), self.now_s, running))
        for _ in known.shadows.follow() if known.shadows else ():
            pass
        self._at(5.0, self._tick)

    # --- clients ---

    def _begin(self) -> None:
        if not self._is_open:
            return
        rng = self._random
        path = rng.choices([CHAT, COMPLETIONS, MESSAGES, EMBEDDINGS, "/v1/rerank"], [60, 12, 12, 12, 4])[0]
        tenant = rng.choices(TENANTS, [5, 3, 2])[0]
        own = [rng.randrange(100_000) for _ in range(rng.randrange(50, 1500))]
        turns = rng.randrange(1, 7) if path in (CHAT, MESSAGES) else 1
        self._turn(Talk([*self._common, *own], tenant, path, rng.random() < 0.75 and path != EMBEDDINGS, turns))
        if rng.random() < 0.08:
            self._receive(CHAT, rng.choice([b'{"model":"unknown","messages":[{"role":"user","content":"x"}]}', b"{"]))
        self._at(rng.expovariate(1 / self.starts_s), self._begin)

    def _turn(self, talk: Talk) -> None:
        body: dict[str, Any] = {"model": "m", "stream": True} if talk.streams else {"model": "m"}
        text = f"{len(talk.tokens)} tokens"
        if talk.path in (CHAT, MESSAGES):
            body |= {"messages": [{"role": "user", "content": text}], "max_tokens": 400}
        else:
            body |= {"input" if talk.path == EMBEDDINGS else "prompt": text}
        is_read = talk.path not in (EMBEDDINGS, "/v1/rerank") and self._random.random() > 0.03
        self._prompt = prompt_of(talk.tokens) if is_read else None
        exchange = self._receive(talk.path, json.dumps(body).encode(), talk.tenant)
        if not exchange.is_over:
            self._waiting.append((exchange, talk))

    def _receive(self, path: str, body: bytes, tenant: Tenant = OPEN_TENANT) -> MemoryExchange:
        return self._front.receive(path, body, tenant)

    def _send_waiting(self) -> None:
        """Begin the answers of requests that have been sent to a pod by now."""
        self._front.send_waiting()
        waiting, self._waiting = self._waiting, []
        for exchange, talk in waiting:
            if exchange.is_over:
                self._at(self._random.expovariate(0.2), partial(self._next_turn, talk))
            elif exchange.asked:
                self._answer(exchange, talk)
            else:
                self._waiting.append((exchange, talk))

    def _next_turn(self, talk: Talk) -> None:
        talk.turns -= 1
        if talk.turns > 0 and self._is_open:
            talk.tokens += [self._random.randrange(100_000) for _ in range(self._random.randrange(30, 400))]
            self._turn(talk)

    # --- pods ---

    def _answer(self, exchange: MemoryExchange, talk: Talk) -> None:
        """The pod that was asked last answers, or fails."""
        rng, pod, context = self._random, exchange.asked[-1], exchange.context
        assert context is not None and context.candidate is not None
        cached = min(context.candidate.cached_tokens, len(talk.tokens) - 1)
        speed = context.candidate.pod.speed
        prefill_s = speed.prefill_ms(len(talk.tokens), cached) / 1000 * rng.uniform(0.9, 1.4)
        start_s = max(self._free_s[pod], self.now_s)
        self._free_s[pod] = start_s + prefill_s
        first_s = start_s + prefill_s - self.now_s
        tokens = rng.randrange(8, 200)
        step_s = speed.step_ms(4, 8000) / 1000
        fate = rng.random()
        if fate < 0.04:
            return self._at(0.002, lambda: self._fail(exchange, talk, ConnectFailed))
        if fate < 0.06:
            return self._at(first_s / 2, lambda: self._fail(exchange, talk, UpstreamBroken))
        if fate < 0.08:
            return self._at(first_s + 10, lambda: self._fail(exchange, talk, UpstreamTimeout))
        if fate < 0.11:
            return self._at(0.01, lambda: self._status(exchange, talk, rng.choice([400, 500, 503, 429])))
        if fate < 0.15:
            return self._at(rng.uniform(0, first_s), lambda: self._leave(exchange, talk))
        reported = max(cached - rng.choice([0, 0, 0, 64]), 0)
        usage = self._usage(talk, len(talk.tokens), reported, tokens)
        if not talk.streams:
            return self._at(first_s + tokens * step_s, lambda: self._whole(exchange, talk, usage))
        pieces = [*self._pieces(talk), usage]
        cut = rng.randrange(1, len(pieces)) if fate < 0.22 else None
        return self._at(first_s, lambda: self._head(exchange, talk, pieces, cut, step_s * tokens / 6, fate))

    def _usage(self, talk: Talk, prompt: int, cached: int, output: int) -> bytes:
        if talk.path == MESSAGES:
            found = {"input_tokens": prompt - cached, "cache_read_input_tokens": cached, "output_tokens": output}
            if talk.streams:
                return b"event: message_delta\ndata: " + json.dumps({"usage": found}).encode() + b"\n\n"
            return json.dumps({"content": [{"type": "text", "text": "hello"}], "usage": found}).encode()
        details = {"prompt_tokens_details": {"cached_tokens": cached}} if self._random.random() < 0.9 else {}
        counted = {"prompt_tokens": prompt, "completion_tokens": output, **details}
        if talk.streams:
            return b"data: " + json.dumps({"choices": [], "usage": counted}).encode() + b"\n\ndata: [DONE]\n\n"
        return json.dumps({"choices": [{"message": {"content": "hello"}}], "usage": counted}).encode()

    def _pieces(self, talk: Talk) -> list[bytes]:
        if talk.path == MESSAGES:
            start = b'event: message_start\ndata: {"message":{"usage":{"input_tokens":50,"output_tokens":0}}}\n\n'
            text = b'event: content_block_delta\ndata: {"delta":{"type":"text_delta","text":"a"}}\n\n'
            return [start, *[text] * 6]
        if talk.path == COMPLETIONS:
            return [b'data: {"choices":[{"text":"a"}]}\n\n'] * 6
        return [b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'] * 6

    def _head(self, exchange: MemoryExchange, talk: Talk, *answer: Any) -> None:
        if exchange.head():
            self._stream(exchange, talk, *answer)
        else:
            self._again(exchange, talk)

    def _stream(
        self, exchange: MemoryExchange, talk: Talk, pieces: list[bytes], cut: int | None, gap_s: float, fate: float
    ) -> None:
        """Send the pieces, `gap_s` apart; after `cut` of them the pod breaks off, or the client leaves."""
        if cut == 0:
            return self._fail(exchange, talk, UpstreamBroken) if fate < 0.18 else self._leave(exchange, talk)
        if not exchange.piece(pieces[0]):
            return self._again(exchange, talk)
        if len(pieces) == 1:
            exchange.end()
            return self._again(exchange, talk)
        left = None if cut is None else cut - 1
        return self._at(gap_s, lambda: self._stream(exchange, talk, pieces[1:], left, gap_s, fate))

    def _whole(self, exchange: MemoryExchange, talk: Talk, body: bytes) -> None:
        if exchange.head(is_stream=False) and exchange.piece(body):
            exchange.end()
        self._again(exchange, talk)

    def _status(self, exchange: MemoryExchange, talk: Talk, status: int) -> None:
        if exchange.head(status, is_stream=False) and exchange.piece(b'{"error":{"message":"no"}}'):
            exchange.end()
        self._again(exchange, talk)

    def _fail(self, exchange: MemoryExchange, talk: Talk, error: type[UpstreamError]) -> None:
        exchange.fail(error("gone", pod=exchange.asked[-1]))
        self._again(exchange, talk)

    def _leave(self, exchange: MemoryExchange, talk: Talk) -> None:
        exchange.leave()
        self._again(exchange, talk)

    def _again(self, exchange: MemoryExchange, talk: Talk) -> None:
        """Another pod was asked, or the request is over."""
        self._waiting.append((exchange, talk))

    # --- what was recorded ---

    def recorded(self) -> dict[str, list[str]]:
        """Lines by section."""
        known = self.known
        known.metrics.observe_calibration(known.calibrator.calibration.rows())
        kept = known.recent.latest(10_000)[::EXPLAINED]
        return {
            "explanations": [_line(msgspec.to_builtins(explained(*one))) for one in kept],
            "predictions": [" ".join(map(str, one)) for one in known.store.fates],
            "receipts": [_line(_shorter(json.loads(line))) for line in known.receipt_lines],
            "log": [_line(json.loads(line)) for line in known.log_lines],
            "usage": [_line(json.loads(line)) for line in known.usage_lines],
            "metrics": [_FLOAT.sub(_short, line) for line in known.metrics.render().decode().splitlines()],
        }


_FLOAT = re.compile(r"-?\d+\.\d+(e[+-]?\d+)?|-?\d+e[+-]?\d+")


def _short(found: re.Match[str]) -> str:
    return f"{float(found[0]):.{DIGITS}g}"


def _line(value: Any) -> str:
    return json.dumps(_rounded(value), sort_keys=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if abs(value) < 1e8 else round(value, 4)
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def _shorter(line: dict[str, Any]) -> dict[str, Any]:
    """With one hash of its block hashes; without the digest of unrounded numbers, and the time of the machine."""
    line.pop("scene_digest", None)
    if line["kind"] == "fleet":
        del line["at_s"]
    if blocks := line.get("blocks"):
        line["blocks"] = [len(blocks), xxh3_64_intdigest(json.dumps(blocks).encode())]
    return line


def parts() -> list[Part]:
    pulling = _pods(pulls="p2p", version="0.32.0")
    queue = AdmissionConfig(max_wait_ms=4000.0)
    return [
        Part("pulls", pulling, 14.0),
        Part("handoffs", _roles(_pods(handoff="nixl")), 14.0),
        Part("queue", _pods(speed=BUSY)[:2], 9.0, {"admission": queue, "slo": Slo(ttft_ms=3000.0, tpot_ms=100.0)}),
    ]


def recorded() -> dict[str, list[str]]:
    """Lines by part and section."""
    found: dict[str, list[str]] = {}
    for part in parts():
        part.play()
        assert part.known.is_idle()
        found |= {f"{part.name} {section}": lines for section, lines in part.recorded().items()}
    return found


def golden() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(lzma.decompress(GOLDEN.read_bytes()))
    return found


if __name__ == "__main__":
    GOLDEN.write_bytes(lzma.compress(json.dumps(recorded()).encode(), preset=9 | lzma.PRESET_EXTREME))
