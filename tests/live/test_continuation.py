"""Streams of real vLLM pods are cut, and go on: what the client reads is what an uncut stream has.

Needs a model that knows its answers (`answer_bodies.py`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from shutil import copytree
from typing import Any

import httpx
import pytest

from loadtest.commands.child_processes import RouterUrls, free_port
from router.config.load import shipped
from tests.live.answer_bodies import CASES, CHAT, COMPLETIONS, MODEL, chat, completion, streamed
from tests.live.answer_scripts import TOOLS
from tests.live.cutting_proxy import Cuts, proxied
from tests.live.engines import EngineProcess, start_vllm, started_together
from tests.live.live_fleet import AGENT_FLAGS
from tests.live.router_process import await_continuation, await_conversions, router
from tests.request.continuation.recorded import Received, named_steps

PODS = 3
"""The cuts count as failures of a pod, and may eject one."""
CUTS = 8
"""Cuts of each case. A busy engine puts several tokens into one event, so a stream may end before its cut."""
POLICY = "name: agents\nabout: Agents\nextends: cost_aware\nmatch: {}\ncontinuation: {hold_tool_calls: true}\n"
FUNCTIONS: list[dict[str, Any]] = [tool["function"] for tool in TOOLS]
ANTHROPIC_TOOLS = [
    {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]} for one in FUNCTIONS
]


def message(script: str, *, thinks: bool = False, **fields: Any) -> dict[str, Any]:
    body = chat(script, thinks=thinks)
    del body["stream_options"]
    return {**body, **fields}


def response(script: str, *, thinks: bool = False, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "stream": True, "temperature": 0, "max_output_tokens": 160, "input": f"script {script}"}
    return {**body, "chat_template_kwargs": {"enable_thinking": thinks}, **fields}


AGENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("/v1/messages", message("plain")),
    "message of emoji": ("/v1/messages", message("bytes")),
    "message with stop": ("/v1/messages", message("stops", stop_sequences=["STO three EN"])),
    "message with thinking": ("/v1/messages", message("think", thinks=True)),
    "message with tools": ("/v1/messages", message("tools", thinks=True, tools=ANTHROPIC_TOOLS)),
    "response": ("/v1/responses", response("plain")),
    "response of emoji": ("/v1/responses", response("bytes")),
    "response with thinking": ("/v1/responses", response("think", thinks=True)),
    "response with tools": (
        "/v1/responses",
        response("tools", thinks=True, tools=[{"type": "function", **one} for one in FUNCTIONS]),
    ),
}
"""Greedy streams of agents' APIs."""
SAMPLED = {
    "plain": message("plain", temperature=0.02),
    "emoji": message("bytes", temperature=0.02),
    "thinking": message("think", thinks=True, temperature=0.02),
    "stop": message("stops", temperature=0.02, stop_sequences=["STO three EN"]),
    "length": message("plain", temperature=0.02, max_tokens=30),
    "tools": message("tools", thinks=True, temperature=0.02, tools=ANTHROPIC_TOOLS),
}
"""Sampled messages, which are asked for as chats; their calls are held."""
HELD = {
    "tool": chat("tool", temperature=0.02, tools=TOOLS),
    "tools after thinking": chat("tools", thinks=True, temperature=0.02, tools=TOOLS),
}
"""Sampled calls, which the policy holds until they are whole."""

pytestmark = [
    pytest.mark.live,
    pytest.mark.net,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason=f"no model that knows its answers in {MODEL}"),
]


@dataclass(frozen=True)
class CutFleet:
    pods: list[EngineProcess]
    cuts: Cuts
    urls: RouterUrls
    ids: list[str]
    """The pods, as the router calls them."""

    def continued(self) -> str:
        """The counters of continuations that are not 0."""
        lines = httpx.get(f"{self.urls.admin}/metrics").text.splitlines()
        return "\n".join(one for one in lines if one.startswith("warmroute_continuations") and not one.endswith(" 0.0"))

    def uncut(self, body: dict[str, Any], path: str = CHAT) -> Any:
        """What a client reads of a stream that no router touches."""
        return Received(streamed(self.pods[0].url, body, path)).whole[:7]


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
        policies = tmp_path_factory.mktemp("policies")
        copytree(shipped("policies"), policies, dirs_exist_ok=True)
        (policies / "agents.yaml").write_text(POLICY)
        with router(tmp_path_factory.mktemp("router"), config, policies=policies) as urls:
            await_continuation(urls.admin)
            await_conversions(urls.admin, "/v1/messages")
            yield CutFleet(pods, cuts, urls, [f"127.0.0.1:{proxy.port}" for proxy in proxies])


