"""A fleet whose pods do not all serve the same: vLLM's front ends in Python and in Rust."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest

from router.config.load import ENGINE_TOKENIZER
from router.engines.lacks import CONTINUING_ALONE, LISTED_PROMPTS, SEVERAL_ANSWERS
from router.observe.declared import of_requests
from tests.stories.conftest import Deploy, Deployment

pytestmark = [pytest.mark.net, pytest.mark.anyio]

MIXED: list[dict[str, Any]] = [{}, {"front_end": "rust"}]
POD = "x-warmroute-pod"
HELLO = [{"role": "user", "content": "Hello"}]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 2}),
    "/v1/responses": ("/v1/responses", {"input": "Hello", "max_output_tokens": 2}),
    SEVERAL_ANSWERS: ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, "n": 2}),
    LISTED_PROMPTS: ("/v1/completions", {"prompt": ["One", "Two"], "max_tokens": 2}),
}


async def sent(deployment: Deployment, kind: str) -> httpx.Response:
    path, body = KINDS[kind]
    return await deployment.client.post(path, json={"model": "demo", **body})


def rust_pod(deployment: Deployment) -> str:
    return next(s.pod.id for s in deployment.program.fleet.snapshot.pods if s.pod.front_end == "rust")


def attempts_of(deployment: Deployment, pod: str) -> Counter[str]:
    """Attempts at a pod by result."""
    sent = deployment.program.metrics.sent
    return Counter({result: int(count.value) for (at, result), count in sent.items() if at == pod and count.value})


async def knows_lacks(deployment: Deployment) -> bool:
    lacks = {one["id"]: set(one["lacks"]) for one in await deployment.pods()}
    return lacks[rust_pod(deployment)] >= KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_go_to_the_pods_that_serve_them(deploy: Deploy, kind: str) -> None:
    """A pod in Rust is asked at its join. Then none is sent there, none fails, and nothing is ejected."""
    async with deploy(engines=MIXED) as deployment:
        await deployment.until(lambda: knows_lacks(deployment))
        for _ in range(25):
            assert (await sent(deployment, kind)).status_code == 200
        assert attempts_of(deployment, rust_pod(deployment)) == {}
        assert deployment.ready() == 2
        assert (await deployment.chat(HELLO)).status_code == 200


async def test_what_a_pod_lacks_is_tried_elsewhere_before_it_is_known(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of the pod is only a suspicion: the router asks the pod itself. It is no failure of the pod."""
    monkeypatch.setattr("router.engines.vllm.Vllm.may_lack", {})
    async with deploy(engines=MIXED, policy="round_robin", wait=False) as deployment:
        await deployment.until(lambda: deployment.ready() == 2)
        rust = rust_pod(deployment)
        for count, kind in enumerate(KINDS, 1):
            while attempts_of(deployment, rust)["not_served"] < count:
                assert (await sent(deployment, kind)).status_code == 200
            await deployment.until(lambda kind=kind: kind in deployment.program.fleet.lacks)
        assert deployment.ready() == 2
        assert deployment.program.metrics[of_requests.RETRIES].labels("not_served").value == len(KINDS)


async def test_a_message_is_continued_where_a_pod_does_it_unasked_for_no_other(deploy: Deploy) -> None:
    """That in Python wants `add_generation_prompt: false` in addition, and refuses it where there is no other."""
    started = [*HELLO, {"role": "assistant", "content": "Well, "}]
    async with deploy(engines=MIXED, policy="round_robin") as deployment:
        for _ in range(10):
            assert (await deployment.chat(started, continue_final_message=True)).status_code == 200
        await deployment.until(lambda: CONTINUING_ALONE in deployment.program.fleet.lacks)
        sent_to = {(await deployment.chat(started, continue_final_message=True)).headers[POD] for _ in range(10)}
        assert sent_to == {rust_pod(deployment)}
    async with deploy(pods=1) as deployment:
        answer = await deployment.chat(started, continue_final_message=True)
        assert answer.status_code == 400 and "Cannot set both" in answer.json()["error"]["message"]


async def test_what_a_pod_does_not_report_of_its_cache_is_learnt_from_its_events(deploy: Deploy) -> None:
    """Its block size from the first ones; its capacity once it evicts. Its metrics say neither."""
    async with deploy(engines=[{"front_end": "rust", "block_size_tokens": 32, "num_blocks": 64}]) as deployment:
        (rust,) = await deployment.pods()
        assert rust["capacity_tokens"] is None
        await deployment.until(lambda: deployment.program.fleet.snapshot.pods[0].pod.block_size_tokens == 32)
        for topic in range(8):
            await deployment.chat([{"role": "user", "content": f"{topic} " + "many words " * 250}])
        await deployment.until(lambda: bool(deployment.program.fleet.snapshot.pods[0].pod.capacity_tokens))
        (rust,) = await deployment.pods()
        assert 0.9 * 32 * 64 <= rust["capacity_tokens"] <= 32 * 64


async def test_an_answer_that_no_pod_serves_it_passes_unchanged(deploy: Deploy) -> None:
    """Nor is a pod ejected for it."""
    async with deploy(engines=MIXED[1:] * 2) as deployment:
        await deployment.until(lambda: knows_lacks(deployment))
        for _ in range(40):
            answer = await sent(deployment, "/v1/messages")
            assert answer.status_code == 501
            assert answer.json()["error"]["message"].startswith("POST /v1/messages is not supported by the Rust")
        assert deployment.ready() == 2
        answer = await sent(deployment, "/v1/responses")
        assert (answer.status_code, answer.content) == (404, b"")


async def test_what_a_pod_lacks_is_forgotten_when_it_restarts(deploy: Deploy) -> None:
    """The next process may have another front end."""
    async with deploy(engines=MIXED) as deployment:
        await deployment.until(lambda: knows_lacks(deployment))
        deployment.program.fleet.restarted(rust_pod(deployment))
        assert deployment.program.fleet.lacks == frozenset()
        await deployment.until(lambda: knows_lacks(deployment))


LONG = "word " * 200
PARTS = [{"type": "text", "text": LONG}, {"type": "text", "text": LONG}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1e-07, "y": 0.00001}'}}
ODD_CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "user", "content": LONG}],
    "text parts": [{"role": "user", "content": PARTS}],
    "billing line": [
        {"role": "system", "content": f"x-anthropic-billing-header: cch=1;\n{LONG}"},
        {"role": "user", "content": LONG},
    ],
    "numbers of calls": [
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": LONG},
    ],
}


@pytest.mark.parametrize("kind", ODD_CHATS)
@pytest.mark.parametrize("model", [{}, {"tokenizer": ENGINE_TOKENIZER, "chat_template": None}], ids=["own", "engine"])
async def test_each_pod_is_matched_by_its_own_reading(deploy: Deploy, kind: str, model: dict[str, Any]) -> None:
    """What is expected to be cached is cached, on pods of both front ends: also where pods tokenize for the router."""
    served: Counter[str] = Counter()
    async with deploy(engines=MIXED, policy="round_robin", model=model) as deployment:
        for turn in range(8):
            more = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": f"turn {turn} {LONG}"}]
            answer = await deployment.chat([*ODD_CHATS[kind], *more * (turn % 3)])
            assert answer.status_code == 200
            reported = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert int(answer.headers["x-warmroute-cached-tokens"]) == reported
            served[answer.headers["x-warmroute-pod"]] += bool(reported)
    assert len(served) == 2 and all(served.values())
