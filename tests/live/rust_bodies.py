"""Hypothesis strategies for odd chats, as JSON: what clients send, what the Rust front end of vLLM reads otherwise than
Python, and some that it refuses."""

from __future__ import annotations

import json
import os
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.live.message_bodies import NAMES, OBJECTS, SCHEMAS, TEXTS, some

SEED = int(os.environ.get("WARMROUTE_SEED", "58"))
_NUMBERS = st.one_of(
    st.sampled_from(
        ["1e-7", "1E5", "0.00001", "1.5e-05", "-0", "-0.0", "1e16", "1.50", "18446744073709551616", "1e400", "5e-324"]
    ),
    st.sampled_from(["123456789.12345679", "9007199254740993.0", "0.30000000000000004", "12345678901234567890123"]),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-(2**66), 2**66).map(str),
)
_ODD = _NUMBERS.map(lambda number: f'{{"x": {number}, "y": [1.0, null, {number}]}}')
ARGUMENTS = st.one_of(
    OBJECTS.map(json.dumps), _ODD, st.sampled_from(['{"b": 1, "a": true}', "[1, 2]", "", " {} ", "{bad", "null"])
)
IDS = st.sampled_from(["c1", "c2"])
CALLS = some({"id": IDS, "type": "function", "function": some({"name": NAMES}, arguments=ARGUMENTS)})
PARTS = st.lists(some({"type": "text", "text": TEXTS}, cache_control=st.just({"type": "ephemeral"})), max_size=3)
CONTENT = TEXTS | PARTS
_FUNCTION = some({"name": NAMES}, description=TEXTS, parameters=SCHEMAS | OBJECTS, strict=st.booleans() | st.none())
TOOLS = st.lists(
    some({"type": "function", "function": _FUNCTION}, defer_loading=st.booleans()),
    min_size=1,
    max_size=3,
    unique_by=lambda tool: tool["function"]["name"],
)
_SAID = st.one_of(
    some({"role": "assistant", "content": CONTENT}, reasoning=TEXTS),
    some(
        {"role": "assistant", "tool_calls": st.lists(CALLS, min_size=1, max_size=2)},
        content=CONTENT | st.none(),
        thinking=TEXTS,
    ),
    some(
        {"role": "assistant", "content": TEXTS},
        reasoning_content=TEXTS,
        name=NAMES,
        tool_calls=st.lists(CALLS, max_size=1),
    ),
)
MESSAGES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    some({"role": "user", "content": CONTENT}, name=NAMES),
    some({"role": "system", "content": CONTENT}, name=NAMES),
    some({"role": "developer", "content": CONTENT}, tools=TOOLS),
    some({"role": "tool", "content": CONTENT, "tool_call_id": IDS}, name=NAMES),
    some({"role": st.sampled_from(["critic", "User", "latest_reminder"]), "content": TEXTS}),
    _SAID,
    _SAID,
)
_USER = some({"role": "user", "content": CONTENT.filter(bool)})
_ENDED = st.tuples(st.lists(MESSAGES, max_size=4), _USER | MESSAGES).map(lambda pair: [*pair[0], pair[1]])
_VARIABLES = st.dictionaries(
    st.sampled_from(["enable_thinking", "reasoning_effort", "x", "add_generation_prompt", "documents"]),
    st.booleans() | st.none() | st.sampled_from(["low", "auto"]) | OBJECTS,
    max_size=2,
)
CHATS = some(
    {"messages": _ENDED},
    tools=TOOLS,
    add_generation_prompt=st.booleans(),
    continue_final_message=st.sampled_from([False, False, True]),
    chat_template_kwargs=_VARIABLES,
    reasoning_effort=st.sampled_from(["none", "low", "high"]),
    add_special_tokens=st.booleans(),
    tool_choice=st.sampled_from(["auto", "none"]),
)


def random_chats(count: int) -> list[dict[str, Any]]:
    """As many odd chats: the same for each seed."""
    made: list[dict[str, Any]] = []

    @seed(SEED)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(CHATS)
    def keep(body: dict[str, Any]) -> None:
        made.append(body)

    keep()
    return made
