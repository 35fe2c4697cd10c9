"""The predicted index routes engines without KV events."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.live.engines import HOME, start_llamacpp
from tests.live.live_fleet import Answer, answer_of
from tests.live.router_process import router
from tests.live.test_vllm import Chat, opening

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]

GGUF = HOME / "model" / "tiny-qwen3.gguf"
TOKENIZER = HOME / "tokenizer" / "qwen3"


@pytest.fixture(scope="module")
def llama_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Two llama.cpp servers behind a router; (URL, model)."""
    with start_llamacpp("llama-0", 18031, GGUF) as first, start_llamacpp("llama-1", 18032, GGUF) as second:
        model: str = httpx.get(f"{first.url}/v1/models").json()["data"][0]["id"]
        config = {
            "models": [{"name": model, "tokenizer": str(TOKENIZER)}],
            "pods": [{"url": pod.url, "engine": "llamacpp"} for pod in (first, second)],
        }
        with router(tmp_path_factory.mktemp("llama"), config) as urls:
            yield urls.public, model


async def test_conversations_stay_on_their_pod(llama_url: tuple[str, str]) -> None:
    """Three turns each: one pod per conversation, and from the second turn on the engine finds its prefix."""
    url, model = llama_url
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        for topic in ("tea", "salt"):
            turns = await _converse(client, model, opening(topic))
            print(topic, [(turn.pod, turn.predicted, turn.reported) for turn in turns])
            assert len({turn.pod for turn in turns}) == 1
            assert all(0 < turn.predicted <= turn.reported for turn in turns[1:])


async def _converse(client: openai.AsyncOpenAI, model: str, chat: Chat) -> list[Answer]:
    turns = []
    for number in range(3):
        raw = await client.chat.completions.with_raw_response.create(
            model=model,
            messages=chat,  # type: ignore[arg-type]
            max_tokens=8,
            temperature=0,
        )
        answer = answer_of(raw.headers, raw.parse().model_dump())
        turns.append(answer)
        text = answer.body["choices"][0]["message"]["content"] or ""
        chat += [{"role": "assistant", "content": text}, {"role": "user", "content": f"More, {number}."}]
    return turns
