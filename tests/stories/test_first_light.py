"""A client gets its response from the pod that holds its prefix."""

from __future__ import annotations

import asyncio
import re
from contextlib import closing, suppress
from typing import Any

import openai
import pytest

from loadtest.mock_engine.faults import Fault, FaultKind
from tests.stories.conftest import Deploy, converse, opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]


async def test_a_conversation_stays_on_its_pod_with_exact_predictions(deploy: Deploy) -> None:
    """Every turn goes to the same pod, and the engine reports exactly the predicted cached tokens."""
    async with deploy(pods=3) as deployment:
        answers = await converse(deployment, opening("tides"), turns=4)
        assert len({answer.headers["x-warmroute-pod"] for answer in answers}) == 1
        predicted = [int(answer.headers["x-warmroute-cached-tokens"]) for answer in answers]
        reported = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert predicted == reported
        assert reported[0] == 0 < reported[1] < reported[3]


async def test_an_engine_without_events_is_routed_by_predictions(deploy: Deploy) -> None:
    """The predicted index keeps conversations together and never predicts more than the engine has."""
    async with deploy(pods=3, engine={"kv_events": None}) as deployment:
        answers = await converse(deployment, opening("rivers"), turns=4)
        assert len({answer.headers["x-warmroute-pod"] for answer in answers}) == 1
        for answer in answers[1:]:
            predicted = int(answer.headers["x-warmroute-cached-tokens"])
            assert 0 < predicted <= answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_a_stream_is_forwarded_byte_for_byte(deploy: Deploy) -> None:
    """The client reads the bytes that the pod wrote."""
    async with deploy(pods=1) as deployment:
        body = {"model": "demo", "messages": opening("seas"), "max_tokens": 6, "stream": True}
        headers = {"x-request-id": "same"}
        direct_url = deployment.engines[0].url + "/v1/chat/completions"
        direct = await deployment.client.post(direct_url, json=body, headers=headers)
        routed = await deployment.client.post("/v1/chat/completions", json=body, headers=headers)
        assert routed.headers["content-type"] == direct.headers["content-type"]
        assert _without_times(routed.text) == _without_times(direct.text)
        assert routed.text.endswith("data: [DONE]\n\n")


def _without_times(text: str) -> list[str]:
    """Remove ids and creation times, which differ between two requests."""
    return [line.split('"choices"')[-1] for line in text.split("\n")]


async def test_the_openai_sdk_notices_nothing(deploy: Deploy) -> None:
    """Unary, streamed, models and embeddings through the official client."""
    async with deploy() as deployment:
        sdk = openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0)
        async with sdk:
            asked: Any = {"model": "demo", "messages": opening("lakes"), "max_tokens": 5}
            answer = await sdk.chat.completions.create(**asked)
            stream = await sdk.chat.completions.create(**asked, stream=True)
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            assert streamed == answer.choices[0].message.content
            assert [model.id async for model in sdk.models.list()] == ["demo"]
            assert (await sdk.embeddings.create(model="demo", input="x")).data[0].embedding
            with pytest.raises(openai.NotFoundError, match=r"does not exist\. Models: demo\."):
                await sdk.chat.completions.create(**asked | {"model": "other"})


async def test_unknown_fields_key_order_and_large_integers_reach_the_pod_untouched(deploy: Deploy) -> None:
    """The pod receives the body as sent, except for fields that control engines."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError):  # a router that stops hangs up
            await echo(reader, writer)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-len")), 0)
        body = await reader.readexactly(length)
        path = head.split(b" ")[1]
        answer = b'{"data":[{"id":"echo"}]}' if path == b"/v1/models" else b"{}"
        if path == b"/v1/chat/completions" and b"probe" not in body:
            seen.append(body)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(answer), answer))
        await writer.drain()

    async with deploy() as deployment, await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert (await deployment.admin.post("/admin/pods", json={"url": url})).status_code == 201
        await deployment.until(lambda: deployment.program.fleet.resolve("echo") is not None)
        await deployment.until(lambda: deployment.ready("echo") == 1)
        kept = b'"zeta":9223372036854775807,"messages":[{"role":"user","content":"h\\u00e9"}],'
        sent = b"{ " + kept + b' "a":1e400, "model":"echo" }'
        await deployment.client.post("/v1/chat/completions", content=sent)
        stripped = sent[:-1] + b',"kv_transfer_params":{"remote_host":"evil"}}'
        await deployment.client.post("/v1/chat/completions", content=stripped)
        assert seen[0] == sent
        assert b"evil" not in seen[1]
        assert kept + b'"a":1e400' in seen[1]


async def test_readiness_needs_a_ready_pod_and_liveness_does_not(deploy: Deploy) -> None:
    """/readyz fails when the last pod is ejected, and a request then gets the states of the pods. /livez still
    succeeds."""
    async with deploy(pods=1) as deployment:
        assert (await deployment.client.get("/readyz")).status_code == 200
        deployment.engines[0].inject(Fault(kind=FaultKind.UNHEALTHY, count=None))
        await deployment.until(lambda: deployment.ready() == 0)
        assert (await deployment.client.get("/readyz")).status_code == 503
        assert (await deployment.client.get("/livez")).status_code == 200
        answer = await deployment.chat(opening("x"))
        page = (await deployment.admin.get("/metrics")).text
        assert re.search(r"^warmroute_loop_lag_seconds_count [1-9]", page, re.M), "it measures its event loop"
        assert answer.status_code == 503
        assert "ejected" in answer.json()["error"]["message"]
