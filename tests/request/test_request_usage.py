"""What a request used, by how it ended."""

from __future__ import annotations

import pytest

from router.observe.receipts import Failure, Outcome
from router.phases import Phases
from router.policy.decide import decide
from router.request.context import RequestContext
from router.request.endings import usage_of
from router.request.inbound import Inbound
from router.request.response_reader import TokenCountingReader
from router.types import Endpoint, InferenceRequest
from tests.policy.scenes import POLICIES, pod, ready, scene

REPORT = b'data: {"choices":[],"usage":{"prompt_tokens":30,"completion_tokens":5,"total_tokens":35}}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


def ended(*pieces: bytes, status: int = 200, tries: int = 1, failures: int = 0) -> RequestContext:
    """A stream that ended after these pieces."""
    request = InferenceRequest(id="r", endpoint=Endpoint.CHAT, model="m", body=b"x" * 400, stream=True, tenant="t")
    context = RequestContext(request, Inbound("r", "POST", b"/", []), Phases(0.0), reader=TokenCountingReader())
    context.candidate = decide(scene(*ready(pod("a"))), POLICIES["least_load"]).candidates[0] if tries else None
    context.status, context.tries = status, tries
    context.failures = (Failure("a", "connect_failed"),) * failures
    for piece in pieces:
        context.reader.feed(piece)
    return context


def used(context: RequestContext) -> tuple[int, int, tuple[str, ...]]:
    """Prompt tokens, output tokens and estimated fields."""
    reader = context.reader
    outcome = Outcome(
        id="r",
        at_s=1.0,
        model="m",
        endpoint="x",
        result="ok",
        served=context.candidate,
        output_tokens=reader.output_tokens,
        cached_tokens=4 if reader.output_tokens else None,
    )
    found = usage_of(context, outcome)
    assert found.prompt_tokens == found.cached_tokens + found.computed_tokens
    return found.prompt_tokens, found.output_tokens, found.estimated


def test_the_engines_numbers_are_used() -> None:
    assert used(ended(TOKEN, TOKEN, REPORT)) == (30, 5, ())


def test_without_them_the_prompt_is_estimated_and_events_are_counted() -> None:
    """Also where several come in one piece. An event without text is no token."""
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    estimated = ("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens")
    assert used(ended(role, TOKEN, TOKEN + TOKEN)) == (100, 3, estimated)


@pytest.mark.parametrize(
    "context",
    [ended(status=400), ended(status=0, tries=0), ended(status=0, tries=1, failures=1)],
    ids=["refused by the pod", "never sent", "not received"],
)
def test_a_request_that_no_pod_computed_used_nothing(context: RequestContext) -> None:
    assert used(context) == (0, 0, ())


def test_a_stream_that_its_client_left_before_the_first_token_has_an_estimated_prompt() -> None:
    """The pod may have computed it."""
    assert used(ended(status=0))[:2] == (100, 0)
