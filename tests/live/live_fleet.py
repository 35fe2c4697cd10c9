"""Real vLLM pods behind a router, how clients call them, and what their answers have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import anthropic
import httpx
import openai

from loadtest.commands.child_processes import free_port
from tests.live.engines import EngineProcess, started_together
from tests.live.router_process import await_conversions, router

DEADLINE_S = 120.0
SESSIONS_DEADLINE_S = 900.0
TEXT = "The harbour master writes down every boat that comes in, its name and its cargo. "
BOOK = TEXT * 150
"""Part of a prompt whose cache is worth more than a pod that is less busy for a while."""
AGENT_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")

StartPod = Callable[..., EngineProcess]
"""Called with the pod's name, its port and `kv_port`."""


@dataclass(frozen=True, slots=True)
class LiveFleet:
    """Running pods and the router in front of them."""

    pods: list[EngineProcess]
    url: str
    admin_url: str

    def openai_sdk(self, api_key: str = "none") -> openai.AsyncOpenAI:
        """A client that does not retry."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=DEADLINE_S)

    def anthropic_sdk(self) -> anthropic.AsyncAnthropic:
        """A client that does not retry."""
        return anthropic.AsyncAnthropic(base_url=self.url, api_key="none", max_retries=0, timeout=DEADLINE_S)

    async def kill_a_busy_pod(self) -> tuple[str, str]:
        """Kill a pod as soon as one has requests. Returns its address and that of the other pod."""
        async with httpx.AsyncClient() as client, asyncio.timeout(60):
            busy: list[str] = []
            while not busy:
                pods = (await client.get(f"{self.admin_url}/admin/pods")).json()
                busy = [pod["url"] for pod in pods if pod["in_flight"]]
        killed, other = sorted(self.pods, key=lambda pod: pod.url != busy[0])
        killed.kill()
        return killed.address, other.address


@contextmanager
def live_fleet(
    name: str,
    folder: Path,
    tokenizer: Path,
    start: StartPod,
    *,
    pods: int = 2,
    endpoints: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
) -> Iterator[LiveFleet]:
    """Pods, which `start` starts, behind a router that trusts them and has proven how they convert the `endpoints`;
    `config`: the router's other options. Takes about a minute on two cores."""
    starts = [lambda n=n: start(f"{name}-{n}", free_port(), kv_port=free_port()) for n in range(pods)]
    with started_together(starts) as running:
        options = {
            "models": [{"name": "tiny", "tokenizer": str(tokenizer)}],
            "pods": [{"url": pod.url, "engine": "vllm"} for pod in running],
            **(config or {}),
        }
        with router(folder, options) as urls:
            for endpoint in endpoints:
                await_conversions(urls.admin, endpoint)
            yield LiveFleet(running, urls.public, urls.admin)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, its pod, and tokens: those that the router predicted as cached, those that the engine reports as
    cached, and all of the prompt."""

    pod: str
    predicted: int
    reported: int
    prompt: int
    body: dict[str, Any]


def answer_of(headers: Mapping[str, str], body: dict[str, Any]) -> Answer:
    """Reads a body of any of the three APIs."""
    prompt, cached = prompt_and_cached(body["usage"])
    return Answer(headers["x-warmroute-pod"], int(headers["x-warmroute-cached-tokens"]), cached, prompt, body)


def prompt_and_cached(usage: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt and those that were cached, as any of the three APIs reports them."""
    read, written = (usage.get(f"cache_{what}_input_tokens") or 0 for what in ("read", "creation"))
    kind = "prompt" if "prompt_tokens" in usage else "input"
    details = usage.get(f"{kind}_tokens_details") or {}
    return usage[f"{kind}_tokens"] + read + written, read or details.get("cached_tokens") or 0


class LiveSession(Protocol):
    """A conversation that grows with each turn."""

    name: str

    def asked(self, turn: int) -> dict[str, Any]:
        """The next request."""

    def answered(self, turn: int, body: dict[str, Any]) -> None:
        """Add the response to the conversation."""


async def take_turns(
    sessions: Sequence[LiveSession], turns: int, ask: Callable[[dict[str, Any]], Awaitable[Answer]]
) -> dict[str, list[Answer]]:
    """The answers of interleaved sessions, by name."""
    answers: dict[str, list[Answer]] = {session.name: [] for session in sessions}
    async with asyncio.timeout(SESSIONS_DEADLINE_S):
        for turn in range(turns):
            for session in sessions:
                answer = await ask(session.asked(turn))
                answers[session.name].append(answer)
                session.answered(turn, answer.body)
    return answers


def check_sessions(answers: Mapping[str, Sequence[Answer]]) -> None:
    """Every prediction was exact, and sessions stayed with the pod that has their prefix."""
    wrong = [(n, t, a) for n, turns in answers.items() for t, a in enumerate(turns) if a.predicted != a.reported]
    everything = [answer for turns in answers.values() for answer in turns]
    moved = sum(one.pod != next_.pod for turns in answers.values() for one, next_ in pairwise(turns))
    cached, prompt = sum(answer.reported for answer in everything), sum(answer.prompt for answer in everything)
    print(f"{len(answers)} sessions, {len(everything)} turns: {cached} of {prompt} tokens cached, {moved} turns moved")
    assert wrong == []
    assert moved <= 0.05 * len(everything)  # a pod that a busy machine slows down may lose some
    assert cached > 0.7 * prompt
