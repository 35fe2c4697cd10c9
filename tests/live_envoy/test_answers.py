"""`picker.requests: picker` behind a real Envoy, which passes the responses of the picker on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.live_envoy.gateway import DUPLEX, Change, chat, kill, post, running_gateway, wait_for

pytestmark = pytest.mark.net
ANSWERS = {"requests": "picker"}


@pytest.mark.parametrize("change", [(), (DUPLEX,)], ids=["documented", "duplex"])
def test_responses_pass_to_the_byte(change: tuple[Change, ...]) -> None:
    with running_gateway(*change, engines=1, picker=ANSWERS) as gateway:
        direct = httpx.post(f"http://127.0.0.1:{gateway.pods[0]}/tokenize", json=chat("Hello " * 50_000))
        through = post(gateway, chat("Hello " * 50_000), "/tokenize")
        assert through.status_code == 200 and through.content == direct.content and len(direct.content) > 100_000
        answer = post(gateway, chat(stream=True, max_tokens=200))
        events = answer.text.split("\n\n")
        assert answer.headers["content-type"].startswith("text/event-stream") and events[-2] == "data: [DONE]"
        assert len(events) > 100 and answer.headers["x-warmroute-pod"] == f"127.0.0.1:{gateway.pods[0]}"
        assert post(gateway, chat(model="nope")).json()["error"]["code"] == "model_not_found"
        assert httpx.get(f"{gateway.url}/v1/models").json()["data"][0]["id"] == "mock"
        wait_for(lambda: gateway.in_flight() == 0, "still booked", 10)


def test_a_body_that_is_too_large_is_refused_and_one_of_20_mb_passes() -> None:
    with running_gateway(picker=ANSWERS, limits={"max_body_bytes": 32 * 2**20}) as gateway:
        assert post(gateway, chat("x" * 33 * 2**20)).status_code == 413
        assert post(gateway, chat("word " * 4_000_000)).status_code == 400, "longer than the context, says the engine"


def test_a_pod_that_dies_costs_no_request_and_no_stream() -> None:
    """Envoy alone would have sent the requests to the address of a dead pod, and cut the streams."""
    proven: dict[str, Any] = {"continuation": {"enabled": True}, "probes": {"self_test": True}}
    with running_gateway(engines=3, time_scale=1.0, picker=ANSWERS, **proven) as gateway:

        def all_continue() -> bool:
            return all(pod["continues"] for pod in httpx.get(f"{gateway.admin}/admin/pods").json())

        wait_for(all_continue, "a pod has not shown that it continues")
        body = chat(stream=True, max_tokens=300, temperature=0)
        whole = post(gateway, body)
        with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=60) as response:
            pod = gateway.pods.index(int(response.headers["x-warmroute-pod"].rpartition(":")[2]))
            pieces = response.iter_text()
            read = "".join(next(pieces) for _ in range(3))
            kill(gateway, f"pod{pod}")
            read += "".join(pieces)
        assert len(_text(read)) > 300 and _text(read) == _text(whole.text) and read.endswith("data: [DONE]\n\n")
        for number in range(10):
            assert post(gateway, chat(f"question {number}")).status_code == 200
        wait_for(lambda: gateway.in_flight() == 0, "still booked", 10)


def _text(events: str) -> str:
    deltas = [json.loads(event[6:]) for event in events.split("\n\n") if event.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for one in deltas for choice in one["choices"])
