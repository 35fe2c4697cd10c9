"""Follow-ups of stored responses through all phases: they are sent to the pod that stores what they follow."""

from __future__ import annotations

from time import monotonic
from typing import Any

import pytest
from msgspec.structs import replace

from router.errors import UnknownResponse
from router.index.stored_responses import StoredResponse
from router.request.context import RequestContext
from router.request.response_reader import reader_of
from router.types import Endpoint
from tests.kit.scripted_pods import Asked, Behaviour, Town, town

pytestmark = [pytest.mark.virtual, pytest.mark.anyio]


def storing(response_id: str) -> Behaviour:
    """A pod whose responses have this id."""

    async def behave(asked: Asked) -> None:
        await asked.answer({"id": response_id, "object": "response", "usage": {"input_tokens": 3}})

    return behave


def context_of(pods: Town, **prompt: Any) -> RequestContext:
    """An undecided request."""
    context = pods.context()
    context.request = replace(context.request, endpoint=Endpoint.RESPONSES, prompt={"input": [], **prompt})
    context.reader = reader_of(Endpoint.RESPONSES)
    return context


@pytest.mark.parametrize("name", ["a", "b"])
async def test_a_follow_up_goes_to_the_pod_of_the_response(name: str) -> None:
    """It is the only candidate."""
    async with town(a=storing("resp_a"), b=storing("resp_b")) as pods:
        for stored in ("a", "b"):
            found = StoredResponse(f"resp_{stored}", stored, "m", monotonic())
            pods.responses.stored.learn(found, monotonic())
        for _ in range(4):
            follow_up = context_of(pods, previous_response_id=f"resp_{name}")
            await pods.forward(follow_up)
            assert follow_up.candidate is not None and follow_up.candidate.pod.id == name
            assert follow_up.decision is not None and len(follow_up.decision.candidates) == 1


async def test_a_response_that_is_not_stored_has_no_follow_up() -> None:
    """It would only fill the memory."""
    async with town(a=storing("resp_a"), b=storing("resp_b")) as pods:
        await pods.forward(context_of(pods, store=False))
        with pytest.raises(UnknownResponse):
            await pods.forward(context_of(pods, previous_response_id="resp_a"))
        assert len(pods.responses.stored) == 0
