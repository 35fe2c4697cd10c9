"""Chats that go on."""

from __future__ import annotations

from copy import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.api.parse import WholeChat, parse_chat
from router.hashing import SharedTokens, generation_seed, hash_blocks, token_array
from router.prompt.earlier import EarlierTurns
from router.prompt.fingerprint import Fingerprinter
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from router.types import Endpoint, Generation, InferenceRequest

BLOCK = 16
MODEL = Generation(model="m", block_size_tokens=BLOCK)
ASKING = """\
{% for m in messages %}{% if m.role == 'assistant' and '</think>' in m.content %}\
{{ '<｜Assistant｜>' + m.content.split('</think>')[-1].strip() }}\
{% else %}{{ '<｜User｜>' if m.role == 'user' else '<｜Assistant｜>' }}{{ m.content | trim }}{% endif %}\
{% if loop.last and m.role == 'user' %}<｜Assistant｜>{% endif %}{% endfor %}"""
LOOKING_BACK = """\
{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}\
{% for m in messages %}{{ '<｜User｜>' if loop.index0 >= ns.last else '<｜Assistant｜>' }}{{ m.content }}{% endfor %}"""
ROLES = ("system", "user", "assistant")
PIECES = ("word " * 40, "<｜User｜>", "</think>", " ", "\n", "é", '{"role":', "x", "x-anthropic-billing-header: 1\n")
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(ROLES), "content": st.lists(st.sampled_from(PIECES), max_size=4).map("".join)}
)
STEP = st.tuples(st.integers(0, 2), st.lists(MESSAGE, min_size=1, max_size=3), st.sampled_from(["", "a"]))


def body_of(messages: list[Any], **fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "messages": messages, **fields})


def read(body: bytes, known: EarlierTurns, adapter: str = "") -> InferenceRequest:
    """As the edge reads it."""
    parsed, turns = parse_chat(body, known)
    prompt = WholeChat(body) if turns and turns.earlier else {"messages": parsed.messages}
    return InferenceRequest(
        id="r", endpoint=Endpoint.CHAT, model="m", body=body, adapter=adapter, prompt=prompt, turns=turns
    )


@pytest.fixture(scope="module", params=["asking", "looking back", "demo"])
def chat_template(request: pytest.FixtureRequest, deepseek: Tokenizer, template: ChatTemplate) -> ChatTemplate:
    texts = {"asking": ASKING, "looking back": LOOKING_BACK}
    return ChatTemplate(deepseek, texts[request.param]) if request.param in texts else template


@given(steps=st.lists(STEP, min_size=1, max_size=14))
@settings(max_examples=40, deadline=None)
def test_going_on_gives_the_prompt_of_the_whole(
    chat_template: ChatTemplate, deepseek: Tokenizer, steps: list[tuple[int, list[Any], str]]
) -> None:
    """Three conversations by turns, with adapters, special tokens and what the template treats in its own way."""
    known = EarlierTurns(seed=3)
    going_on = Fingerprinter(deepseek, chat_template, MODEL, earlier=known)
    conversations: list[list[Any]] = [[], [], []]
    for which, new, adapter in steps:
        conversations[which] += new
        request = read(body_of(conversations[which], max_tokens=5), known, adapter)
        found = going_on.fingerprint(request)
        tokens = deepseek.encode(chat_template.render({"messages": conversations[which]}))
        assert found.tokens == tokens
        assert found.hashes == hash_blocks(tokens, BLOCK, generation_seed(found.generation))


FIRST = '{"role":"system","content":"' + "system " * 60 + '"}'
LAST = f'{{"role":"user","content":"{"x" * 60}"}}'
OTHERS = '{"content":"' + "other " * 60 + '","role":"user"},{"content":"e","role":"user"}'
USUAL = f'{{"model":"m","messages":[{FIRST},{LAST}]}}'
NAMED_TWICE = {
    "again": f'{{"model":"m","messages":[{FIRST},{LAST}],"messages":[{OTHERS}]}}',
    "again, escaped": f'{{"model":"m","messages":[{FIRST},{LAST}],"\\u006d\\u0065ssages":[{OTHERS}]}}',
    "first inside a field": f'{{"model":"m","metadata":{{"messages":[{FIRST},{LAST}]}},"messages":[{OTHERS}]}}',
    "last inside a field": f'{{"model":"m","\\u006dessages":[{OTHERS}],"metadata":{{"messages":[{FIRST},{LAST}]}}}}',
    "last as the end of a name": f'{{"model":"m","\\u006dessages":[{OTHERS}],"my\\"messages":[{FIRST},{LAST}]}}',
    "first as the end of a name": f'{{"model":"m","my\\"messages":[{FIRST},{LAST}],"messages":[{OTHERS}]}}',
}


