"""Compares the texts that the router renders for gpt-oss with the tokens of a real vLLM.

Bodies and digests of their tokens are recorded by `tests/live/record_goldens.py harmony`. The texts are encoded by
oss-harmony, which has gpt-oss's vocabulary.
"""

from __future__ import annotations

from array import array
from typing import Any

import openai_harmony
import pytest
from xxhash import xxh3_64_hexdigest

from router.engines.engine_catalog import ENGINES
from router.errors import MalformedRequest
from router.prompt.apis.vllm_rust_chat import VllmRustChat
from router.prompt.conversation import Unrenderable
from router.prompt.harmony import Harmony, SeparateTexts
from router.types import Endpoint
from tests.parity.test_message_tokens import as_received, recorded

DATE = "2026-01-02"
HI = {"role": "user", "content": "Hi"}
SPECIAL = [f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call", "endoftext")]
ENCODING = openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
HARMONY = Harmony(SPECIAL, lambda: DATE)


def _encoded(rendered: SeparateTexts) -> array[int]:
    return array("I", [token for text in rendered.texts for token in ENCODING.encode(text, allowed_special="all")])


def _rendered(endpoint: Endpoint, body: dict[str, Any]) -> SeparateTexts:
    if endpoint is Endpoint.CHAT:
        return HARMONY.render(body)
    kind = ENGINES["vllm"].conversions[endpoint].in_harmony
    assert kind is not None
    return HARMONY.render(kind(HARMONY).chat(as_received(endpoint, body)))


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.RESPONSES])
def test_bodies_have_the_tokens_that_vllm_gave_them(endpoint: Endpoint) -> None:
    """Chats with tools, thinking and late system messages; random bodies of the other APIs."""
    cases, unread = recorded(endpoint, "gptoss"), 0
    assert len(cases) >= (9 if endpoint is Endpoint.CHAT else 100)
    for case in cases:
        try:
            tokens = _encoded(_rendered(endpoint, case["body"]))
        except Unrenderable:
            unread += 1
            continue
        assert (len(tokens), xxh3_64_hexdigest(tokens.tobytes())) == (case["tokens"], case["digest"]), case["body"]
    assert unread <= len(cases) / 10


@pytest.mark.parametrize("text", ["<|end|>", "a<|start|>system", "<|call|>"])
def test_the_text_of_a_special_token_is_not_read(text: str) -> None:
    """Harmony encodes it as text, the model's tokenizer as a token. Also in a tool, a name and the instructions."""
    user = {"role": "user", "content": "Hi"}
    tool = {"type": "function", "function": {"name": "look", "description": text}}
    call = {"id": "1", "function": {"name": text, "arguments": "{}"}}
    for body in (
        {"messages": [{"role": "user", "content": text}]},
        {"messages": [{"role": "system", "content": text}, user]},
        {"messages": [user], "tools": [tool]},
        {"messages": [user, {"role": "assistant", "tool_calls": [call]}]},
    ):
        with pytest.raises(Unrenderable):
            HARMONY.render(body)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "critic", "content": "x"}]},
        {"messages": ["x"]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"function": {"name": "a", "description": "b" * 300}}],
        },
    ],
    ids=str,
)
def test_other_bodies_are_not_read(body: dict[str, Any]) -> None:
    """The engine answers for itself. A long word would take the library seconds."""
    with pytest.raises(Unrenderable):
        HARMONY.render(body)


def test_an_empty_text_of_reasoning_is_not_read() -> None:
    """vLLM makes an empty message of it, though of none in a chat."""
    part = {"type": "reasoning_text", "text": ""}
    with pytest.raises(Unrenderable):
        _rendered(Endpoint.RESPONSES, {"input": [{"type": "reasoning", "summary": [], "content": [part]}]})


def test_reasoning_has_two_names() -> None:
    """That of older clients counts where the other is absent or null."""
    said = [{"role": "assistant", "content": "", name: "R"} for name in ("reasoning", "reasoning_content")]
    texts = [HARMONY.render({"messages": [one, {"role": "user", "content": "x"}]}).texts for one in said]
    assert texts[0] == texts[1] and "R" in "".join(texts[0])


def test_an_unknown_effort_is_refused_as_by_the_engine() -> None:
    """Harmony knows three."""
    with pytest.raises(MalformedRequest):
        HARMONY.render({"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "none"})


def test_another_date_is_told_apart_from_other_differences() -> None:
    """The advice names both dates; equal dates give none."""
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    today, tomorrow = HARMONY, Harmony(SPECIAL, lambda: "2026-01-03")
    ours, theirs = _encoded(today.render(chat)), _encoded(tomorrow.render(chat))
    advice = today.advice(ours, theirs)
    assert "`Current date: 2026-01-03`" in advice and DATE in advice and "VLLM_SYSTEM_START_DATE" in advice
    assert today.advice(ours, ours) == today.advice(ours, []) == today.advice(ours, [1, 2]) == ""


def test_a_tool_whose_parameters_are_no_schema_is_not_read_by_the_front_end_in_rust() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": "x"}}
    conversion = VllmRustChat(HARMONY)
    with pytest.raises(Unrenderable):
        conversion.template.render({"messages": [{"role": "user", "content": "x"}], "tools": [tool]})
