"""The endpoints of an engine over HTTP, and the faults of requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.mock_engine.mock_engine import MockEngine
from router.types import PodLoad, PodSpeed

pytestmark = [pytest.mark.net, pytest.mark.anyio]
Running = Callable[..., AbstractAsyncContextManager[tuple[MockEngine, httpx.AsyncClient]]]
CHAT = "/v1/chat/completions"
LONG = " ".join(f"word{i}" for i in range(60))
ASK = {"messages": [{"role": "user", "content": LONG}]}


async def arm(client: httpx.AsyncClient, kind: str, **fields: Any) -> None:
    assert (await client.post("/_fault", json={"kind": kind, **fields})).status_code == 200


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """One sample of `/metrics`."""
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    return next(s.value for family in families for s in family.samples if s.name == f"vllm:{name}")


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, within the engine's deadline."""
    while not condition():  # there is no event to wait for
        await asyncio.sleep(0)


def idle(engine: MockEngine) -> bool:
    """Whether the pod has no request and no used block."""
    return engine.load == PodLoad()


async def test_the_second_turn_finds_the_first_in_the_cache(running: Running) -> None:
    """Prompt and response of turn 1 are cached in turn 2, by usage and metrics."""
    async with running() as (_, client):
        first = (await client.post(CHAT, json=ASK)).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        answer = first["choices"][0]["message"]
        turns = [*ASK["messages"], answer, {"role": "user", "content": "more"}]
        second = (await client.post(CHAT, json={"messages": turns})).json()
        known = first["usage"]["total_tokens"] - 1
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == known // 16 * 16 > 64
        assert await metric(client, "prefix_cache_hits_total") == known // 16 * 16


