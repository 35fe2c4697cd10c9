"""What a request used, by how it ended."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from router.observe.ended import Failure
from router.phases import Phases
from router.policy.decide import decide
from router.request.context import RequestContext, counted_output_tokens, counted_prompt_tokens
from router.request.endings import usage_of
from router.request.inbound import Head
from router.request.response_reader import TokenCountingReader
from tests.kit import scenes
from tests.kit.scenes import POLICIES, pod, ready, scene

REPORT = (
    b'data: {"choices":[],"usage":{"prompt_tokens":30,"completion_tokens":5,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


def ended(*pieces: bytes, status: int = 200, tries: int = 1, failures: int = 0) -> RequestContext:
    """A stream that ended after these pieces."""
    request = scenes.request(body=b"x" * 400, stream=True, tenant="t")
    context = RequestContext(request, Head("r", "POST", b"/", []), Phases(0.0), reader=TokenCountingReader())
    context.candidate = decide(scene(*ready(pod("a"))), POLICIES["least_load"]).candidates[0] if tries else None
    context.status, context.tries, context.result = status, tries, "ok"
    context.failures = (Failure("a", "connect_failed"),) * failures
    for piece in pieces:
        context.reader.feed(piece)
    return context


def used(context: RequestContext) -> tuple[int, int, tuple[str, ...]]:
    """Prompt tokens, output tokens and estimated fields."""
    found = usage_of(context, context.reader.output_tokens)
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


HUGE = b'data: {"choices":[],"usage":{"prompt_tokens":900000000,"completion_tokens":999999999}}\n\n'


def counted(context: RequestContext, *, elapsed_s: float = 0.1, **limits: int) -> int | None:
    context.request = replace(context.request, **limits)
    return counted_output_tokens(context, elapsed_s)


def test_a_pod_cannot_bill_more_than_was_asked_of_it() -> None:
    """Each choice may have as many tokens."""
    assert counted(ended(TOKEN, HUGE), max_output_tokens=4) == 4
    assert counted(ended(TOKEN, HUGE), max_output_tokens=4, choices=3) == 12
    assert counted(ended(TOKEN, REPORT), max_output_tokens=4000) == 5


def test_a_pod_cannot_bill_more_than_it_can_have_sent_and_computed() -> None:
    """A byte each, and those that it does not send, at the pace of the fastest engines."""
    context = ended(TOKEN, HUGE)
    assert counted(context, elapsed_s=0.0) == len(TOKEN) + len(HUGE)
    assert counted(context, elapsed_s=3.0) == len(TOKEN) + len(HUGE) + 6000
    hidden = b'{"choices":[{"message":{"content":"a"}}],"usage":{"prompt_tokens":3,"completion_tokens":5000}}'
    assert counted(ended(hidden), elapsed_s=20.0) == 5000


def test_a_prompt_that_the_router_has_read_is_not_longer_because_a_pod_says_so() -> None:
    """Then its own number counts; templates of engines may add some tokens to it."""
    context = ended(TOKEN, HUGE)
    context.prompt = scene(*ready(pod("a"))).prompt
    assert context.prompt is not None and counted_prompt_tokens(context) == context.prompt_tokens
    context.reader = TokenCountingReader()
    context.reader.feed(b'data: {"usage":{"prompt_tokens":%d}}\n\n' % (context.prompt_tokens + 9))
    assert counted_prompt_tokens(context) == context.prompt_tokens + 9


def test_a_prompt_that_the_router_cannot_read_has_an_upper_limit() -> None:
    assert counted_prompt_tokens(ended(TOKEN, HUGE)) == 100
    assert counted_prompt_tokens(ended(TOKEN, REPORT)) == 30
