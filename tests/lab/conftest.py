"""A tokenizer of whole words, and engines that use it without step times."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import xxhash

from loadtest.commands.mock_engine_command import mock_tokenizer
from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_engine import MockEngine
from router.errors import MalformedRequest
from router.hashing import token_array
from router.prompt.conversation import UnreadReason, Unrenderable
from router.prompt.template import ChatTemplate
from tests.kit.scenes import LLAMA_8B

BEGIN_OF_SEQUENCE = 1
DEADLINE_S = 30.0

MakeConfig = Callable[..., MockEngineConfig]


class WordTokenizer:
    """One token per word: its 32-bit hash. With special tokens, the first token is 1."""

    vocabulary_size = 2**32

    def __init__(self) -> None:
        self._words: dict[int, str] = {}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> array[int]:
        """Token ids; equal words have equal ids."""
        tokens = token_array([BEGIN_OF_SEQUENCE] if add_special_tokens else [])
        words = {word: xxhash.xxh32_intdigest(word.encode()) for word in text.split()}
        self._words |= {token: word for word, token in words.items()}
        tokens.extend(words[word] for word in text.split())
        return tokens

    def decode_stream(self, prompt: array[int], *, skip_special_tokens: bool) -> Callable[[int], str | None]:
        """Words that it has encoded, each behind a blank."""
        return lambda token: f" {self._words.get(token, '')}"


def render(body: Mapping[str, Any]) -> str:
    """Each message between a role marker and an end marker, then the marker of the next speaker."""
    messages = body["messages"]
    if any(message["role"] == "nobody" for message in messages):
        raise MalformedRequest("nobody may not speak", param="messages")
    if any(isinstance(message["content"], list) for message in messages):
        raise Unrenderable(UnreadReason.MEDIA, "an image")
    return " ".join(f"<{m['role']}> {m['content']} <end>" for m in messages) + " <assistant>"


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Only asyncio, not trio."""
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer() -> WordTokenizer:
    """The word tokenizer."""
    return WordTokenizer()


@pytest.fixture(scope="session")
def make_config(tokenizer: WordTokenizer) -> MakeConfig:
    """Makes configurations of an 8B model on one H100, small and without step times, except for overrides."""

    def make(**overrides: Any) -> MockEngineConfig:
        usual: dict[str, Any] = {
            "models": ("tiny",),
            "tokenizer": tokenizer,
            "render": render,
            "speed": LLAMA_8B,
            "time_scale": 0.0,
            "num_blocks": 256,
            "max_model_len": 2048,
        }
        return MockEngineConfig(**(usual | overrides))

    return make


@pytest.fixture(scope="session")
def make_agent_config(make_config: MakeConfig) -> MakeConfig:
    """The same with the tokenizer and the template of `warmroute mock-engine`."""
    template = ChatTemplate(mock_tokenizer())

    def make(**overrides: Any) -> MockEngineConfig:
        own = {"tokenizer": mock_tokenizer(), "render": template.render, "template": template}
        return make_config(**(own | overrides))

    return make


@pytest.fixture(scope="session")
def running(make_config: MakeConfig) -> Callable[..., Any]:
    """A started engine (configured as by `make_config`) and its client, with a deadline."""

    @asynccontextmanager
    async def run(**overrides: Any) -> AsyncIterator[tuple[MockEngine, httpx.AsyncClient]]:
        async with (
            asyncio.timeout(DEADLINE_S),
            MockEngine(make_config(**overrides)) as engine,
            httpx.AsyncClient(base_url=engine.url) as client,
        ):
            yield engine, client

    return run
