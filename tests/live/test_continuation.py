"""Streams of real vLLM pods are cut, and go on: what the client reads is what an uncut stream has.

Needs a model that knows the answers to "script NAME", with margins between its tokens, in `model/answers-qwen3` of the
live home: with random weights, an answer has no reasoning, no calls, and two runs of it may differ.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from router.cli.child_processes import RouterUrls, free_port
from tests.live.cutting_proxy import Cuts, CuttingProxy, proxied
from tests.live.engines import HOME, EngineProcess, start_vllm, started_together
from tests.live.live_fleet import AGENT_FLAGS, DEADLINE_S
from tests.live.router_process import router
from tests.request.continuation.recorded import Received

MODEL = HOME / "model/answers-qwen3"
PODS = 3
"""One is killed, and one terminated."""
CUTS = 8
"""Cuts of each case."""

pytestmark = [
    pytest.mark.live,
    pytest.mark.net,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason=f"no model that knows its answers in {MODEL}"),
]


def _tool(name: str, **fields: str) -> dict[str, Any]:
    properties = {field: {"type": kind} for field, kind in fields.items()}
    about = {"get_weather": "Weather of a city", "send_mail": "Send a mail"}[name]
    required = ["city"] if name == "get_weather" else list(fields)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


TOOLS = [_tool("get_weather", city="string", days="integer"), _tool("send_mail", to="string", text="string")]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "sunny": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days", "sunny", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}


def chat(script: str, *, thinks: bool = False, **fields: Any) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "stream": True,
        "temperature": 0,
        "max_tokens": 160,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": f"script {script}"}],
        "chat_template_kwargs": {"enable_thinking": thinks},
    }
    return {**body, **fields}


CASES: dict[str, dict[str, Any]] = {
    "plain": chat("plain"),
    "bytes": chat("bytes"),
    "thinking": chat("think", thinks=True),
    "hidden thinking": chat("think", thinks=True, include_reasoning=False),
    "stop": chat("stops", stop=["STOP", "ENDED"]),
    "stop of many tokens": chat("stops", stop=["STO three EN", "zzzz"]),
    "included stop": chat("stops", stop=["STO three EN"], include_stop_str_in_output=True),
    "length": chat("plain", max_tokens=30),
    "tool": chat("tool", tools=TOOLS),
    "tools": chat("tools", thinks=True, tools=TOOLS),
    "json": chat("json", response_format=FORMAT),
    "json after thinking": chat("thinkjson", thinks=True, response_format=FORMAT),
    "log probabilities": chat("bytes", logprobs=True, top_logprobs=1),
    "sampled": chat("bytes", temperature=0.02),
    "sampled thinking": chat("think", thinks=True, temperature=0.02),
    "no usage": chat("plain", stream_options=None),
    "continuous usage": chat("plain", stream_options={"include_usage": True, "continuous_usage_stats": True}),
}

STRIKES = [signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM]


@dataclass(frozen=True)
class CutFleet:
    pods: list[EngineProcess]
    proxies: list[CuttingProxy]
    cuts: Cuts
    urls: RouterUrls
    struck: list[EngineProcess] = field(default_factory=list)

    def uncut(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
        """What a client reads of a stream that no router touches."""
        alive = next(pod for pod in self.pods if pod not in self.struck)
        return Received(streamed(alive.url, body, path)).whole[:7]

    def victim(self, headers: httpx.Headers) -> EngineProcess:
        """The pod that answers."""
        names = [f"127.0.0.1:{proxy.port}" for proxy in self.proxies]
        return self.pods[names.index(headers["x-warmroute-pod"])]

    def continued(self, **labels: str) -> float:
        lines = httpx.get(f"{self.urls.admin}/metrics").text.splitlines()
        named = [line for line in lines if line.startswith("warmroute_continuations_total{")]
        return sum(float(one.split()[-1]) for one in named if all(f'{n}="{v}"' in one for n, v in labels.items()))


def streamed(
    url: str,
    body: dict[str, Any],
    path: str = "/v1/chat/completions",
    on_event: Callable[[int, httpx.Headers], None] | None = None,
) -> bytes:
    """The bytes of a stream. `on_event` is called with the number of events so far."""
    received = b""
    with httpx.stream("POST", url + path, json=body, timeout=DEADLINE_S) as response:
        for piece in response.iter_raw():
            received += piece
            if on_event is not None:
                on_event(received.count(b"data: {"), response.headers)
    return received


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CutFleet]:
    starts = [
        lambda n=n: start_vllm(f"cut-{n}", free_port(), MODEL, kv_port=free_port(), extra_args=AGENT_FLAGS)
        for n in range(PODS)
    ]
    with started_together(starts) as pods, proxied(*(int(pod.url.rsplit(":", 1)[1]) for pod in pods)) as behind:
        proxies, cuts = behind
        config = {
            "models": [{"name": "tiny", "tokenizer": str(MODEL)}],
            "pods": [{"url": f"http://127.0.0.1:{proxy.port}", "engine": "vllm"} for proxy in proxies],
            "continuation": {"enabled": True, "silence_s": 2},
            "limits": {"retry_budget": 1.0},
            "probes": {"clients_to_eject": 16},  # cuts of this test are not the pods' fault
        }
        with router(tmp_path_factory.mktemp("router"), config) as urls:
            yield CutFleet(pods, proxies, cuts, urls)


@pytest.mark.parametrize("name", CASES)
def test_joined_stream_is_the_uncut_one(fleet: CutFleet, name: str) -> None:
    body, url = CASES[name], fleet.urls.public
    expected, whole = fleet.uncut(body), streamed(url, body)
    assert Received(whole).whole[:7] == expected
    events = whole.count(b"data: ")
    for cut in range(0, events, max(events // CUTS, 1)):
        fleet.cuts.after[:] = [cut]
        received = streamed(url, body)
        assert not fleet.cuts.after or cut > events - 3, "nothing was cut"
        fleet.cuts.after.clear()
        assert Received(received).whole[:7] == expected, f"cut after {cut} events"


def test_completion_goes_on(fleet: CutFleet) -> None:
    prompt = "<|im_start|>user\nscript bytes<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    body = {"model": "tiny", "stream": True, "temperature": 0, "max_tokens": 70, "prompt": prompt, "logprobs": 1}
    expected = fleet.uncut(body, "/v1/completions")
    for cut in range(0, 60, 7):
        fleet.cuts.after[:] = [cut]
        received = streamed(fleet.urls.public, body, "/v1/completions")
        fleet.cuts.after.clear()
        assert Received(received).whole[:7] == expected, f"cut after {cut} events"


@pytest.mark.parametrize("number", STRIKES)
def test_streams_of_a_pod_that_is_struck_go_on(fleet: CutFleet, number: signal.Signals) -> None:
    names = ["plain", "thinking", "tools", "bytes", "sampled", "json"]
    expected = {name: fleet.uncut(CASES[name]) for name in names}
    before, hit = fleet.continued(result="joined"), threading.Event()
    received: dict[str, bytes] = {}

    def strike(events: int, headers: httpx.Headers) -> None:
        if events >= 6 and not hit.is_set():
            hit.set()
            fleet.struck.append(victim := fleet.victim(headers))
            strike_at = os.kill if number is signal.SIGTERM else os.killpg
            strike_at(victim.process.pid, number)

    def ask(name: str) -> None:
        received[name] = streamed(fleet.urls.public, CASES[name], on_event=strike)

    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    if number is signal.SIGSTOP:
        os.killpg(fleet.struck.pop().process.pid, signal.SIGCONT)
    assert {name: Received(stream).whole[:7] for name, stream in received.items()} == expected
    assert fleet.continued(result="joined") > before
