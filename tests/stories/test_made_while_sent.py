"""Answers that are made while they are sent reach clients as they are made: speech, NDJSON, text."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import openai
import pytest

from loadtest.mock_engine.faults import Fault, FaultKind
from tests.stories.conftest import Deploy, Deployment
from tests.stories.test_failures import exchange, message, nothing_stays_behind

pytestmark = [pytest.mark.net, pytest.mark.anyio]
SPEECH = "/v1/audio/speech"
ASKED: dict[str, Any] = {"model": "demo", "input": "The tide comes in.", "voice": "alloy"}
FORMATS = ["pcm", "wav", "mp3"]
PIECE_BYTES = 960


def sdk_of(deployment: Deployment) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0)


async def direct(deployment: Deployment, **fields: Any) -> bytes:
    """What the pod sends to a client of its own."""
    return (await deployment.client.post(deployment.engines[0].url + SPEECH, json=ASKED | fields)).content


@pytest.mark.parametrize("kind", FORMATS)
async def test_speech_arrives_before_all_of_it_is_spoken(deploy: Deploy, kind: Any) -> None:
    """Through OpenAI's SDK: the pod has sent two pieces, and never sends the rest."""
    async with deploy(pods=1) as deployment, sdk_of(deployment) as sdk:
        whole = await direct(deployment, response_format=kind)
        deployment.engines[0].inject(Fault(kind=FaultKind.SILENCE, after_chunks=2))
        speaking = sdk.audio.speech.with_streaming_response.create(**ASKED, response_format=kind)
        async with speaking as answer:
            received = b""
            async for piece in answer.iter_bytes():
                received += piece
                if len(received) >= 2 * PIECE_BYTES:
                    break
            assert whole.startswith(received) and len(received) < len(whole)
        await nothing_stays_behind(deployment)


async def test_events_of_speech_have_the_same_sound(deploy: Deploy) -> None:
    """And their usage at the end."""
    async with deploy(pods=1) as deployment, sdk_of(deployment) as sdk:
        whole = await direct(deployment, response_format="pcm")
        streaming = sdk.audio.speech.with_streaming_response
        async with streaming.create(**ASKED, response_format="pcm", stream_format="sse") as answer:
            events = [json.loads(line[6:]) async for line in answer.iter_lines() if line.startswith("data: ")]
        assert b"".join(b64decode(event["audio"]) for event in events[:-1]) == whole
        assert events[-1]["usage"]["output_tokens"] == len(whole) // PIECE_BYTES


async def test_speech_that_breaks_is_incomplete_and_nothing_is_appended(deploy: Deploy) -> None:
    """Also for clients of HTTP/1.0, to which the end of the connection is the end of a body. Events end with an
    error."""
    async with deploy(pods=1) as deployment, sdk_of(deployment) as sdk:
        engine, whole = deployment.engines[0], await direct(deployment, response_format="pcm")
        cut = Fault(kind=FaultKind.CUT, after_chunks=2)
        engine.inject(cut)
        received = b""
        with pytest.raises(Exception, match="incomplete chunked read"):  # of the SDK's own release of httpx
            async with sdk.audio.speech.with_streaming_response.create(**ASKED, response_format="pcm") as answer:
                async for piece in answer.iter_bytes():
                    received += piece
        assert whole.startswith(received) and len(received) == 2 * PIECE_BYTES
        body = json.dumps({**ASKED, "response_format": "pcm"}).encode()
        asked = message(body, version=b"1.0").replace(b"/v1/chat/completions", SPEECH.encode())
        engine.inject(cut)
        with pytest.raises(ConnectionResetError):
            await exchange(deployment, asked)
        assert (await exchange(deployment, asked)).endswith(b"\r\n\r\n" + whole)
        engine.inject(cut)
        events = await deployment.client.post(SPEECH, json=ASKED | {"stream_format": "sse"})
        assert events.text.count("speech.audio.delta") == 2 and "event: error\n" in events.text
        await nothing_stays_behind(deployment)
