"""LMCacheConnectorV1, as reference/protocols.md 3.7 has it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.engines.handoff.dialect import Handoff
from router.engines.handoff.lmcache import LmCache, parse_report, request_id
from tests.engines.handoff.pairs import CHAT, COMPLETIONS, answer, chat, completion, pair, read

LMCACHE = LmCache()
TOLD = answer({"prompt_token_ids": [1, 2]}, kv_transfer_params={"first_tok": 123})


def test_prefill_is_told_where_to_push() -> None:
    """One port of each kind for each rank of the receiver."""
    leg = read(LmCache((7300, 7301), (7400, 7401)).prefill_body(COMPLETIONS, completion(), pair()))
    assert leg == {
        "model": "m",
        "prompt": "hi",
        "max_tokens": 1,
        "stream": False,
        "return_token_ids": True,
        "kv_transfer_params": {
            "ret_first_tok": True,
            "disagg_spec": {
                "req_id": "pd-000000000000004d",
                "receiver_host": "10.0.0.9",
                "receiver_init_port": [7300, 7301],
                "receiver_alloc_port": [7400, 7401],
            },
        },
    }


def test_decode_goes_on_behind_the_first_token() -> None:
    """Which the client must then get from the prefill leg."""
    handoff = LMCACHE.read_handoff(COMPLETIONS, TOLD, pair())
    assert handoff == Handoff({"first_tok": 123}, [1, 2], None, first_text=" a")
    assert read(LMCACHE.decode_body(COMPLETIONS, completion(), pair(), handoff)) == {
        "model": "m",
        "prompt": [1, 2, 123],
        "max_tokens": 8,
    }


def test_a_limit_that_is_not_said_is_the_engines_own() -> None:
    """16 of a completion; null is no limit."""
    handoff = Handoff({"first_tok": 5}, [1])
    unsaid = LMCACHE.decode_body(COMPLETIONS, b'{"prompt":"hi"}', pair(), handoff)
    unlimited = LMCACHE.decode_body(COMPLETIONS, completion(max_tokens=None), pair(), handoff)
    assert (read(unsaid)["max_tokens"], read(unlimited)["max_tokens"]) == (15, None)


def test_a_first_token_that_ends_the_answer_is_the_answer() -> None:
    """Decoding would go on behind its end."""
    said = answer({"finish_reason": "stop", "prompt_token_ids": [1]}, kv_transfer_params={"first_tok": 2})
    handoff = LMCACHE.read_handoff(COMPLETIONS, said, pair())
    assert handoff is not None
    assert handoff.answer is not None
    assert read(handoff.answer) == read(answer({"finish_reason": "stop"}))


@pytest.mark.parametrize(
    "said",
    [
        answer({"prompt_token_ids": [1]}),
        answer({"prompt_token_ids": [1]}, kv_transfer_params={"first_tok": None}),
        answer(kv_transfer_params={"first_tok": 3}),
    ],
)
def test_half_a_handoff_is_none(said: bytes) -> None:
    """Decode then computes the prompt itself."""
    assert LMCACHE.read_handoff(COMPLETIONS, said, pair()) is None


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 1}, {"logprobs": 2}, {"min_tokens": 3}, {"stop": "a"}, {"stop": ["a"]}, {"n": 2}]
)
def test_what_needs_to_see_the_whole_answer_is_refused(fields: dict[str, Any]) -> None:
    """The decode pod does not know the first token as its own."""
    assert LMCACHE.refuses(COMPLETIONS, completion(**fields))


def test_a_completion_is_taken_and_a_chat_is_not() -> None:
    """A chat cannot be continued behind a token."""
    assert LMCACHE.refuses(COMPLETIONS, completion()) == ""
    assert LMCACHE.refuses(CHAT, chat())


def test_reports_are_told_from_other_messages() -> None:
    """Both names that releases have given them."""
    for name in ("ProxyNotif", "NixlProxyNotif"):
        report = msgspec.msgpack.encode({"type": name, "req_id": request_id(pair())})
        assert parse_report(report) == "pd-000000000000004d"
    for other in ({"type": "CancelNotif", "req_id": "a"}, {"type": "ProxyNotif"}, ["ProxyNotif"]):
        assert parse_report(msgspec.msgpack.encode(other)) is None
    for garbage in (b"", b"\xc1", b'{"type":"ProxyNotif"}'):
        assert parse_report(garbage) is None
