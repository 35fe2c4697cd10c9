"""Chats that grow: only their new messages are read, with the result of reading the whole."""

from __future__ import annotations

from copy import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import MalformedRequest
from router.hashing import generation_seed, hash_blocks
from router.prompt.fingerprint import Fingerprinter
from router.prompt.pending import EMPTY_PREFIX
from router.prompt.segments import Lookup
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from router.types import Generation, InferenceRequest
from tests.kit import scenes

BLOCK = 16
MODEL = Generation(model="m", block_size_tokens=BLOCK)
CUTTING = """\
{% for m in messages %}{% if m.role == 'assistant' and '</think>' in m.content %}\
{{ '<｜Assistant｜>' + m.content.split('</think>')[-1].strip() }}\
{% else %}{{ '<｜User｜>' if m.role == 'user' else '<｜Assistant｜>' }}{{ m.content | trim }}{% endif %}\
{% if loop.last and m.role == 'user' %}<｜Assistant｜>{% endif %}{% endfor %}"""
LOOKING_BACK = """\
{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}\
{% for m in messages %}{{ '<｜User｜>' if loop.index0 >= ns.last else '<｜Assistant｜>' }}{{ m.content }}{% endfor %}"""
PIECES = ("word " * 40, "<｜User｜>", "</think>", " ", "\n", "é", "x", "x-anthropic-billing-header: 1\n")
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(("system", "user", "assistant")),
        "content": st.lists(st.sampled_from(PIECES), max_size=4).map("".join),
    }
)
STEP = st.tuples(st.integers(0, 2), st.lists(MESSAGE, min_size=1, max_size=3), st.sampled_from(["", "a"]))


def raw(messages: list[Any]) -> list[msgspec.Raw]:
    """Messages as the edge passes them on."""
    return [msgspec.Raw(msgspec.json.encode(message)) for message in messages]


def chat(messages: list[Any], adapter: str = "", **fields: Any) -> InferenceRequest:
    prompt = {"messages": raw(messages), **fields}
    return scenes.request(body=b"", adapter=adapter, prompt=prompt)


def grown(turns: int, words: int = 50) -> list[dict[str, str]]:
    """A system message, complete turns, and a last question."""
    roles = ["system", *(["user", "assistant"] * turns), "user"]
    return [{"role": role, "content": f"{i} " + "word " * words} for i, role in enumerate(roles)]


@pytest.fixture(scope="module", params=["cutting", "looking back", "demo"])
def chat_template(request: pytest.FixtureRequest, deepseek: Tokenizer, template: ChatTemplate) -> ChatTemplate:
    texts = {"cutting": CUTTING, "looking back": LOOKING_BACK}
    return ChatTemplate(deepseek, texts[request.param]) if request.param in texts else template


@pytest.fixture
def fingerprinter(deepseek: Tokenizer, template: ChatTemplate) -> Fingerprinter:
    return Fingerprinter(deepseek, template, MODEL)


@given(steps=st.lists(STEP, min_size=1, max_size=14))
def test_an_incremental_prompt_is_the_prompt_of_the_whole(
    chat_template: ChatTemplate, deepseek: Tokenizer, steps: list[tuple[int, list[Any], str]]
) -> None:
    """Three interleaved conversations with adapters, special tokens, and contents that the template changes."""
    incremental = Fingerprinter(deepseek, chat_template, MODEL)
    conversations: list[list[Any]] = [[], [], []]
    for which, new, adapter in steps:
        conversations[which] += new
        found = incremental.fingerprint(chat(conversations[which], adapter))
        tokens = deepseek.encode(chat_template.render({"messages": conversations[which]}))
        assert found.tokens == tokens
        assert found.hashes == hash_blocks(tokens, BLOCK, generation_seed(found.generation))


def test_each_turn_has_the_prompt_of_the_whole(chat_template: ChatTemplate, deepseek: Tokenizer) -> None:
    """Also where a later turn changes how earlier ones are printed, and for any adapter."""
    incremental = Fingerprinter(deepseek, chat_template, MODEL)
    for turns in range(8):
        for adapter in ("", "a"):
            found = incremental.fingerprint(chat(grown(turns), adapter))
            tokens = deepseek.encode(chat_template.render({"messages": grown(turns)}))
            assert found.tokens == tokens
            assert found.hashes == hash_blocks(tokens, BLOCK, generation_seed(found.generation))