@pytest.mark.parametrize("name", CASES)
def test_joined_stream_is_the_uncut_one(fleet: CutFleet, name: str) -> None:
    body, url = CASES[name], fleet.urls.public
    expected, whole = fleet.uncut(body), streamed(url, body)
    assert Received(whole).whole[:7] == expected
    events = whole.count(b"data: ")
    for cut in range(0, events, max(events // CUTS, 1)):
        fleet.cuts.after[:] = [cut]
        received = streamed(url, body)
        assert not fleet.cuts.after or cut > received.count(b"data: ") - 3, "nothing was cut"
        fleet.cuts.after.clear()
        assert Received(received).whole[:7] == expected, f"cut after {cut} events"


def test_completion_goes_on(fleet: CutFleet) -> None:
    body = completion("bytes", logprobs=1)
    expected = fleet.uncut(body, COMPLETIONS)
    for cut in range(0, 60, 7):
        fleet.cuts.after[:] = [cut]
        received = streamed(fleet.urls.public, body, COMPLETIONS)
        fleet.cuts.after.clear()
        assert Received(received).whole[:7] == expected, f"cut after {cut} events"


@pytest.mark.parametrize("name", AGENTS)
def test_greedy_stream_of_an_agent_is_the_uncut_one(fleet: CutFleet, name: str) -> None:
    path, body = AGENTS[name]
    expected, whole = named_steps(streamed(fleet.pods[0].url, body, path)), streamed(fleet.urls.public, body, path)
    assert len(expected) > 4, expected
    assert named_steps(whole) == expected
    events = whole.count(b"data: ")
    for cut in range(0, events, max(events // CUTS, 1)):
        fleet.cuts.after[:] = [cut]
        received = streamed(fleet.urls.public, body, path)
        # The last events come together.
        assert not fleet.cuts.after or cut > received.count(b"data: ") - 6, "nothing was cut"
        fleet.cuts.after.clear()
        assert named_steps(received) == expected, f"cut after {cut} events"


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_message_is_that_of_a_pod_itself(fleet: CutFleet, name: str) -> None:
    """Whole, and cut."""
    body, path = SAMPLED[name], "/v1/messages"
    expected, whole = named_steps(streamed(fleet.pods[0].url, body, path)), streamed(fleet.urls.public, body, path)
    assert len(expected) > 4, expected
    assert named_steps(whole) == expected
    events = whole.count(b"data: ")
    for cut in range(0, events, max(events // CUTS, 1)):
        fleet.cuts.after[:] = [cut]
        received = streamed(fleet.urls.public, body, path)
        fleet.cuts.after.clear()
        assert named_steps(received) == expected, f"cut after {cut} events"
    assert 'method="ids"' in fleet.continued()


@pytest.mark.parametrize("name", HELD)
def test_sampled_calls_that_are_held_are_the_uncut_ones(fleet: CutFleet, name: str) -> None:
    body = HELD[name]
    expected = fleet.uncut(body)
    assert expected[1], "no call"
    for cut in range(0, 28, 3):
        fleet.cuts.after[:] = [cut]
        received = streamed(fleet.urls.public, body)
        assert not fleet.cuts.after or cut > 20, "nothing was cut"
        fleet.cuts.after.clear()
        assert Received(received).whole[:7] == expected, f"cut after {cut} events"


def test_pod_that_never_begins_its_responses_is_replaced(fleet: CutFleet) -> None:
    """It is stopped; its proxy takes requests."""
    body, stopped = chat("plain"), fleet.ids[1]
    expected, received = fleet.uncut(body), dict[int, bytes]()
    await_continuation(fleet.urls.admin)  # cuts of other tests may have ejected a pod

    def ask(number: int) -> None:
        received[number] = streamed(fleet.urls.public, {**body, "user": f"{number}"})

    os.killpg(fleet.pods[1].process.pid, signal.SIGSTOP)
    try:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(9)]
        for thread in threads:
            thread.start()
        time.sleep(1)
        pods = httpx.get(f"{fleet.urls.admin}/admin/pods").json()
        for thread in threads:
            thread.join(90)
    finally:
        os.killpg(fleet.pods[1].process.pid, signal.SIGCONT)
    assert any(pod["in_flight"] for pod in pods if pod["id"] == stopped), "the stopped pod had no request"
    assert [Received(received[n]).whole[:7] for n in range(9)] == [expected] * 9
    print(fleet.continued())
