"""However a request ends, its tenant's quota has counted what the pods computed, as far as the router can know it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from router.admission.quotas import Hold, Quota
from router.admission.tenant import Tenant
from router.errors import UpstreamTimeout
from router.types import PRIOR_OUTPUT_TOKENS, Links, PodSpeed
from tests.kit.memory_front import CHAT, TOKEN, MemoryExchange, MemoryRouter

LIMIT = 1_000_000
LIMITS = (
    Quota(
        requests_per_minute=LIMIT,
        uncached_prompt_tokens_per_minute=LIMIT,
        output_tokens_per_minute=LIMIT,
        concurrent_requests=LIMIT,
    ),
)
TENANT = Tenant(name="t", quotas=LIMITS)
MESSAGES, RESPONSES, COMPLETIONS = "/v1/messages", "/v1/responses", "/v1/completions"
STEP_MS = 8.0
START = b'event: message_start\ndata: {"message":{"usage":{"input_tokens":50,"output_tokens":0}}}\n\n'
TEXT = b'event: content_block_delta\ndata: {"delta":{"type":"text_delta","text":"a"}}\n\n'


class Billed(MemoryRouter):
    """A core in memory whose tenant has quotas, and pods that decode a step in `STEP_MS`."""

    def __init__(self) -> None:
        super().__init__()
        self.known.fleet.calibrate(dict.fromkeys("abc", PodSpeed(1.0, 0.01, 0.0, STEP_MS)), Links())

    def post(self, path: str = CHAT, tenant: Tenant = TENANT, **fields: Any) -> MemoryExchange:
        name = "input" if path == RESPONSES else "messages"
        body = {"model": "m", name: [{"role": "user", "content": "hi"}], **fields}
        return self.front.receive(path, json.dumps(body).encode(), tenant)

    def complete(self, **fields: Any) -> MemoryExchange:
        return self.front.receive(COMPLETIONS, json.dumps({"model": "m", **fields}).encode(), TENANT)

    def fetch(self, number: int, method: str = "GET") -> MemoryExchange:
        """Fetch or cancel a stored response."""
        stored = self.known.state.stored.find(f"resp_{number}", self.now_s)
        assert stored is not None
        tenant = Tenant(name=stored.owner, quotas=LIMITS)
        return self.front.receive(f"{RESPONSES}/resp_{number}", b"", tenant, stored, method=method)

    def used(self, kind: str = "output", tenant: Tenant = TENANT) -> int:
        """What is counted now: of `requests`, `prompt` or `output` tokens, or `concurrent` requests."""
        found = self.known.quotas.begin(tenant.name, tenant.quotas, "m", "", self.now_s)
        assert found.applied is not None
        if isinstance(found, Hold):
            self.known.quotas.end(found, 0, 0, self.now_s)
            for meter in found.applied.requests:
                meter.own.take_back(found.second, 1)
        (meter,) = getattr(found.applied, kind)
        return int(meter.own.at(int(self.now_s)))


def stream(served: MemoryExchange, pieces: Sequence[bytes]) -> None:
    served.head()
    for piece in pieces:
        served.piece(piece)


@pytest.mark.parametrize(("path", "pieces"), [(CHAT, [TOKEN] * 629), (MESSAGES, [START, *[TEXT] * 629])])
def test_a_stream_that_its_client_leaves_costs_what_it_has_received(path: str, pieces: list[bytes]) -> None:
    """Also where the usage at its begin has no output yet, and several events come in one piece."""
    billed = Billed()
    stream(served := billed.post(path, stream=True), [b"".join(pieces[:100]), *pieces[100:]])
    served.leave()
    assert billed.used() == 629


def test_a_complete_stream_without_usage_costs_its_tokens() -> None:
    billed = Billed()
    stream(served := billed.post(stream=True), [TOKEN] * 40)
    served.end()
    assert billed.used() == 40


@pytest.mark.parametrize("has_head", [False, True], ids=["before its head", "after its head"])
def test_an_unstreamed_answer_that_its_client_leaves_costs_the_time_on_the_pod(has_head: bool) -> None:
    """At the pace of the pod: a step for each token."""
    billed = Billed()
    served = billed.post()
    if has_head:
        served.head(is_stream=False)
    billed.now_s += 40.0
    served.leave()
    assert billed.used() == pytest.approx(40_000 / STEP_MS, rel=0.01)


def test_no_answer_costs_more_than_its_client_allows() -> None:
    billed = Billed()
    served = billed.post(max_tokens=300)
    billed.now_s += 40.0
    served.leave()
    assert billed.used() == 300


def test_an_answer_that_never_came_keeps_its_expected_cost() -> None:
    """The pod may have computed all the time, or nothing."""
    billed = Billed()
    served = billed.post(max_tokens=300)
    before = billed.used("output")
    for _ in range(3):
        if not served.is_over:
            served.fail(UpstreamTimeout("late", pod=served.asked[-1]))
    assert served.status == 504 and billed.used("output") == before > 0


def test_a_prompt_above_the_limit_counts_as_a_request() -> None:
    """It has been read, and can be sent again and again."""
    quota = Quota(requests_per_minute=3, uncached_prompt_tokens_per_minute=10)
    billed, tenant = Billed(), Tenant(name="long", quotas=(quota,))
    assert [billed.post(tenant=tenant).status for _ in range(5)] == [429] * 5
    assert billed.used("requests", tenant) == len(billed.read) == 3


@pytest.mark.parametrize("choices", [1, 10])
def test_short_answers_make_no_place_for_a_burst_of_long_ones(choices: int) -> None:
    """In parallel, or in one request."""
    billed, tenant = Billed(), Tenant(name="burst", quotas=(Quota(output_tokens_per_minute=2000),))
    for _ in range(1000):
        billed.known.output_lengths.answered("m", 1, "burst")
    admitted = sum(billed.post(tenant=tenant, n=choices).status != 429 for _ in range(100))
    assert admitted <= max(2000 // PRIOR_OUTPUT_TOKENS // choices, 1)


@pytest.mark.parametrize(
    "fields", [{"prompt": ["a"] * 10}, {"prompt": [[1]] * 5, "n": 2}, {"prompt": "a", "best_of": 10}]
)
def test_each_answer_of_a_batch_costs_its_tokens(fields: dict[str, Any]) -> None:
    """When the request is admitted, and when its client leaves before an unstreamed response."""
    billed = Billed()
    served = billed.complete(max_tokens=100, **fields)
    assert billed.used() == 10 * 100
    billed.now_s += 40.0
    served.leave()
    assert billed.used() == 10 * 100


def test_a_batch_teaches_the_length_of_one_answer() -> None:
    """Else the next one would be charged for the square of its answers."""
    billed = Billed()
    for _ in range(100):
        served = billed.complete(prompt=["a"] * 10)
        served.head(is_stream=False)
        served.piece(
            b'{"choices":[],"padding":"%b","usage":{"prompt_tokens":10,"completion_tokens":3000}}' % (b" " * 3000)
        )
        served.end()
    assert served.context is not None
    assert billed.known.output_lengths.expected_tokens(served.context.request, TENANT.name) <= 310


def test_all_prompts_of_a_batch_cost_their_tokens() -> None:
    """Also where the router reads the first one, which is short."""
    billed = Billed()
    billed.complete(prompt=["a", *["b" * 4000] * 10], max_tokens=1)
    assert billed.used("prompt") >= 10_000


def test_cached_prompt_tokens_cost_nothing() -> None:
    """What the pod reports corrects what was expected."""
    billed = Billed()
    served = billed.post()
    assert billed.used("prompt") == 50
    served.head(is_stream=False)
    details = b'"prompt_tokens_details":{"cached_tokens":48}'
    served.piece(b'{"choices":[{}],"usage":{"prompt_tokens":50,"completion_tokens":2,%b}}' % details)
    served.end()
    assert (billed.used("prompt"), billed.used("output")) == (2, 2)


@pytest.mark.parametrize("preferred", [200, -1])
def test_a_second_limit_hides_no_tokens(preferred: int) -> None:
    """llama.cpp prefers `n_predict`."""
    billed = Billed()
    served = billed.post(max_tokens=1, n_predict=preferred)
    billed.now_s += 1.0
    served.head(is_stream=False)
    served.piece(b'{"choices":[{"message":{"content":"a"}}],"usage":{"prompt_tokens":50,"completion_tokens":200}}')
    served.end()
    assert billed.used() == 200


HELD_BACK = b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":null}]}\n\n'
HELD_BACK_TEXT = b'data: {"choices":[{"index":0,"text":"","finish_reason":null}]}\n\n'


@pytest.mark.parametrize("event", [HELD_BACK, HELD_BACK_TEXT])
def test_tokens_that_an_engine_holds_back_cost_as_others(event: bytes) -> None:
    """A long stop string makes vLLM send many tokens in one event, after empty ones."""
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    billed = Billed()
    stream(served := billed.post(stream=True), [role, *[event] * 39, TOKEN])
    served.leave()
    assert billed.used() == 40


def response(served: MemoryExchange, tokens: int | None, number: int = 1) -> None:
    """The pod's answer: of a response that is queued, or complete with its usage."""
    usage = None if tokens is None else {"input_tokens": 50, "output_tokens": tokens}
    body = {"id": f"resp_{number}", "object": "response", "background": True, "usage": usage}
    served.head(is_stream=False)
    served.piece(json.dumps(body).encode())
    served.end()


