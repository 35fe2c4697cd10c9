"""A real vLLM that sleeps is seen, and woken by a request. On CPU the memory stays where it is ("sleep mode is not
supported on CPU, ignore it"), so times say nothing; paths, states and metrics are those of a GPU. A minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from loadtest.commands.child_processes import RouterUrls, free_port
from tests.live.engines import HOME, EngineProcess, start_vllm
from tests.live.router_process import router

MODEL = HOME / "model" / "tiny-qwen3"
DEADLINE_S = 120.0
CHAT = {
    "model": "tiny",
    "max_tokens": 4,
    "temperature": 0,
    "messages": [{"role": "user", "content": "The tides follow the moon. " * 30}],
}

pytestmark = [
    pytest.mark.live,
    pytest.mark.net,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason=f"no model in {MODEL}"),
]


@dataclass(frozen=True)
class Fleet:
    engine: EngineProcess
    urls: RouterUrls

    def pod(self) -> dict[str, Any]:
        [found] = httpx.get(f"{self.urls.admin}/admin/pods").json()
        return dict(found)

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not holds(found := self.pod()):
            assert time.monotonic() < deadline_s, found
            time.sleep(0.1)

    def chat(self) -> dict[str, Any]:
        answer = httpx.post(f"{self.urls.public}/v1/chat/completions", json=CHAT, timeout=DEADLINE_S)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def call(self, path: str) -> None:
        assert httpx.post(self.engine.url + path, timeout=DEADLINE_S).status_code == 200


@pytest.fixture(scope="module", params=["vllm", "vllm33"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with start_vllm("sleeper", free_port(), MODEL, kv_port=free_port(), installed=request.param) as engine:
        config = {
            "models": [{"name": "tiny", "tokenizer": str(MODEL)}],
            "pods": [{"url": engine.url, "engine": "vllm"}],
            "limits": {"hold_s": DEADLINE_S},
            "scaling": {"wake_pods": True},
        }
        with router(tmp_path_factory.mktemp("router"), config) as urls:
            yield Fleet(engine, urls)


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("level", [1, 2])
def test_a_request_wakes_it_and_its_cache_is_forgotten(fleet: Fleet, level: int) -> None:
    text = fleet.chat()["choices"][0]["message"]["content"]
    assert cached(fleet.chat()) > 0
    before = fleet.pod()
    fleet.call(f"/sleep?level={level}")
    fleet.until(lambda pod: pod["state_reason"] == "the engine sleeps")
    assert (fleet.pod()["state"], fleet.pod()["trust"]) == ("draining", "untested")
    answer = fleet.chat()
    assert (cached(answer), answer["choices"][0]["message"]["content"]) == (0, text)
    fleet.until(lambda pod: pod["state"] == "ready" and pod["trust"] == "trusted")
    assert before["epoch"] < fleet.pod()["epoch"]
    assert cached(fleet.chat()) > 0


def test_one_that_is_paused_is_not_woken(fleet: Fleet) -> None:
    fleet.call("/sleep?level=0")
    fleet.until(lambda pod: pod["state_reason"] == "the engine sleeps")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{fleet.urls.public}/v1/chat/completions", json=CHAT, timeout=5.0)
    assert httpx.get(f"{fleet.engine.url}/is_sleeping").json() == {"is_sleeping": True}
    fleet.call("/wake_up")
    fleet.until(lambda pod: pod["state"] == "ready")
