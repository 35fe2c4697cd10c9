"""The state of a request and its outcome."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace
from xxhash import xxh3_64_hexdigest

from router.decision import Candidate, Cost, Direct, Plan, Pull, RouteDecision, Split
from router.hashing import hash_array, token_array
from router.observe.receipts import receipt
from router.phases import Phases
from router.policy.decide import expected_ttft_ms
from router.request.context import RequestContext, ttft_of_one_pod
from router.request.endings import ended_of
from router.request.inbound import Head, HeaderList
from router.types import PRIOR_OUTPUT_TOKENS, Generation, PromptPrefix
from tests.kit import scenes
from tests.kit.cores import CoreOfPods, pods_at
from tests.kit.scenes import pod

USAGE = b'{"usage": {"prompt_tokens": 50, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 48}}}'


def responded(plan: Plan, handed_over: int | None, body: bytes = b"{}") -> RequestContext:
    """A request whose response reports 48 cached tokens, by one or two pods."""
    request = scenes.request(body=body)
    context = RequestContext(request, Head(id="r", method="POST", target=b"/", headers=[]), Phases(0.0))
    context.candidate = Candidate(plan, Cost.of((), 1.0), 7)
    context.decision = RouteDecision("by hand", "1", (context.candidate,))
    context.handed_over_cached_tokens = handed_over
    context.reader.feed(USAGE)
    return context


@pytest.mark.parametrize(
    ("plan", "handed_over", "cached"),
    [
        (Direct(pod("d")), None, 48),
        (Direct(pod("d")), 16, 48),  # of a split that was tried before
        (Split(pod("p"), pod("d")), 16, 16),
        (Split(pod("p"), pod("d")), None, None),
    ],
)
def test_cached_tokens_are_those_of_the_pod_that_computed_the_prompt(
    plan: Plan, handed_over: int | None, cached: int | None
) -> None:
    """A decode pod counts handed-over tokens, which are no cache hits."""
    context = responded(plan, handed_over)
    assert ended_of(context, "settle", None, 0.0, 0.0).cached_tokens == cached


@pytest.mark.parametrize(
    ("stream", "pieces", "tokens"),
    [
        (False, [USAGE], 4),
        (True, [b'data: {"choices": []}\n\n'] * 9 + [b"data: " + USAGE + b"\n\n"], 4),
        (True, [b'data: {"choices": []}\n\n'] * 9, 9),
        (False, [b'{"choices": []', b"}"], PRIOR_OUTPUT_TOKENS),
    ],
    ids=["reported", "reported in a stream", "counted in a stream", "unknown"],
)
def test_the_length_of_an_answer_is_reported_or_counted(stream: bool, pieces: list[bytes], tokens: int) -> None:
    """An engine reports it in a stream only if the client asks for that. Later answers are expected to be as long."""
    core = CoreOfPods(pods_at({"a": "http://a"}))
    for _ in range(1000):
        context = core.context(stream=stream)
        context.result = "ok"
        for piece in pieces:
            context.reader.feed(piece)
        core.core.endings.end(context)
    assert core.output_lengths.expected_tokens(context.request) == pytest.approx(tokens, abs=2)


def test_a_receipt_names_both_pods() -> None:
    """The one that responded, and the prefill pod of a split."""
    contexts = [responded(plan, 16) for plan in (Split(pod("p"), pod("d")), Direct(pod("d")))]
    split, direct = (receipt(ended_of(context, "settle", None, 0.0, 0.0)) for context in contexts)
    assert (split.pod, split.prefill_pod, split.predicted_cached_tokens) == ("d", "p", 7)
    assert (direct.pod, direct.prefill_pod) == ("d", "")


def test_the_length_of_an_unread_prompt_is_estimated() -> None:
    """Four bytes for each token."""
    assert responded(Direct(pod("d")), None, b"x" * 400).prompt_tokens == 100


def test_a_body_is_checked_once_for_splits() -> None:
    """Bodies may be long, and there may be many pairs."""
    context = responded(Split(pod("p"), pod("d")), None, b'{"messages": [], "n": 2}')
    why = context.split_refusal()
    assert "Several choices" in why
    assert context.split_refusal() is why
    assert responded(Direct(pod("d")), None, b'{"messages": []}').split_refusal() == ""


def test_several_prompts_are_not_split() -> None:
    """Their number is that of the request, which was counted when it was read."""
    context = responded(Direct(pod("d")), None, b'{"messages": []}')
    context.request = replace(context.request, prompts=2)
    assert "Several prompts" in context.split_refusal()


@pytest.mark.parametrize("read", [True, False])
def test_a_dropped_prompt_keeps_its_length_and_hashes(read: bool) -> None:
    """Only body and tokens are freed."""
    context = responded(Direct(pod("d")), None, b"x" * 400)
    context.prompt = PromptPrefix(Generation(model="m"), token_array(range(40)), hash_array([1, 2])) if read else None
    tokens, blocks = context.prompt_tokens, context.prompt and context.prompt.hashes
    context.drop_prompt()
    assert (context.prompt_tokens, context.prompt and context.prompt.hashes) == (tokens, blocks)
    assert (context.request.body, context.request.prompt) == (b"", {})


def streamed() -> RequestContext:
    """A streamed request that one pod served at its first attempt."""
    context = responded(Direct(pod("d")), None)
    context.request = replace(context.request, stream=True)
    context.prompt = PromptPrefix(Generation(model="m"), token_array(range(40)), hash_array([1, 2]))
    context.tries, context.first_token_s = 1, 0.25
    return context


def test_a_first_token_of_one_pod_is_compared_with_its_expected_time() -> None:
    """In milliseconds."""
    context = streamed()
    assert context.candidate is not None
    assert ttft_of_one_pod(context) == ("d", expected_ttft_ms(context.candidate.cost), 250.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda context: setattr(context, "request", replace(context.request, stream=False)),
        lambda context: setattr(context, "tries", 2),
        lambda context: setattr(context, "prompt", None),
        lambda context: setattr(context, "first_token_s", None),
        lambda context: setattr(context, "candidate", None),
        lambda context: setattr(context, "candidate", Candidate(Split(pod("p"), pod("d")), Cost.of((), 1.0), 7)),
        lambda context: setattr(context, "candidate", Candidate(Direct(pod("d"), Pull("h", 16)), Cost.of((), 1.0), 7)),
    ],
    ids=["unstreamed", "retried", "unread prompt", "no token", "no candidate", "split", "pull"],
)
def test_no_single_pod_is_responsible_for_other_first_tokens(change: Callable[[RequestContext], None]) -> None:
    """Where several pods took part, or the expected time is unknown."""
    context = streamed()
    change(context)
    assert ttft_of_one_pod(context) is None


@pytest.mark.parametrize(
    ("tenant", "headers", "client"),
    [
        ("acme", [(b"authorization", b"Bearer 1")], "acme"),
        ("", [(b"authorization", b"Bearer 1")], f"10.0.0.1 {xxh3_64_hexdigest(b'Bearer 1')}"),
        ("", [(b"x-api-key", b"k2")], f"10.0.0.1 {xxh3_64_hexdigest(b'k2')}"),
        ("", [], f"10.0.0.1 {xxh3_64_hexdigest(b'')}"),
    ],
)
def test_clients_behind_one_gateway_differ_by_tenant_or_credentials(
    tenant: str, headers: HeaderList, client: str
) -> None:
    """Only a digest of the credentials is kept, which may be logged."""
    request = scenes.request(body=b"", tenant=tenant)
    head = Head(id="r", method="POST", target=b"/", headers=headers, peer="10.0.0.1")
    assert RequestContext(request, head, Phases(0.0)).client == client
