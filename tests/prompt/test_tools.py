"""Tools and tool calls in the order in which engines write them."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from router.errors import MalformedRequest
from router.prompt.conversation import developer_tools, normal_tool_call, normal_tools


def order(value: Any) -> str:
    return json.dumps(value)


def test_a_tool_is_written_with_known_fields_in_a_fixed_order_and_null_where_absent() -> None:
    """The schema of its parameters keeps the client's order; fields unknown to vLLM are dropped."""
    tool = {
        "function": {"parameters": {"z": 1, "a": 2}, "strict": None, "name": "f", "x": 0},
        "cache_control": {},
        "type": "function",
    }
    expected = {
        "type": "function",
        "function": {"name": "f", "description": None, "parameters": {"z": 1, "a": 2}},
    }
    assert order(normal_tools([tool])) == order([expected])


def test_optional_fields_of_a_tool_are_written_only_when_set() -> None:
    """`defer_loading` is copied to the function, unless that has its own."""
    tools: Any = normal_tools(
        [
            {"function": {"name": "f", "strict": False}, "defer_loading": True},
            {"function": {"name": "g", "defer_loading": False}, "defer_loading": True},
        ]
    )
    assert order(tools[0]["function"]).endswith('"strict": false, "defer_loading": true}')
    assert tools[1]["function"]["defer_loading"] is False
    assert [tool["defer_loading"] for tool in tools] == [True, True]


def test_no_tools_and_an_empty_list_are_the_same() -> None:
    """Engines that refuse the empty list do so themselves."""
    assert normal_tools(None) is None
    assert normal_tools([]) is None


@pytest.mark.parametrize("tools", [{}, "f", 1, [1], [{}], [{"function": "f"}], [{"function": {"name": 1}}]])
def test_an_invalid_tool_is_refused(tools: Any) -> None:
    """The error names the field."""
    with pytest.raises(MalformedRequest) as caught:
        normal_tools(tools)
    assert str(caught.value.param).startswith("tools")


def test_a_call_is_written_in_the_engines_order_with_arguments_as_a_mapping() -> None:
    """Unknown fields follow; the request does not change."""
    call = {
        "index": 0,
        "type": "function",
        "function": {"name": "f", "arguments": '{"z": 1, "a": [2]}'},
        "id": "c1",
    }
    before = copy.deepcopy(call)
    expected = {
        "id": "c1",
        "function": {"arguments": {"z": 1, "a": [2]}, "name": "f"},
        "type": "function",
        "index": 0,
    }
    assert order(normal_tool_call(call, "x")) == order(expected)
    assert call == before


def test_a_developers_tools_are_only_ordered() -> None:
    """Nothing is added or dropped; anything else than a list of tools is left to the engine."""
    tool = {"x": 1, "type": "function", "function": {"y": 2, "strict": True, "name": "f"}}
    expected = {"function": {"name": "f", "strict": True, "y": 2}, "type": "function", "x": 1}
    assert order(developer_tools([tool])) == order([expected])
    for other in (None, "f", [1], [{"type": "function"}], [{"function": "f"}]):
        assert developer_tools(other) == other


@pytest.mark.parametrize("arguments", [None, "", "{", "[1]", "42", "null", [1], 7, "[" * 100_000, "1" * 5000])
def test_arguments_that_are_not_an_object_become_empty(arguments: Any) -> None:
    """A conversation can continue after a model wrote bad JSON."""
    call = normal_tool_call({"function": {"name": "f", "arguments": arguments}}, "x")
    assert call["function"]["arguments"] == {}


@pytest.mark.parametrize("call", [None, 1, {}, {"function": 1}, {"type": "custom", "function": {"name": "f"}}])
def test_only_calls_of_functions_are_accepted(call: Any) -> None:
    """As in the engine."""
    with pytest.raises(MalformedRequest, match="type function") as caught:
        normal_tool_call(call, "messages[3].tool_calls")
    assert caught.value.param == "messages[3].tool_calls"
