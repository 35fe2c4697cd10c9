"""Prompts that pods tokenize."""

from __future__ import annotations

import threading
from array import array

import pytest
from msgspec.structs import replace

from router.engines.adapter import parse_tokens
from router.engines.engine_catalog import ENGINES
from router.frontends import prompt_readers
from router.frontends.prompt_readers import EnginePromptReader
from router.hashing import generation_seed, hash_blocks, token_array
from router.prompt.conversation import UnreadReason
from router.types import Endpoint, Generation, PromptPrefix
from tests.kit import scenes
from tests.kit.scripted_pods import LONGER_S, Asked, Behaviour, Town, town

pytestmark = [pytest.mark.virtual, pytest.mark.anyio]

GENERATION = Generation(model="m", block_size_tokens=2)
REQUEST = scenes.request(body=b" " * 20_000, prompt={"messages": [{"role": "user", "content": "hi"}]})


async def knows(asked: Asked) -> None:
    await asked.answer({"tokens": [7, 8, 9], "count": 3})


async def is_broken(asked: Asked) -> None:
    await asked.answer({"error": "no"}, status=500)


async def hangs(asked: Asked) -> None:
    await asked.hung_up()


async def dies(asked: Asked) -> None:
    asked.reset()


def reader_in(place: Town, unread: list[UnreadReason]) -> EnginePromptReader:
    """One that asks the pods in the order of their names."""
    pods = [status.pod for status in place.fleet.snapshot.pods]
    return EnginePromptReader(
        GENERATION,
        place.pools.of,
        lambda _: pods,
        lambda _, why, _details: unread.append(why),
        readings=lambda request: (("", ENGINES["vllm"].conversions.get(request.endpoint)),),
    )


async def test_a_pod_is_asked_for_the_tokens() -> None:
    """They are hashed here, as ever."""
    async with town(a=knows) as place:
        prefix = await reader_in(place, []).read(REQUEST)
        tokens = token_array([7, 8, 9])
        assert isinstance(prefix, PromptPrefix)
        assert (prefix.tokens, prefix.hashes) == (tokens, hash_blocks(tokens, 2, generation_seed(GENERATION)))
        (asked,) = place.made["a"].asked
        assert (asked.target, asked.body["messages"]) == ("/tokenize", REQUEST.prompt["messages"])


@pytest.mark.parametrize("count", [3, 20_000])
async def test_many_tokens_are_decoded_in_a_thread(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def parse(answer: bytes) -> array[int] | None:
        threads.append(threading.current_thread().name)
        return parse_tokens(answer)

    async def answers(asked: Asked) -> None:
        await asked.answer({"tokens": [100_000] * count})

    monkeypatch.setattr(prompt_readers, "parse_tokens", parse)
    monkeypatch.setattr(prompt_readers, "TOKENIZE_TIMEOUT_S", LONGER_S)
    async with town(a=answers) as place:
        prefix = await reader_in(place, []).read(REQUEST)
    assert isinstance(prefix, PromptPrefix) and len(prefix.tokens) == count
    assert [name == threading.current_thread().name for name in threads] == [count == 3]


@pytest.mark.parametrize("fault", [is_broken, hangs, dies])
async def test_where_one_pod_cannot_say_another_is_asked(fault: Behaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it fails, and no longer than a moment is waited."""
    monkeypatch.setattr(prompt_readers, "TOKENIZE_TIMEOUT_S", 0.05 if fault is hangs else LONGER_S)
    async with town(a=fault, b=knows) as place:
        assert await reader_in(place, []).read(REQUEST) is not None


async def test_messages_are_tokenized_as_the_chat_that_the_engine_makes_of_them() -> None:
    """Arguments of calls as text. What depends on the template, which only the engine has, is left to it."""
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {"x": 1}}
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [call]}]
    message = replace(REQUEST, endpoint=Endpoint.MESSAGES, prompt={"messages": said, "system": "S"})
    late = replace(message, prompt={"messages": [*said, {"role": "system", "content": "Be brief."}]})
    unread: list[UnreadReason] = []
    async with town(a=knows) as place:
        reader = reader_in(place, unread)
        assert await reader.read(message) is not None
        assert isinstance(await reader.read(late), UnreadReason)
        (asked,) = place.made["a"].asked
        system, user, assistant = asked.body["messages"]
        assert (system["content"], user) == ("S", said[0])
        assert assistant["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"x": 1}'}
    assert unread == [UnreadReason.NO_TEMPLATE]


async def test_the_arguments_of_a_response_stay_as_they_are() -> None:
    """In the Responses API they are text."""
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"x": 1}'}
    items = [{"role": "user", "content": "hi"}, call, {"type": "function_call_output", "call_id": "c", "output": "2"}]
    async with town(a=knows) as place:
        request = replace(REQUEST, endpoint=Endpoint.RESPONSES, prompt={"input": items})
        assert await reader_in(place, []).read(request) is not None
        (asked,) = place.made["a"].asked
        assert asked.body["messages"][1]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"x": 1}'}


async def test_where_nobody_can_say_the_request_goes_without_a_prefix() -> None:
    """Visibly, and after two were asked."""
    unread: list[UnreadReason] = []
    async with town(a=is_broken, b=is_broken, c=knows) as place:
        assert isinstance(await reader_in(place, unread).read(REQUEST), UnreadReason)
    assert unread == [UnreadReason.NOT_TOKENIZED]


async def test_a_request_that_no_pod_can_serve_is_not_counted_as_unread() -> None:
    """A provider serves it, or it waits."""
    unread = list[UnreadReason]()
    async with town() as place:
        assert await reader_in(place, unread).read(REQUEST) is None
    assert not unread


async def test_a_chat_with_a_picture_is_not_tokenized_on_a_pod() -> None:
    """The engine's tokens would be equal for different pictures."""
    async with town(a=knows) as place:
        unread: list[UnreadReason] = []
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
        asked = replace(REQUEST, body=b'"image_url"', prompt={"messages": messages})
        assert await reader_in(place, unread).read(asked) is UnreadReason.MEDIA
        assert unread == [UnreadReason.MEDIA]
        assert not place.made["a"].asked


async def claims(asked: Asked) -> None:
    await asked.answer({"tokens": [7] * 5000, "count": 5000})


async def test_a_pod_that_claims_more_tokens_than_a_prompt_can_have_is_not_believed() -> None:
    """The next one is asked: else its claim would make the prompt too long for every pod."""
    short = replace(REQUEST, body=b" " * 100)
    async with town(a=claims, b=knows) as place:
        prefix = await reader_in(place, []).read(short)
        assert isinstance(prefix, PromptPrefix) and len(prefix.tokens) == 3
    unread = list[UnreadReason]()
    async with town(a=claims, b=claims) as place:
        assert await reader_in(place, unread).read(short) is UnreadReason.NOT_TOKENIZED
        assert unread == [UnreadReason.NOT_TOKENIZED]