def fetch(billed: Billed, tokens: int | None, number: int = 1, method: str = "GET") -> None:
    """The same for one that is fetched or cancelled."""
    response(billed.fetch(number, method), tokens, number)


def test_an_answer_in_the_background_costs_what_is_expected_of_it() -> None:
    """From its first answer on: its client may never fetch it. What is fetched costs nothing more."""
    billed = Billed()
    response(billed.post(RESPONSES, background=True, max_output_tokens=30_000), None)
    expected = billed.used()
    assert expected > 0
    for tokens in (None, 20_000):
        fetch(billed, tokens)
    assert (billed.used(), billed.used("prompt"), billed.used("concurrent")) == (expected, 50, 0)


def test_a_refused_body_counts_as_a_request() -> None:
    """So a tenant cannot have any number of them parsed."""
    billed = Billed()
    for body in (b"{", b'{"model": "unknown", "messages": [{}]}'):
        billed.front.receive(CHAT, body, TENANT)
    assert billed.used("requests") == 2


def test_fetching_costs_no_expected_tokens() -> None:
    """It is a request, but no prompt and no answer."""
    billed = Billed()
    response(billed.post(RESPONSES, background=True), None)
    before = billed.used()
    served = billed.fetch(1)
    assert billed.used() == before
    response(served, None)
    assert billed.used("requests") == 2
