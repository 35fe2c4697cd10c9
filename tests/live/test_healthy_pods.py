"""Healthy pods raise no false alarm: no stream is continued, and no failure of a pod is counted.

Two real vLLM pods with little KV, so that requests are preempted, get prompts that take seconds before the first token,
and answers that they hold back: for stop strings, and for reasoning that is hidden. One router asks for token ids;
another one has not proven that it may. WARMROUTE_LIVE_MINUTES (default: 3) says how long. Prints how long pods were
silent.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import httpx
import pytest

from loadtest.commands.child_processes import RouterUrls, free_port
from tests.live.answer_bodies import CHAT, COMPLETIONS, FORMAT
from tests.live.answer_scripts import TOOLS
from tests.live.engines import HOME, EngineProcess, start_vllm, started_together
from tests.live.live_fleet import AGENT_FLAGS, DEADLINE_S
from tests.live.router_process import await_continuation, router

MINUTES = float(os.environ.get("WARMROUTE_LIVE_MINUTES", "3"))
MODEL = HOME / "model" / "tiny-llama"
SHAPE = {"num_hidden_layers": 12, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
KV_BLOCKS, MODEL_TOKENS = 130, 4096
SILENCE_S = 1.0
"""Much less than the default, so that every pause of a busy pod is a temptation."""
STREAMS, MAX_WRONG = 16, 5
COUNTERS = ("warmroute_continuations", "warmroute_ejections", "warmroute_retries", "warmroute_pod_restarts")

pytestmark = [pytest.mark.live, pytest.mark.net]


def start_pod(number: int) -> EngineProcess:
    args = (
        *("--load-format", "dummy", "--hf-overrides", json.dumps(SHAPE), "--max-model-len", str(MODEL_TOKENS)),
        *("--num-gpu-blocks-override", str(KV_BLOCKS), *AGENT_FLAGS),
    )
    return start_vllm(f"healthy-{number}", free_port(), MODEL, kv_port=free_port(), extra_args=args)


@pytest.fixture
def pods() -> Iterator[list[EngineProcess]]:
    with started_together([partial(start_pod, number) for number in range(2)]) as started:
        yield started


@pytest.fixture
def routers(pods: list[EngineProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RouterUrls]]:
    config: dict[str, Any] = {
        "models": [{"name": "tiny", "tokenizer": str(MODEL)}],
        "pods": [{"url": pod.url, "engine": "vllm"} for pod in pods],
        "continuation": {"enabled": True, "silence_s": SILENCE_S},
        "limits": {"idle_timeout_s": 3600},  # hidden reasoning sends nothing, for minutes on a slow machine
        "probes": {"health_timeout_s": 10},  # a pod without a core of its own has answered after 6 s
    }
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("router")
        proven = stack.enter_context(router(folder, config))
        await_continuation(proven.admin)
        unproven = {**config, "probes": {**config["probes"], "self_test": False}}
        yield [proven, stack.enter_context(router(folder, unproven))]


class Load:
    """Streams one after the other. `silences_s`: the longest pause of each, by kind."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.silences_s: dict[str, list[float]] = defaultdict(list)
        self.wrong: list[str] = []

    def drawn(self) -> tuple[str, str, dict[str, Any]]:
        kind = self.random.choice(["cold", "cold", "long", "held", "hidden", "json", "tools", "completion", "sampled"])
        words = self.random.randint(1500, 3000) if kind == "cold" else self.random.randint(5, 200)
        text = " ".join(str(self.random.randrange(10, 99)) for _ in range(words // 2))
        body: dict[str, Any] = {
            "model": "tiny",
            "stream": True,
            "temperature": 0,
            "ignore_eos": kind != "json",
            "max_tokens": 8 if kind == "cold" else self.random.randint(40, 400),
            "stream_options": {"include_usage": True},
        }
        asked: dict[str, dict[str, Any]] = {
            "held": {"stop": ["~" * 600]},
            "hidden": {"include_reasoning": False, "logprobs": True},
            "json": {"response_format": FORMAT},
            "tools": {"tools": TOOLS},
            "sampled": {"temperature": 1.0},
        }
        prompt = {"prompt": text} if kind == "completion" else {"messages": [{"role": "user", "content": text}]}
        return kind, COMPLETIONS if kind == "completion" else CHAT, {**body, **asked.get(kind, {}), **prompt}

    async def run(self, url: str, until_s: float) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=10 * DEADLINE_S, trust_env=False) as client:
            while time.monotonic() < until_s and len(self.wrong) < MAX_WRONG:
                await self._stream(client, *self.drawn())

    async def _stream(self, client: httpx.AsyncClient, kind: str, path: str, body: dict[str, Any]) -> None:
        received, times_s = b"", [time.monotonic()]
        async with client.stream("POST", path, json=body) as response:
            async for piece in response.aiter_raw():
                received += piece
                times_s.append(time.monotonic())
        self.silences_s[kind].append(max(after - before for before, after in pairwise(times_s)))
        if response.status_code != 200 or not received.endswith(b"data: [DONE]\n\n") or b'"error"' in received:
            self.wrong.append(f"{kind}: {response.status_code} {received[-300:]!r}")


async def at_once(load: Load, urls: list[RouterUrls]) -> None:
    until_s = time.monotonic() + 60 * MINUTES
    await asyncio.gather(*(load.run(urls[number % 2].public, until_s) for number in range(STREAMS)))


def test_healthy_pods_raise_no_alarm(pods: list[EngineProcess], routers: list[RouterUrls]) -> None:
    load = Load(1)
    asyncio.run(at_once(load, routers))
    preempted = sum(_total(pod.url, "vllm:num_preemptions") for pod in pods)
    print(f"\n{sum(map(len, load.silences_s.values()))} streams, {preempted:.0f} preemptions")
    for kind, found in sorted(load.silences_s.items()):
        silent = sum(one > SILENCE_S for one in found)
        print(
            f"{kind:12} {len(found):5} streams, {silent:5} with a pause over {SILENCE_S} s, longest {max(found):.1f} s"
        )
    alarms = {(at, name): _total(one.admin, name) for at, one in enumerate(routers) for name in COUNTERS}
    print(alarms)
    assert load.wrong == []
    assert alarms == dict.fromkeys(alarms, 0)
    assert preempted > 0
    assert max(load.silences_s["cold"]) > 2 * SILENCE_S


def _total(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}_total{{", f"{name}_total "))
    )