def test_from_the_third_turn_on_only_new_messages_are_encoded(fingerprinter: Fingerprinter) -> None:
    encoded = []
    for turns in range(12):
        pending = fingerprinter.begin(chat(grown(turns)))
        assert pending.prefix is not None
        assert (pending.entry is not None) == (turns > 0)
        encoded.append(pending.cold_characters)
        fingerprinter.finish(pending)
    assert max(encoded[2:]) < 4 * max(len(message["content"]) for message in grown(12))


def test_a_repeated_chat_stores_nothing_more(fingerprinter: Fingerprinter) -> None:
    assert fingerprinter.incremental is not None
    for _ in range(3):
        fingerprinter.fingerprint(chat(grown(3)))
    held = fingerprinter.incremental.cache.bytes
    pending = fingerprinter.begin(chat(grown(3)))
    assert pending.prefix is not None
    assert pending.entry is None
    assert isinstance(pending.prompt, Lookup)
    assert pending.prompt.text.startswith(pending.prefix.rest)
    assert pending.prompt.text.endswith(grown(3)[-1]["content"] + "<｜Assistant｜>")
    assert len(pending.prefix.roles) == len(grown(3)) - 1
    assert fingerprinter.incremental.cache.bytes == held


def test_a_prefix_of_another_salt_is_unknown(fingerprinter: Fingerprinter) -> None:
    """Also to a chat without one."""
    for _ in range(3):
        fingerprinter.fingerprint(msgspec.structs.replace(chat(grown(3)), salt="one"))
    for salt in ("other", ""):
        pending = fingerprinter.begin(msgspec.structs.replace(chat(grown(3)), salt=salt))
        assert pending.prefix is EMPTY_PREFIX
    known = fingerprinter.begin(msgspec.structs.replace(chat(grown(3)), salt="one")).prefix
    assert known is not None
    assert known.messages == len(grown(3)) - 1


@pytest.mark.parametrize(
    "prompt",
    [
        {"messages": grown(2), "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": grown(2), "add_generation_prompt": False},
        {"messages": [*grown(2), {"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {"messages": [*grown(2), {"role": "user", "content": "x", "name": "me"}]},
        {"messages": [*grown(2), {"role": "tool", "content": "x"}]},
        {"messages": [*grown(2), {"role": "user", "content": ""}]},
        {"messages": [*grown(2), {"role": "user", "content": "x-anthropic-billing-header"}]},
    ],
)
def test_other_chats_are_read_whole(fingerprinter: Fingerprinter, template: ChatTemplate, prompt: Any) -> None:
    for turns in (1, 2, 2):
        fingerprinter.fingerprint(chat(grown(turns)))
    pending = fingerprinter.begin(chat(**prompt))
    assert pending.prefix is None
    assert isinstance(pending.prompt, Lookup)
    assert pending.prompt.text == template.render(prompt)


def test_a_message_that_is_not_json_is_refused(fingerprinter: Fingerprinter) -> None:
    for _ in range(3):
        fingerprinter.fingerprint(chat(grown(1)))
    request = chat(grown(1))
    request.prompt["messages"][-1] = msgspec.Raw(b'{"role": "user", "content": "\\ud800"}')
    with pytest.raises(MalformedRequest, match="not valid JSON"):
        fingerprinter.begin(request)


def test_a_switch_turns_incremental_reading_off(deepseek: Tokenizer, template: ChatTemplate) -> None:
    whole = Fingerprinter(deepseek, template, MODEL, incremental=False)
    for turns in range(3):
        request = chat(grown(turns))
        assert whole.begin(request).prefix is None
        assert whole.fingerprint(request).tokens == deepseek.encode(template.render({"messages": grown(turns)}))


def test_prefixes_of_an_earlier_tokenizer_backend_are_forgotten(fingerprinter: Fingerprinter) -> None:
    """Also those that are being read when it changes."""
    for turns in range(3):
        fingerprinter.fingerprint(chat(grown(turns)))
    last = fingerprinter.begin(chat(grown(3)))
    assert last.prefix is not None
    fingerprinter.forget_segments()
    fingerprinter.finish(last)
    assert fingerprinter.incremental is not None
    assert fingerprinter.incremental.cache.find([]) is None
    assert len(fingerprinter.incremental.cache) == 0


def test_a_backend_that_failed_while_encoding_is_noticed(deepseek: Tokenizer, template: ChatTemplate) -> None:
    failing = copy(deepseek)
    failing.backend = "fastokens"
    reading = Fingerprinter(failing, template, MODEL)
    for turns in range(3):
        reading.fingerprint(chat(grown(turns)))
    failing.distrust("it failed")
    pending = reading.begin(chat(grown(3)))
    assert pending.prefix is not None
    assert pending.prefix is EMPTY_PREFIX
    assert pending.entry is None
