"""vLLM's p2p tier, as reference/protocols.md 3.6 has it."""

from __future__ import annotations

from router.engines.handoff.dialect import Handoff
from router.engines.handoff.p2p import P2p
from tests.engines.handoff.pairs import CHAT, COMPLETIONS, chat, completion, pair, read

SOURCE = {"kv_request_id": "kr-000000000000004d", "remote_host": "10.0.0.3", "remote_port": 5710}


def test_the_legs_meet_under_one_request_id() -> None:
    """Exactly the two dicts of the reference."""
    prefill = read(P2p().prefill_body(CHAT, chat(), pair()))
    decode = read(P2p().decode_body(CHAT, chat(), pair(), Handoff()))
    assert prefill["kv_transfer_params"] == {"remote_decoder": {"kv_request_id": "kr-000000000000004d"}}
    assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
    assert decode == read(chat()) | {"kv_transfer_params": {"remote_prefiller": SOURCE}}


def test_a_pull_names_the_pod_that_has_the_prefix() -> None:
    """And leaves the request as it is: what the peer does not have is computed."""
    body = P2p().pull_body(completion(), pair())
    assert body is not None
    assert read(body) == read(completion()) | {"kv_transfer_params": {"remote_kv_source": SOURCE}}


def test_each_rank_has_its_own_side_channel() -> None:
    """And an IPv6 host stands without brackets, as the engine adds them itself."""
    body = P2p().pull_body(completion(), pair("http://[fd00::3]:8000", rank=2, port=6000))
    assert body is not None
    source = read(body)["kv_transfer_params"]["remote_kv_source"]
    assert (source["remote_host"], source["remote_port"]) == ("fd00::3", 6002)


def test_a_pull_and_a_handoff_are_one_dialect() -> None:
    """For both endpoints."""
    assert P2p().refuses(COMPLETIONS, completion()) == P2p().refuses(CHAT, chat()) == ""
