"""Bodies of `/v1/responses` of every kind that vLLM converts, as hypothesis strategies."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from tests.live.message_bodies import NAMES, OBJECTS, SCHEMAS, TEXTS, Body, some

STATUSES = st.sampled_from(["completed", "completed", "incomplete", "in_progress"])
INPUT_PARTS = st.lists(some({"type": "input_text", "text": TEXTS}), min_size=1, max_size=3)
OUTPUT_PARTS = st.lists(some({"type": "output_text", "text": TEXTS}, annotations=st.just([])), min_size=1, max_size=2)
SPOKEN = some(
    {"role": st.sampled_from(["user", "user", "system", "developer"]), "content": TEXTS | INPUT_PARTS},
    type=st.just("message"),
)
EASY_ASSISTANT = some({"role": "assistant", "content": TEXTS}, type=st.just("message"))
ASSISTANT = some(
    {"type": "message", "role": "assistant", "content": OUTPUT_PARTS}, id=st.just("msg_1"), status=STATUSES
)
REASONING = some(
    {
        "type": "reasoning",
        "summary": st.lists(some({"type": "summary_text", "text": TEXTS}), max_size=2),
    },
    id=st.just("rs_1"),
    content=st.lists(some({"type": "reasoning_text", "text": TEXTS}), max_size=2),
    status=STATUSES,
)
ARGUMENTS = OBJECTS.map(lambda value: json.dumps(value, ensure_ascii=False)) | st.sampled_from(["{", "", "[1]", "null"])
CALL_IDS = st.sampled_from(["call_1", "call_2"])
CALL = some(
    {"type": "function_call", "call_id": CALL_IDS, "name": NAMES, "arguments": ARGUMENTS},
    id=st.just("fc_1"),
    namespace=st.just("files"),
    status=STATUSES,
)
CUSTOM_CALL = some({"type": "custom_tool_call", "call_id": CALL_IDS, "name": NAMES, "input": TEXTS}, id=st.just("ct_1"))
OUTPUT = some(
    {
        "type": st.sampled_from(["function_call_output", "custom_tool_call_output"]),
        "call_id": CALL_IDS,
        "output": TEXTS | INPUT_PARTS,
    },
    id=st.just("fco_1"),
)
ITEMS = st.one_of(SPOKEN, SPOKEN, EASY_ASSISTANT, ASSISTANT, REASONING, CALL, CUSTOM_CALL, OUTPUT)
FUNCTION = some(
    {"type": "function", "name": NAMES, "parameters": SCHEMAS},
    description=TEXTS | st.none(),
    strict=st.booleans() | st.none(),
    defer_loading=st.booleans(),
)
CUSTOM = some({"type": "custom", "name": st.just("shell")}, description=TEXTS)
SPACE = some(
    {"type": "namespace", "name": "files", "description": TEXTS, "tools": st.lists(FUNCTION | CUSTOM, max_size=2)}
)
TOOLS = st.one_of(FUNCTION, FUNCTION, CUSTOM, SPACE, st.just({"type": "web_search_preview"}))
BODIES: st.SearchStrategy[Body] = some(
    {"input": TEXTS | st.lists(ITEMS, min_size=1, max_size=7)},
    instructions=TEXTS | st.none(),
    tools=st.lists(TOOLS, max_size=3),
    tool_choice=st.sampled_from(["auto", "none"]),
    reasoning=st.sampled_from([{"effort": "low"}, {"effort": "none"}, {"summary": "auto"}, {}, None]),
    chat_template_kwargs=st.sampled_from([{"enable_thinking": False}, {"reasoning_effort": "high"}, {}]),
    text=st.just({"format": {"type": "text"}}),
    store=st.just(False),
    prompt_cache_key=st.just("k"),
    metadata=st.just({"user_id": "u"}),
)