async def test_a_stream_has_the_text_of_the_unary_response(running: Running) -> None:
    """Frames in order; the joined deltas equal the message; usage and end marker last."""
    async with running() as (_, client):
        whole = (await client.post(CHAT, json=ASK)).json()
        streamed = await client.post(CHAT, json=ASK | {"stream": True, "stream_options": {"include_usage": True}})
        assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        *frames, counted = [json.loads(line) for line in lines[:-1]]
        text = "".join(frame["choices"][0]["delta"].get("content", "") for frame in frames)
        assert text == whole["choices"][0]["message"]["content"]
        assert counted["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert counted["usage"]["prompt_tokens_details"]["cached_tokens"] == 48


async def test_tokens_are_streamed_as_they_are_generated(running: Running) -> None:
    """The first token arrives while the second is hours away; a disconnect then frees everything."""
    async with running(speed=PodSpeed(0.0, 0.0, 0.0, d0_ms=1e7), time_scale=1.0) as (engine, client):
        async with client.stream("POST", CHAT, json=ASK | {"stream": True, "max_tokens": 8}) as answer:
            got = b""
            async for piece in answer.aiter_raw():
                got += piece
                if got.count(b"data: ") == 2:
                    break
            assert engine.load.running == 1
        await until(lambda: idle(engine))


async def test_completions_take_text_and_tokens(running: Running) -> None:
    """`return_token_ids` shows equal prompts."""
    async with running() as (_, client):
        completion = (await client.post("/v1/completions", json={"prompt": "a b c", "return_token_ids": True})).json()
        ids = completion["choices"][0]["prompt_token_ids"]
        again = (await client.post("/v1/completions", json={"prompt": ids})).json()
        assert again["choices"][0]["text"] == completion["choices"][0]["text"]
        tokenized = (await client.post("/tokenize", json={"prompt": "a b c"})).json()
        assert tokenized["tokens"] == ids


async def test_a_request_keeps_its_clients_id(running: Running) -> None:
    """Also if two concurrent requests share it."""
    async with running() as (_, client):
        posts = [client.post(CHAT, json=ASK, headers={"X-Request-Id": "seven"}) for _ in range(2)]
        answers = await asyncio.gather(*posts)
        assert {answer.json()["id"] for answer in answers} == {"chatcmpl-seven"}


async def test_embeddings_are_answered(running: Running) -> None:
    """One vector per input."""
    async with running() as (_, client):
        answer = (await client.post("/v1/embeddings", json={"input": ["a", "b"]})).json()
        assert [one["index"] for one in answer["data"]] == [0, 1]


async def test_openais_sdk_reads_the_same_embedding_in_both_encodings(running: Running) -> None:
    """Without a word from the program it asks for base64."""
    async with running() as (engine, _), openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none") as sdk:
        raw = await sdk.embeddings.with_raw_response.create(model="tiny", input=["a", "b"])
        assert all(isinstance(one["embedding"], str) for one in json.loads(raw.text)["data"])
        numbers = await sdk.embeddings.create(model="tiny", input=["a", "b"], encoding_format="float")
        assert [one.embedding for one in raw.parse().data] == [pytest.approx(one.embedding) for one in numbers.data]


async def test_an_engine_describes_itself(running: Running) -> None:
    """Models, version, health, event sources."""
    async with running(adapters=("lora",)) as (engine, client):
        cards = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["tiny", "lora"]
        assert (await client.get("/version")).json() == {"version": "0.32.0"}
        assert (await client.get("/health")).status_code == 200
        source = (await client.get("/kv_event_sources")).json()["0"]
        assert (source["endpoint"], source["replay_endpoint"]) == (engine.kv_endpoint, engine.kv_replay_endpoint)


async def test_resetting_the_prefix_cache_clears_it(running: Running) -> None:
    """The same prompt is uncached again."""
    async with running() as (_, client):
        await client.post(CHAT, json=ASK)
        assert (await client.post("/reset_prefix_cache")).status_code == 200
        answer = (await client.post(CHAT, json=ASK)).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(("level", "state"), [(1, "weights_offloaded"), (2, "discard_all")])
async def test_an_engine_that_sleeps_refuses_requests_and_has_no_cache_when_it_wakes(
    running: Running, level: int, state: str
) -> None:
    """At level 2 it has no weights either, until they are loaded."""
    async with running(wake_s=0.0) as (_, client):
        await client.post(CHAT, json=ASK)
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
        await client.post("/sleep", params={"level": level})
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert f'sleep_state="{state}"}} 1.0' in (await client.get("/metrics")).text
        assert (await client.post(CHAT, json=ASK)).status_code == 503
        await client.post("/wake_up?tags=weights")
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        if level == 2:
            await client.post("/collective_rpc", json={"method": "reload_weights"})
        await client.post("/wake_up?tags=kv_cache")
        answer = (await client.post(CHAT, json=ASK)).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert 'sleep_state="awake"} 1.0' in (await client.get("/metrics")).text


async def test_level_2_without_its_weights_serves_nobody(running: Running) -> None:
    async with running(wake_s=0.0) as (_, client):
        await client.post("/sleep?level=2")
        await client.post("/wake_up")
        assert (await client.post(CHAT, json=ASK)).status_code == 500


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, {"messages": [], "model": "tiny"}, 400),
        (CHAT, ASK | {"model": "other"}, 404),
        (CHAT, ASK | {"max_tokens": 4000}, 400),
        ("/v1/nothing", {}, 404),
        ("/metrics", {}, 405),
        ("/_fault", {"kind": "nonsense"}, 400),
    ],
)
async def test_errors_have_vllms_format(running: Running, path: str, body: dict[str, Any], status: int) -> None:
    """An object with message, type, param and the status as an int; the connection stays usable."""
    async with running() as (_, client):
        answer = await client.post(path, json=body)
        assert answer.status_code == status and answer.json()["error"]["code"] == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_cancels_the_request(running: Running, stream: bool) -> None:
    """Running requests and used blocks return to 0 long before the end of the response."""
    async with running(time_scale=1000.0) as (engine, client):
        request = asyncio.ensure_future(client.post(CHAT, json=ASK | {"stream": stream}))
        await until(lambda: engine.load.running > 0)
        assert engine.load.kv_usage > 0
        request.cancel()
        await until(lambda: idle(engine))
        assert await metric(client, "num_requests_running") == 0


