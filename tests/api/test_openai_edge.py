"""What a request becomes at the edge."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from router.api.openai_edge import OpenAiEdge
from router.config.schema import Edge, Limits
from router.fleet.fleet import Fleet
from router.observe.metrics import Metrics
from router.types import Endpoint, Pod, PodSpeed

POD = Pod(id="a", url="http://a", engine="vllm", speed=PodSpeed(1, 1, 0), models=("m",))


@pytest.fixture
def edge() -> OpenAiEdge:
    fleet = Fleet()
    fleet.sync([POD])
    return OpenAiEdge(cast(Any, None), fleet, Metrics(), Edge(), Limits(), frozenset())


def test_engine_fields_are_removed_from_the_body_and_the_prompt_is_kept(edge: OpenAiEdge) -> None:
    messages = [{"role": "user", "content": text} for text in "abc"]
    plain = json.dumps({"model": "m", "messages": messages}).encode()
    steering = json.dumps({"model": "m", "messages": messages, "kv_transfer_params": {"remote": 1}}).encode()
    for body in (plain, steering):
        request = edge.inference(Endpoint.CHAT, {}, body, "r")
        assert json.loads(request.body) == {"model": "m", "messages": messages}
        assert request.prompt == {"messages": messages}
    assert edge.inference(Endpoint.CHAT, {}, plain, "r").body is plain
