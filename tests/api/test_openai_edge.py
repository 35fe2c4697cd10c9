"""What a request becomes at the edge."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from router.api.openai_edge import OpenAiEdge
from router.config.schema import Edge, Limits
from router.fleet.fleet import Fleet
from router.observe.metrics import Metrics
from router.prompt.earlier import EarlierTurns
from router.types import Endpoint, Pod, PodSpeed

POD = Pod(id="a", url="http://a", engine="vllm", speed=PodSpeed(1, 1, 0), models=("m",))


@pytest.fixture
def edge() -> OpenAiEdge:
    fleet = Fleet()
    fleet.sync([POD])
    return OpenAiEdge(cast(Any, None), fleet, Metrics(), Edge(), Limits(), frozenset(), EarlierTurns(seed=1))


def asked(edge: OpenAiEdge, **fields: Any) -> tuple[bytes, Any]:
    """The body that goes on, and how it is known to go on, when it comes for the second time."""
    messages = [{"role": "user", "content": text} for text in "abc"]
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    for _ in range(2):
        request = edge.inference(Endpoint.CHAT, {}, body, "r")
    return request.body, request.turns


def test_what_goes_on_is_remembered_by_the_body_that_came(edge: OpenAiEdge) -> None:
    """But for a body that is changed on its way, places in what came mean nothing."""
    body, turns = asked(edge)
    assert turns.mark is not None
    assert body[turns.mark.end :].startswith(b', {"role": "user", "content": "c"}')
    body, turns = asked(edge, kv_transfer_params={"remote": 1})
    assert b"kv_transfer_params" not in body
    assert turns is None


def test_a_prompt_of_more_than_messages_goes_on_from_nothing(edge: OpenAiEdge) -> None:
    """Tools and the like change what a template says in front."""
    assert asked(edge, tools=[{"type": "function", "function": {"name": "f"}}])[1] is None
    assert asked(edge, add_special_tokens=True)[1] is None
