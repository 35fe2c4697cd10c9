"""Real pods, and routers in front of them: what clients are run against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.commands.child_processes import free_port
from tests.live.engines import HOME as ENGINES
from tests.live.engines import EngineProcess, start_vllm, started_together
from tests.live.router_process import router
from tests.live_clients.audio_pod import audio_pod
from tests.live_clients.scenario import MODEL

WEIGHTS = ENGINES / "model" / "tiny-qwen3"
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
FORCED = "--enable-force-include-usage"


@dataclass(frozen=True, slots=True)
class Sides:
    """Base URLs of the same pod, or of pods that should look the same: direct, and behind a router."""

    direct: str
    routed: str


@contextmanager
def routed(pod: str, folder: Path, **config: Any) -> Iterator[str]:
    with router(folder, {"pods": [{"url": pod, "engine": "vllm"}], **config}) as urls:
        yield urls.public


@contextmanager
def running_sides(folder: Path) -> Iterator[dict[str, Sides]]:
    """By kind of pod. Takes a minute or two on two cores."""
    extra = {"plain": TOOLS, "forced": (*TOOLS, FORCED), "embeddings": ("--runner", "pooling")}
    starts = [partial(start, name, more) for name, more in extra.items()]
    with ExitStack() as stack:
        pods = dict(zip(extra, stack.enter_context(started_together(starts)), strict=True))
        audio = stack.enter_context(audio_pod())
        tokens = {"models": [{"name": MODEL, "tokenizer": str(WEIGHTS)}]}
        behind = {name: stack.enter_context(routed(pod.url, folder, **tokens)) for name, pod in pods.items()}
        untested = tokens | {"probes": {"self_test": False}, "edge": {"extra_paths": ["/v1/files"]}}
        yield {
            "generation": Sides(pods["plain"].url, behind["plain"]),
            "generation, forced usage": Sides(pods["plain"].url, behind["forced"]),
            "embeddings": Sides(pods["embeddings"].url, behind["embeddings"]),
            "audio": Sides(audio, stack.enter_context(routed(audio, folder, **untested))),
        }


def start(name: str, more: Sequence[str]) -> EngineProcess:
    return start_vllm(f"clients-{name}", free_port(), WEIGHTS, kv_port=free_port(), extra_args=more)
