"""Tests of every dialect in the catalog."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.engine_catalog import DIALECTS
from router.engines.handoff.dialect import Dialect, Handoff, Order, split_refusal
from router.engines.steering import HANDOFF_FIELDS
from router.types import Endpoint
from tests.engines.handoff.pairs import CHAT, COMPLETIONS, answer, chat, completion, pair, read
from tests.kit.scenes import make_pod

EVERY = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))
ANSWER = answer(
    {"prompt_token_ids": [1, 2], "disaggregated_params": {"ctx_request_id": 9}},
    kv_transfer_params={"first_tok": 123, "remote_port": 5600},
)
OWNED = HANDOFF_FIELDS | {
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "min_tokens",
    "n",
    "return_token_ids",
    "prompt",
    "prompt_token_ids",
    "ignore_eos",
    "stop",
    "stop_token_ids",
}
"""Fields that some dialect writes; the prompt only as tokens."""
PLANTED = {
    "kv_transfer_params": {"remote_host": "evil", "remote_kv_source": {"remote_host": "evil"}},
    "bootstrap_host": "evil",
    "disaggregated_params": {"encoded_opaque_state": "evil"},
}


def legs(dialect: Dialect, endpoint: Endpoint, body: bytes, prefill: str = "http://10.0.0.3:8000") -> list[bytes]:
    """All bodies that a dialect builds for one request."""
    two = pair(prefill)
    handoff = dialect.read_handoff(ANSWER)
    assert handoff is not None
    given = Handoff() if dialect.order is Order.TOGETHER else handoff
    made = [dialect.prefill_body(endpoint, body, two), dialect.decode_body(endpoint, body, two, given)]
    pulled = dialect.pull_body(body, two)
    return made if pulled is None else [*made, pulled]


def requests(dialect: Dialect, **fields: Any) -> list[tuple[Endpoint, bytes]]:
    """The requests that it accepts."""
    both = [(CHAT, chat(**fields)), (COMPLETIONS, completion(**fields))]
    taken = [(endpoint, body) for endpoint, body in both if not split_refusal(endpoint, body)]
    assert taken
    return taken


@EVERY
@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b"null",
        b'{"choices":[]}',
        b'{"choices":[7]}',
        b'{"error":{"message":"x"}}',
        b"[" * 99999,
    ],
)
def test_garbage_hands_nothing_over(dialect: Dialect, garbage: bytes) -> None:
    """Reading never raises."""
    assert dialect.read_handoff(garbage) is None
    assert dialect.parse_facts(garbage, make_pod(url="http://p:1")) is None


@EVERY
def test_fields_of_others_keep_their_bytes(dialect: Dialect) -> None:
    """Fields keep their order."""
    for endpoint, _ in requests(dialect):
        prompt = b'"messages":[ {"role":"user"} ]' if endpoint is CHAT else b'"prompt":"hi"'
        body = b'{"model":"m","seed":-9223372036854775808,' + prompt + b',"temperature":1.0e0,"x":[ 1.10 ],"y":1E400}'
        for leg in legs(dialect, endpoint, body):
            assert kept(leg) == kept(body)


def kept(body: bytes) -> list[tuple[str, bytes]]:
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return [(name, bytes(value)) for name, value in fields.items() if name not in OWNED]


@EVERY
def test_a_clients_steering_fields_reach_no_pod(dialect: Dialect) -> None:
    """It could read another tenant's KV, or make a pod connect to any host."""
    for endpoint, body in requests(dialect, **PLANTED):
        assert b"evil" in body
        assert not any(b"evil" in leg for leg in legs(dialect, endpoint, body))


@EVERY
def test_the_client_gets_the_requested_answer(dialect: Dialect) -> None:
    """Streamed or not, at full length."""
    for stream in (True, False):
        for endpoint, body in requests(dialect, stream=stream):
            decode = read(legs(dialect, endpoint, body)[1])
            assert decode["stream"] is stream
            limit = "max_completion_tokens" if endpoint is CHAT else "max_tokens"
            assert decode[limit] in (8, 9)


@EVERY
def test_one_pair_always_gives_the_same_bodies(dialect: Dialect) -> None:
    """Only the id of a handoff is random."""
    for endpoint, body in requests(dialect):
        assert legs(dialect, endpoint, body) == legs(dialect, endpoint, body)


@EVERY
def test_an_ipv6_pod_has_an_unambiguous_address(dialect: Dialect) -> None:
    """It has brackets before a port and is never cut at a colon."""
    url = dialect.facts_url(make_pod(url="http://[fd00::3]:8000"))
    assert url is None or url.startswith("http://[fd00::3]:")
    for endpoint, body in requests(dialect):
        for leg in legs(dialect, endpoint, body, "http://[fd00::3]:8000"):
            assert leg.count(b"fd00") == leg.count(b"fd00::3")
            assert b"://fd00" not in leg


@EVERY
@given(
    fields=st.dictionaries(
        st.sampled_from(["max_tokens", "stop", "n", "stream", "kv_transfer_params", "min_tokens", "r\u00e9", "\ud800"]),
        st.none() | st.integers(-2, 2**65) | st.text(max_size=3) | st.lists(st.integers(0, 3), max_size=2),
    )
)
def test_accepted_requests_can_be_handed_over(dialect: Dialect, fields: dict[str, Any]) -> None:
    """No accepted body raises."""
    body = json.dumps({"model": "m", "prompt": "hi", **fields}).encode()
    if not split_refusal(COMPLETIONS, body):
        assert all(read(leg)["model"] == "m" for leg in legs(dialect, COMPLETIONS, body))


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"n": "2"},
        {"best_of": 3},
        {"use_beam_search": True},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"n": "many"},
        {"best_of": "1" * 65},
        {"prompt_logprobs": "1" * 65},
    ],
)
def test_a_request_that_needs_more_than_one_handoff_is_refused(fields: dict[str, Any]) -> None:
    """With a sentence."""
    reason = split_refusal(COMPLETIONS, completion(**fields))
    assert reason[:1].isupper()
    assert reason.endswith(".")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1},
        {"n": "1"},
        {"n": None},
        {"echo": False},
    ],
)
def test_one_prompt_and_one_answer_are_not_refused(fields: dict[str, Any]) -> None:
    """In any notation."""
    assert split_refusal(COMPLETIONS, completion(**fields)) == ""


def test_several_prompts_are_refused() -> None:
    """As many as the router has read in the body."""
    assert split_refusal(COMPLETIONS, completion(prompt=["a", "b"]), 2).startswith("Several prompts")


def test_only_the_last_of_a_repeated_field_is_decoded() -> None:
    """An integer of 4,000 digits takes 60 us."""
    body = completion(best_of=1)[:-1] + b',"best_of":[%b],"best_of":1}' % (b"1" * 4_000)
    assert split_refusal(COMPLETIONS, body) == ""


def test_a_chat_is_split_and_an_embedding_is_not() -> None:
    assert split_refusal(CHAT, chat()) == ""
    assert split_refusal(Endpoint.EMBEDDINGS, b'{"model":"m","input":"hi"}')
    assert split_refusal(Endpoint.OTHER, b"{}")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", rb'{"\ud800":1}', b"[" * 100_000])
def test_an_unreadable_body_is_refused(body: bytes) -> None:
    """Without an exception."""
    assert split_refusal(CHAT, body)
