"""Pools that share a store of KV."""

from __future__ import annotations

from router.engines.handoff.dialect import Handoff, Order
from router.engines.handoff.shared_store import SharedStore
from tests.engines.handoff.pairs import CHAT, answer, chat, pair, read

STORE = SharedStore()


def test_nothing_goes_over_the_wire() -> None:
    """Prefill computes one token; decode gets the very bytes of the client."""
    body = chat()
    assert STORE.order is Order.PREFILL_FIRST
    assert read(STORE.prefill_body(CHAT, body, pair())).keys() == (read(body).keys() | {"max_tokens"}) - {
        "stream_options"
    }
    assert STORE.decode_body(CHAT, body, pair(), Handoff()) is body


def test_what_the_prefill_pod_had_is_still_told() -> None:
    """Decode finds everything in the store and would call it cached."""
    usage = {"prompt_tokens_details": {"cached_tokens": 4}}
    assert STORE.read_handoff(CHAT, answer(usage=usage), pair()) == Handoff(cached_tokens=4)
