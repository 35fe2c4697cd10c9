"""Routers that share an index predict real vLLM caches block for block."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.commands.child_processes import free_port
from tests.index_verify import VerifyResult, verify_index
from tests.live.engines import HOME, start_vllm, started_together
from tests.live.live_fleet import TEXT, answer_of
from tests.live.router_process import publisher, router
from tests.redis_process import redis_process

pytestmark = [pytest.mark.live, pytest.mark.net]

MODEL = HOME / "model" / "tiny-llama"
GATHERED_WITHIN_S = 5.0

Chat = list[dict[str, Any]]


@dataclass(slots=True)
class Harbour:
    """Two vLLM pods, a Valkey, and a publisher that can be stopped and started."""

    folder: Path
    config: dict[str, Any]
    routers: list[str]
    publishing: ExitStack

    def publish(self) -> subprocess.Popen[bytes]:
        """Start the publisher."""
        return self.publishing.enter_context(publisher(self.folder, self.config))

    def verify(self) -> list[VerifyResult]:
        """The comparison of the index with the replays once they are equal, or the last one after a timeout."""
        file = self.folder / "index.yaml"
        file.write_text(json.dumps(self.config))
        deadline_s = time.monotonic() + GATHERED_WITHIN_S
        while True:
            found = asyncio.run(verify_index(file))
            if (found and all(one.agrees for one in found)) or time.monotonic() > deadline_s:
                return found


@pytest.fixture(scope="module")
def harbour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harbour]:
    """Started once; takes about a minute on two cores."""
    folder = tmp_path_factory.mktemp("index")
    starts = [partial(start_vllm, f"index-{n}", free_port(), MODEL, kv_port=free_port()) for n in range(2)]
    with ExitStack() as stack:
        pods = stack.enter_context(started_together(starts))
        redis = stack.enter_context(redis_process())
        config = {
            "models": [{"name": "tiny", "tokenizer": str(MODEL)}],
            "pods": [{"url": pod.url, "engine": "vllm"} for pod in pods],
            "index": {"redis": {"url": redis.url}},
            "publish": {"heartbeat_s": 0.5},
        }
        publishing = stack.enter_context(ExitStack())
        harbour = Harbour(folder, config, [], publishing)
        harbour.publish()
        harbour.routers = [stack.enter_context(router(folder, config)).public for _ in range(2)]
        yield harbour


def ask(url: str, chat: Chat) -> tuple[str, int, int, str]:
    """(pod, predicted cached tokens, reported cached tokens, response)."""
    body = {"model": "tiny", "messages": chat, "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    answer.raise_for_status()
    found = answer_of(answer.headers, answer.json())
    return found.pod, found.predicted, found.reported, found.body["choices"][0]["message"]["content"] or ""


def converse(harbour: Harbour, topic: str, turns: int) -> list[tuple[str, int, int]]:
    """A conversation whose turns alternate between the routers."""
    chat: Chat = [{"role": "system", "content": f"About {topic}. {TEXT * 8}"}]
    shown = []
    for turn in range(turns):
        chat.append({"role": "user", "content": f"Turn {turn}: {TEXT * 2}"})
        pod, predicted, reported, text = ask(harbour.routers[turn % 2], chat)
        shown.append((pod, predicted, reported))
        chat.append({"role": "assistant", "content": text})
        time.sleep(0.3)  # events and their publication take less time than a user's turn
    return shown


def test_two_routers_alternate_in_a_conversation_with_exact_predictions(harbour: Harbour) -> None:
    """Every turn is predicted exactly and goes to the pod of the earlier turns, from either router."""
    for topic in ("ships", "tides", "nets"):
        shown = converse(harbour, topic, 4)
        print(topic, shown)
        assert len({pod for pod, _, _ in shown}) == 1
        assert all(predicted == reported for _, predicted, reported in shown)
        assert all(reported > 0 for _, _, reported in shown[1:])


def test_the_index_equals_the_engines_replay(harbour: Harbour) -> None:
    """Every block is compared with vLLM's own replay."""
    found = harbour.verify()
    assert len(found) == 2 and all(one.agrees for one in found), found


def test_a_new_publisher_restores_the_index_after_a_kill(harbour: Harbour) -> None:
    """The new publisher reads everything from vLLM's replay; conversations are unaffected."""
    process = harbour.publish()  # takes over from the first
    process.kill()
    process.wait()
    harbour.publish()
    assert [one.agrees for one in harbour.verify()] == [True, True]
    shown = converse(harbour, "ships", 3)
    print(shown)
    assert all(predicted == reported > 0 for _, predicted, reported in shown)