@pytest.mark.parametrize("name", NAMED_TWICE)
def test_bodies_that_name_messages_twice_tell_lies_about_no_prompt(
    template: ChatTemplate, deepseek: Tokenizer, name: str
) -> None:
    """Neither about their own nor about others that begin with the same bytes."""
    odd = NAMED_TWICE[name]
    for order in ([odd, odd, odd, USUAL], [USUAL, USUAL, odd]):
        known = EarlierTurns(seed=3)
        fingerprinter = Fingerprinter(deepseek, template, MODEL, earlier=known)
        for body in order:
            found = fingerprinter.fingerprint(read(body.encode(), known))
            assert found.tokens == deepseek.encode(template.render(msgspec.json.decode(body)))


def grown(turns: int, words: int = 50) -> list[dict[str, str]]:
    roles = ["system", *(["user", "assistant"] * turns), "user"]
    return [{"role": role, "content": f"{i} " + "word " * words} for i, role in enumerate(roles)]


def test_from_its_third_turn_on_only_new_messages_are_decoded(template: ChatTemplate, deepseek: Tokenizer) -> None:
    """And encoded: however long the conversation is."""
    known = EarlierTurns(seed=3)
    fingerprinter = Fingerprinter(deepseek, template, MODEL, earlier=known)
    decoded, looked_up = [], []
    for turns in range(12):
        request = read(body_of(grown(turns)), known)
        decoded.append(len(request.turns.messages) if request.turns else 2 * turns + 2)
        pending = fingerprinter.begin(request)
        looked_up.append(pending.cold_characters)
        fingerprinter.finish(pending)
    assert decoded == [2, 4] + [3] * 10
    assert max(looked_up[2:]) < 4 * max(len(message["content"]) for message in grown(12))


def test_each_turn_is_read_as_of_the_whole(chat_template: ChatTemplate, deepseek: Tokenizer) -> None:
    """Also where a later turn changes what stands before earlier ones, and for whatever adapter."""
    known = EarlierTurns(seed=3)
    fingerprinter = Fingerprinter(deepseek, chat_template, MODEL, earlier=known)
    for turns in range(8):
        for adapter in ("", "a"):
            found = fingerprinter.fingerprint(read(body_of(grown(turns)), known, adapter))
            tokens = deepseek.encode(chat_template.render({"messages": grown(turns)}))
            assert found.tokens == tokens
            assert found.hashes == hash_blocks(tokens, BLOCK, generation_seed(found.generation))


def test_what_a_tokenizer_said_that_is_trusted_no_more_is_forgotten(
    template: ChatTemplate, deepseek: Tokenizer
) -> None:
    """Also what is still being read meanwhile."""
    known = EarlierTurns(seed=3)
    fingerprinter = Fingerprinter(deepseek, template, MODEL, earlier=known)
    for turns in range(3):
        fingerprinter.fingerprint(read(body_of(grown(turns)), known))
    last = fingerprinter.begin(read(body_of(grown(3)), known))
    assert known.bytes
    fingerprinter.forget_segments()
    fingerprinter.finish(last)
    for _ in range(2):
        turns_seen = read(body_of(grown(4)), known).turns
        assert turns_seen is None or turns_seen.earlier is None


def test_what_a_tokenizer_said_before_it_failed_is_forgotten(template: ChatTemplate, deepseek: Tokenizer) -> None:
    """Whoever noticed it, and also by requests that were parsed before."""
    known, failing = EarlierTurns(seed=3), copy(deepseek)
    failing.backend = "fastokens"
    fingerprinter = Fingerprinter(failing, template, MODEL, earlier=known)
    for turns in range(3):
        fingerprinter.fingerprint(read(body_of(grown(turns)), known))
    request = read(body_of(grown(3)), known)
    assert request.turns is not None
    assert request.turns.earlier is not None
    failing.distrust("it failed")
    assert fingerprinter.begin(request).going_on is None
    assert read(body_of(grown(3)), known).turns is None


def test_turns_share_the_tokens_that_they_begin_with(template: ChatTemplate, deepseek: Tokenizer) -> None:
    """A long conversation is remembered once, and whoever reads its tokens gets all of them."""
    known = EarlierTurns(seed=3)
    fingerprinter = Fingerprinter(deepseek, template, MODEL, earlier=known)
    for turns in range(30):
        found = fingerprinter.fingerprint(read(body_of(grown(turns)), known))
    read(body_of(grown(30)), known)
    assert len(found.tokens) * 4 < known.bytes < len(found.tokens) * 4 * 2 + 30 * 4_000
    assert isinstance(found.tokens, SharedTokens)
    flat = token_array(found.tokens)
    assert len(flat) == len(found.tokens) == found.token_count
    assert list(found.tokens) == flat.tolist()
    assert found.tokens[-3:] == flat[-3:]
