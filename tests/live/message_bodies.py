"""Hypothesis strategies for bodies of Anthropic's `/v1/messages` that vLLM accepts."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Body = dict[str, Any]

_WORDS = [
    *("", " ", "Hi", "a\nb", "  padded \n", "naïve 東京 🚀", "<think>x</think>y", "</think>", "{{ 7 * 7 }}", "null"),
    *("<|im_end|>\n<|im_start|>system\n", "<tool_response>", "x-anthropic-billing-header: cch=1;", "İx ß \u2028 y"),
    *("x-anthropic-billing-header: a\nb", "<｜Assistant｜>", "Tool result: ", '{"a": "b"}', "e\u0301 don't"),
]
TEXTS = st.one_of(
    st.sampled_from(_WORDS), st.text(max_size=12), st.lists(st.sampled_from(_WORDS), max_size=3).map(" ".join)
)
NAMES = st.sampled_from(["look", "add", "Read_file"])
_LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), TEXTS
)
VALUES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2), max_leaves=4
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=3)


def some(required: dict[str, Any], **optional: Any) -> st.SearchStrategy[Body]:
    fixed = {
        name: value if isinstance(value, st.SearchStrategy) else st.just(value) for name, value in required.items()
    }
    return st.fixed_dictionaries(fixed, optional=optional)


TEXT = some({"type": "text"}, text=TEXTS, cache_control=st.just({"type": "ephemeral"}), citations=st.none())
THINKING = some({"type": "thinking"}, thinking=TEXTS | st.none(), signature=TEXTS)
REDACTED = st.just({"type": "redacted_thinking", "data": "x"})
TOOL_USE = some({"type": "tool_use", "id": st.sampled_from(["toolu_1", "toolu_2"]), "name": NAMES}, input=OBJECTS)
REFERENCE = some({"type": "tool_reference"}, tool_name=NAMES)
_ITEMS = some({"type": "text"}, text=TEXTS) | some({"type": "tool_reference"}, tool_name=NAMES, name=NAMES)
TOOL_RESULT = some(
    {"type": "tool_result"},
    tool_use_id=st.sampled_from(["toolu_1", ""]),
    content=TEXTS | st.lists(_ITEMS | OBJECTS.filter(lambda value: "type" not in value), max_size=3) | st.none(),
    is_error=st.booleans(),
)
BLOCKS = st.one_of(TEXT, TEXT, THINKING, REDACTED, TOOL_USE, TOOL_RESULT, REFERENCE)
SCHEMAS: st.SearchStrategy[Body] = st.one_of(
    st.just({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}),
    st.just({"properties": {"b": {"type": "integer"}, "a": {"enum": [1, 2.5, None]}}, "$schema": "x"}),
    st.just({}),
)
TOOLS = some(
    {"name": NAMES, "input_schema": SCHEMAS},
    description=TEXTS | st.none(),
    strict=st.booleans() | st.none(),
    defer_loading=st.booleans(),
    cache_control=st.just({"type": "ephemeral"}),
)
_LOOK = {"type": "tool_reference", "name": "look"}
CHANGES = st.one_of(
    st.just({"type": "tool_removal", "tool": _LOOK}),
    st.just({"type": "tool_addition", "tool": _LOOK}),
    st.builds(lambda tool: {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}}, TOOLS),
)
SYSTEM_MESSAGES = some({"role": "system", "content": TEXTS | st.lists(TEXT | CHANGES, max_size=3)})
SPOKEN = some({"role": st.sampled_from(["user", "assistant"]), "content": TEXTS | st.lists(BLOCKS, max_size=4)})
BODIES = some(
    {
        "messages": st.lists(st.one_of(SPOKEN, SPOKEN, SPOKEN, SYSTEM_MESSAGES), min_size=1, max_size=6),
        "max_tokens": 4096,
    },
    system=TEXTS | st.lists(TEXT, max_size=3) | st.none(),
    tools=st.lists(TOOLS, max_size=3, unique_by=lambda tool: tool["name"]) | st.none(),
    tool_choice=st.sampled_from([{"type": "auto"}, {"type": "none"}, {"type": "any"}, None]),
    thinking=st.sampled_from(
        [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}, None]
    ),
    output_config=st.sampled_from([{"effort": "low"}, {"effort": "max"}, {}, None]),
    chat_template_kwargs=st.sampled_from([{"enable_thinking": False}, {"reasoning_effort": "high"}, {}]),
    metadata=st.just({"user_id": "u"}),
)
