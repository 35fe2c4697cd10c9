"""Chats of agents that grow: only their new messages are rendered, with the result of rendering the whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.engine_catalog import ENGINES
from router.errors import MalformedRequest
from router.prompt.fingerprint import Fingerprinter
from router.prompt.incremental.reader import MIN_BYTES
from router.prompt.incremental.short_chats import can_continue, common_length, context_of
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from router.request.parse import PARSERS
from router.types import Endpoint, Generation, InferenceRequest
from tests.kit import scenes

BLOCK = 16
MODEL = Generation(model="m", block_size_tokens=BLOCK)
THINKING = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}<｜begin▁sys｜>{{ tools | tojson }}<｜end▁sys｜>{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}<｜Assistant｜>
{%- if m.reasoning_content and loop.index0 > ns.last -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}
{{ m.content or '' }}{%- for call in m.tool_calls or [] -%}{{ call.function | tojson }}{%- endfor -%}
{%- elif m.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' -%}<｜tool▁outputs▁begin｜>{%- endif -%}{{ m.content }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}<｜tool▁outputs▁end｜>{%- endif -%}
{%- else -%}<｜User｜>{{ m.role }}{{ m.content }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<｜Assistant｜><think>{%- endif -%}"""
TOOLS_LAST = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if loop.index0 == ns.last and tools -%}<｜begin▁sys｜>{{ tools | tojson }}<｜end▁sys｜>{%- endif -%}
<｜User｜>{{ m.role }}{{ m.content }}{{ m.tool_calls or '' }}
{%- endfor -%}<｜Assistant｜>"""
NUMBERED = "{% for m in messages %}<｜User｜>{{ loop.index }}{{ m.content }}{% endfor %}<｜Assistant｜>"
CONVERSIONS = ENGINES["vllm"].conversions
APIS = {"chat": Endpoint.CHAT, "messages": Endpoint.MESSAGES, "responses": Endpoint.RESPONSES}
Turn = tuple[str, int]
TURNS = st.lists(
    st.tuples(
        st.sampled_from(("ask", "step", "step", "step", "two", "silent", "remind", "system")), st.integers(0, 99)
    ),
    min_size=6,
    max_size=28,
)


def text(number: int, words: int = 40) -> str:
    return f"{number} " + "word " * (words + number % 7)


def turns_of_chat(turns: list[Turn]) -> Iterator[list[dict[str, Any]]]:
    """The messages that each turn adds to a chat."""
    for at, (kind, number) in enumerate(turns):
        if kind in ("ask", "remind", "system"):
            yield [{"role": "system" if kind == "system" else "user", "content": text(number)}]
            continue
        ids = [f"c{at}-{i}" for i in range(2 if kind == "two" else 1)]
        calls = [{"id": i, "type": "function", "function": {"name": "f0", "arguments": '{"x": 1}'}} for i in ids]
        step: dict[str, Any] = {"role": "assistant", "content": text(number), "tool_calls": calls}
        if kind == "silent":
            step["content"] = ""
        if number % 3:
            step["reasoning_content"] = text(number, 9)
        yield [step, *[{"role": "tool", "tool_call_id": i, "content": text(number)} for i in ids]]


def turns_of_messages(turns: list[Turn]) -> Iterator[list[dict[str, Any]]]:
    """The same in Anthropic's API, where the client marks the last message for the cache."""
    for added in turns_of_chat(turns):
        found: list[dict[str, Any]] = []
        results: list[dict[str, Any]] = []
        for message in added:
            if message["role"] == "tool":
                content = [{"type": "text", "text": message["content"]}]
                results.append({"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content})
            elif message["role"] == "assistant":
                blocks = [{"type": "text", "text": message["content"]}]
                if "reasoning_content" in message:
                    blocks.insert(0, {"type": "thinking", "thinking": message["reasoning_content"]})
                calls = message["tool_calls"]
                used = [{"type": "tool_use", "id": call["id"], "name": "f0", "input": {"x": 1}} for call in calls]
                found.append({"role": "assistant", "content": [*blocks, *used]})
            else:
                found.append({"role": message["role"], "content": [{"type": "text", "text": message["content"]}]})
        yield [*found, {"role": "user", "content": results}] if results else found


def turns_of_responses(turns: list[Turn]) -> Iterator[list[dict[str, Any]]]:
    """The same as items of the Responses API."""
    for added in turns_of_chat(turns):
        items: list[dict[str, Any]] = []
        for message in added:
            if message["role"] == "tool":
                ids = message["tool_call_id"]
                items.append({"type": "function_call_output", "call_id": ids, "output": message["content"]})
            elif message["role"] == "assistant":
                if "reasoning_content" in message:
                    thought = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
                    items.append({"type": "reasoning", "id": "r", "summary": [], "content": thought})
                said = [{"type": "output_text", "text": message["content"]}]
                items.append({"type": "message", "role": "assistant", "content": said})
                for call in message["tool_calls"]:
                    made = {"type": "function_call", "call_id": call["id"], "name": "f0"}
                    items.append({**made, "arguments": call["function"]["arguments"]})
            else:
                items.append({"role": message["role"], "content": message["content"]})
        yield items


def bodies_of_chat(turns: list[Turn]) -> Iterator[dict[str, Any]]:
    functions = [{"name": f"f{i}", "parameters": {"type": "object", "properties": {}}} for i in range(3)]
    tools = [{"type": "function", "function": function} for function in functions]
    messages: list[dict[str, Any]] = [{"role": "system", "content": text(0)}, {"role": "user", "content": text(1)}]
    for added in turns_of_chat(turns):
        messages += added
        yield {"model": "m", "messages": messages, "tools": tools}


def bodies_of_messages(turns: list[Turn]) -> Iterator[dict[str, Any]]:
    """With a billing header that changes, and a mark for the cache that moves."""
    tools = [{"name": f"f{i}", "input_schema": {"type": "object", "properties": {}}} for i in range(3)]
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": text(1)}]}]
    for at, added in enumerate(turns_of_messages(turns)):
        messages += added
        *known, last = messages
        marked = json.loads(json.dumps(last))
        marked["content"][-1]["cache_control"] = {"type": "ephemeral"}
        system = [{"type": "text", "text": f"x-anthropic-billing-header: cch={at};"}, {"type": "text", "text": text(0)}]
        yield {"model": "m", "max_tokens": 9, "system": system, "messages": [*known, marked], "tools": tools}


def bodies_of_responses(turns: list[Turn]) -> Iterator[dict[str, Any]]:
    tools = [{"type": "function", "name": f"f{i}", "parameters": {"type": "object"}} for i in range(3)]
    items: list[dict[str, Any]] = [{"role": "user", "content": text(1)}]
    for added in turns_of_responses(turns):
        items += added
        yield {"model": "m", "instructions": text(0), "input": items, "tools": tools}


BODIES: dict[str, Callable[[list[Turn]], Iterator[dict[str, Any]]]] = {
    "chat": bodies_of_chat,
    "messages": bodies_of_messages,
    "responses": bodies_of_responses,
}


def request_of(api: str, body: dict[str, Any]) -> InferenceRequest:
    """As the edge passes it on, as if it were long."""
    encoded = msgspec.json.encode(body)
    prompt = PARSERS[APIS[api]].prompt_fields(PARSERS[APIS[api]].parse(encoded))
    return scenes.request(endpoint=APIS[api], body=encoded.ljust(MIN_BYTES), prompt=prompt)


def read(fingerprinter: Fingerprinter, api: str, body: dict[str, Any]) -> tuple[bool, Any]:
    """(whether only new messages were rendered, the prefix)."""
    pending = fingerprinter.begin(request_of(api, body), CONVERSIONS.get(APIS[api]))
    return pending.prefix is not None, fingerprinter.finish(pending)


@pytest.fixture(scope="module", params=["demo", "thinking", "tools last", "numbered"])
def chat_template(request: pytest.FixtureRequest, deepseek: Tokenizer, template: ChatTemplate) -> ChatTemplate:
    texts = {"thinking": THINKING, "tools last": TOOLS_LAST, "numbered": NUMBERED}
    return ChatTemplate(deepseek, texts[request.param]) if request.param in texts else template


@pytest.fixture(scope="module")
def both(chat_template: ChatTemplate, deepseek: Tokenizer) -> tuple[Fingerprinter, Fingerprinter]:
    """One that continues prompts, one that reads them whole."""
    whole = Fingerprinter(deepseek, chat_template, MODEL, incremental=False)
    return Fingerprinter(deepseek, chat_template, MODEL), whole


@pytest.mark.parametrize("api", APIS)
@given(turns=TURNS, other=TURNS)
def test_a_continued_prompt_is_the_prompt_of_the_whole(
    both: tuple[Fingerprinter, Fingerprinter], api: str, turns: list[Turn], other: list[Turn]
) -> None:
    """Two sessions in turn, with questions, calls, thinking, reminders and late system messages."""
    continued, whole = both
    continued.forget_segments()
    for bodies in zip(BODIES[api](turns), BODIES[api](other), strict=False):
        for body in bodies:
            _, found = read(continued, api, body)
            _, right = read(whole, api, body)
            assert found == right


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("text_of", ["", THINKING], ids=["demo", "thinking"])
def test_the_steps_of_an_agent_are_continued(
    deepseek: Tokenizer, template: ChatTemplate, api: str, text_of: str
) -> None:
    """From the third request on; their prompts differ from earlier ones only behind these."""
    fingerprinter = Fingerprinter(deepseek, ChatTemplate(deepseek, text_of) if text_of else template, MODEL)
    turns: list[Turn] = [("step", number) for number in range(20)]
    continued = [read(fingerprinter, api, body)[0] for body in BODIES[api](turns)]
    assert continued == [False, False, *[True] * 18]


def test_a_question_that_drops_earlier_thinking_is_rendered_whole(deepseek: Tokenizer) -> None:
    """The steps behind it are continued again."""
    fingerprinter = Fingerprinter(deepseek, ChatTemplate(deepseek, THINKING), MODEL)
    turns: list[Turn] = [*[("step", 1)] * 6, ("ask", 2), *[("step", 4)] * 3]
    continued = [read(fingerprinter, "chat", body)[0] for body in bodies_of_chat(turns)]
    assert continued == [False, False, True, True, True, True, False, True, True, True]


def test_one_session_holds_one_prefix(deepseek: Tokenizer, template: ChatTemplate) -> None:
    """The prefix of each step replaces that of the step before."""
    fingerprinter = Fingerprinter(deepseek, template, MODEL)
    assert fingerprinter.incremental is not None
    prefixes = []
    for body in bodies_of_chat([("step", number) for number in range(30)]):
        _, found = read(fingerprinter, "chat", body)
        prefixes.append(found)
        fingerprinter.open(request_of("chat", body))  # takes what is stored
    assert len(fingerprinter.incremental.cache) <= 3
    assert fingerprinter.incremental.cache.bytes < 4 * 4 * len(prefixes[-1].tokens) + 20_000


@pytest.mark.parametrize("api", APIS)
def test_a_continued_prompt_can_be_read_slowly(deepseek: Tokenizer, template: ChatTemplate, api: str) -> None:
    """With the conversion of its body, so that samples of the traffic are compared."""
    fingerprinter = Fingerprinter(deepseek, template, MODEL)
    for body in BODIES[api]([("step", number) for number in range(4)]):
        request = request_of(api, body)
        pending = fingerprinter.begin(request, CONVERSIONS.get(APIS[api]))
        served = fingerprinter.finish(pending)
    assert pending.prefix is not None
    found = fingerprinter.read_slowly(request, pending)
    assert found is not None and found[1] == served


@pytest.mark.parametrize("field", ["tools", "chat_template_kwargs"])
def test_another_field_makes_another_chat(deepseek: Tokenizer, template: ChatTemplate, field: str) -> None:
    """Its prefix is never that of a chat with the same messages."""
    fingerprinter = Fingerprinter(deepseek, template, MODEL)
    bodies = list(bodies_of_chat([("step", number) for number in range(5)]))
    for body in bodies:
        read(fingerprinter, "chat", body)
    changed = {"tools": bodies[-1]["tools"][:1], "chat_template_kwargs": {"enable_thinking": True}}
    is_continued, found = read(fingerprinter, "chat", {**bodies[-1], field: changed[field]})
    _, right = read(
        Fingerprinter(deepseek, template, MODEL, incremental=False), "chat", {**bodies[-1], field: changed[field]}
    )
    assert not is_continued and found.tokens == right.tokens


def test_another_salt_makes_another_chat(deepseek: Tokenizer, template: ChatTemplate) -> None:
    """How soon a prompt is read does not depend on the chats of other salts."""
    fingerprinter = Fingerprinter(deepseek, template, MODEL)
    bodies = list(bodies_of_chat([("step", number) for number in range(5)]))
    for body in bodies:
        read(fingerprinter, "chat", body)
    salted = msgspec.structs.replace(request_of("chat", bodies[-1]), salt="s")
    assert fingerprinter.begin(salted).prefix is None
    assert fingerprinter.begin(request_of("chat", bodies[-1])).prefix is not None


def test_a_message_with_the_fields_of_another_chat_does_not_find_its_prefix(
    deepseek: Tokenizer, template: ChatTemplate
) -> None:
    """Such a chat is refused as any other whose message is no object."""
    fingerprinter = Fingerprinter(deepseek, template, MODEL)
    for body in bodies_of_chat([("ask", number) for number in range(5)]):
        known = request_of("chat", body)
        fingerprinter.fingerprint(known)
    fields = msgspec.Raw(context_of(known.prompt, "messages", (Endpoint.CHAT.value, ""), False))
    messages = [fields, *known.prompt["messages"], known.prompt["messages"][-1]]
    with pytest.raises(MalformedRequest, match="must be an object"):
        fingerprinter.begin(msgspec.structs.replace(known, prompt={"messages": messages}))


@pytest.mark.parametrize(("source", "expected"), [(THINKING, True), (TOOLS_LAST, True), (NUMBERED, False)])
def test_templates_that_number_messages_are_found_out(deepseek: Tokenizer, source: str, expected: bool) -> None:
    """Their short chats would have other numbers."""
    assert can_continue(ChatTemplate(deepseek, source).render) is expected


@pytest.mark.parametrize(
    "hostile",
    [
        {"tools": [{"type": "function", "function": {"name": "f0", "description": "x" * 100_000}}]},
        {"tools": [{"type": "function", "function": {"name": "f0", "description": "x" * 600_000}}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 3_000}]},
        {"messages": [{"role": "user", "content": "x", "more": json.loads("[" * 400 + "]" * 400)}]},
        {"messages": [{"role": "user", "content": "x", f"field{i}": None} for i in range(3_000)]},
        {"messages": [{"role": "user", "content": "x", "cache_control": {}} for i in range(50)]},
    ],
    ids=["long tool", "very long tool", "many parts", "deep", "many messages", "marked"],
)
def test_what_is_long_is_rendered_whole(both: tuple[Fingerprinter, Fingerprinter], hostile: dict[str, Any]) -> None:
    """Nothing of it is rendered twice in the event loop; the prefix is right."""
    continued, whole = both
    continued.forget_segments()
    for number in range(4):
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **hostile}
        body["messages"] = [*body["messages"], *[{"role": "assistant", "content": text(number)}] * (number + 1)]
        assert read(continued, "chat", body)[1] == read(whole, "chat", body)[1]


@given(start=st.text(max_size=300), one=st.text(max_size=9), other=st.text(max_size=9))
def test_the_common_length_is_the_longest(start: str, one: str, other: str) -> None:
    length = common_length(start + one, start + other)
    assert (start + one)[:length] == (start + other)[:length]
    assert (
        (start + one)[: length + 1] != (start + other)[: length + 1]
        or start + one == start + other
        or length
        in (
            len(start + one),
            len(start + other),
        )
    )