async def test_an_armed_status_is_returned_as_often_as_armed(running: Running) -> None:
    """Generation and embeddings; health and metrics are unaffected."""
    async with running() as (_, client):
        await arm(client, "status", status=503, count=2)
        answers = [await client.post(CHAT, json=ASK), await client.post("/v1/embeddings", json={"input": "a"})]
        assert [answer.status_code for answer in answers] == [503, 503]
        assert answers[0].json()["error"]["type"] == "Service Unavailable"
        assert (await client.get("/health")).status_code == 200
        assert (await client.post(CHAT, json=ASK)).status_code == 200


async def test_a_hanging_request_never_reaches_the_pod(running: Running) -> None:
    """No response, no error; the next request is served."""
    async with running() as (engine, client):
        await arm(client, "hang")
        hanging = asyncio.ensure_future(client.post(CHAT, json=ASK))
        await until(lambda: not engine.faults.armed)
        assert (await client.post(CHAT, json=ASK)).status_code == 200
        assert not hanging.done() and await metric(client, "prompt_tokens_total") == 63
        hanging.cancel()


async def test_a_reset_request_breaks_before_any_header(running: Running) -> None:
    """A read error for the client; the next connection is served."""
    async with running() as (_, client):
        await arm(client, "reset")
        with pytest.raises(httpx.ReadError):
            await client.post(CHAT, json=ASK)
        assert (await client.post(CHAT, json=ASK)).status_code == 200


@pytest.mark.parametrize("after_chunks", [0, 3])
async def test_a_cut_stream_ends_after_its_chunks(running: Running, after_chunks: int) -> None:
    """Status 200 and that many tokens, without finish reason and end marker; no block stays in use."""
    async with running() as (engine, client):
        await arm(client, "cut", after_chunks=after_chunks)
        got = b""
        with pytest.raises(httpx.RemoteProtocolError):
            async with client.stream("POST", CHAT, json=ASK | {"stream": True}) as answer:
                async for piece in answer.aiter_raw():
                    got += piece
        assert got.count(b'"content":"') - got.count(b'"content":""') == after_chunks
        await until(lambda: idle(engine))


async def test_a_cut_unary_response_is_half_a_body(running: Running) -> None:
    """The body is shorter than its content length."""
    async with running() as (_, client):
        await arm(client, "cut")
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(CHAT, json=ASK)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_slow_response_withholds_ready_tokens(running: Running, stream: bool) -> None:
    """The pod has finished the request while its client still waits."""
    async with running() as (engine, client):
        await arm(client, "slow", pause_s=1000.0)
        request = asyncio.ensure_future(client.post(CHAT, json=ASK | {"max_tokens": 6, "stream": stream}))
        while await metric(client, "generation_tokens_total") < 6:
            pass
        assert idle(engine) and not request.done()
        request.cancel()


async def test_a_slow_response_is_complete(running: Running) -> None:
    """It arrives token by token to its end; embeddings can be slow as well."""
    async with running() as (_, client):
        await arm(client, "slow", pause_s=0.0, count=2)
        answer = await client.post(CHAT, json=ASK | {"stream": True, "max_tokens": 6})
        assert answer.text.count("data: ") == 8 and answer.text.endswith("[DONE]\n\n")
        assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200


async def test_an_unhealthy_engine_still_serves(running: Running) -> None:
    """Only the health check fails, until the faults are cleared."""
    async with running() as (_, client):
        await arm(client, "unhealthy", count=None)
        for _ in range(3):
            assert (await client.get("/health")).status_code == 503
        assert (await client.post(CHAT, json=ASK)).status_code == 200
        assert (await client.delete("/_fault")).status_code == 200
        assert (await client.get("/health")).status_code == 200
