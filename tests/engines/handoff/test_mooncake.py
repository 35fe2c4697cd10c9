"""MooncakeConnector, as reference/protocols.md 3.3 has it."""

from __future__ import annotations

import pytest

from router.engines.handoff.dialect import Handoff
from router.engines.handoff.mooncake import Mooncake
from tests.engines.handoff.pairs import COMPLETIONS, completion, pair, pod, read

MOONCAKE = Mooncake()
QUERY = (
    b'{"0":{"engine_id":"abc","worker_addr":{"0":{"0":"10.0.0.3:41021"}}},'
    b'"1":{"engine_id":"def","worker_addr":{"0":{"0":"10.0.0.3:41022"}}}}'
)
ONE = b'{"0":{"engine_id":"abc","worker_addr":{"0":{"0":"tcp://127.0.0.1:41369"}}}}'


def test_a_prefill_pod_is_asked_for_its_engine() -> None:
    """At its bootstrap port, which is not the port of its API."""
    assert MOONCAKE.facts_url(pod("http://10.0.0.3:8000")) == "http://10.0.0.3:8998/query"
    assert MOONCAKE.facts_url(pod("https://[fd00::3]:8000/v1")) == "http://[fd00::3]:8998/query"
    assert MOONCAKE.facts_url(pod("http://p:8000", handoff_port=9001)) == "http://p:9001/query"


def test_the_engine_is_that_of_the_pods_rank() -> None:
    """Or the only one of a pod without ranks."""
    assert MOONCAKE.parse_facts(QUERY, pod("http://p:1", dp_rank=1)) == {"engine_id": "def"}
    assert MOONCAKE.parse_facts(ONE, pod("http://p:1")) == {"engine_id": "abc"}


@pytest.mark.parametrize(
    ("said", "rank"), [(QUERY, None), (ONE, 1), (b"{}", None), (b"", 0), (b"[]", 0), (b'{"0":{"engine_id":3}}', 0)]
)
def test_an_engine_that_is_not_told_apart_is_none(said: bytes, rank: int | None) -> None:
    """So that no decode leg is sent to wait for the wrong one."""
    assert MOONCAKE.parse_facts(said, pod("http://p:1", dp_rank=rank)) is None


def test_the_legs_meet_under_one_transfer_id() -> None:
    """Exactly the two dicts of the reference."""
    prefill = read(MOONCAKE.prefill_body(COMPLETIONS, completion(), pair()))
    decode = read(MOONCAKE.decode_body(COMPLETIONS, completion(), pair(), Handoff()))
    assert prefill["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": "xfer-000000000000004d",
    }
    assert decode == {
        "model": "m",
        "prompt": "hi",
        "max_tokens": 9,
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": "http://10.0.0.3:8998",
            "remote_engine_id": "abc",
            "transfer_id": "xfer-000000000000004d",
        },
    }


def test_only_its_length_ends_a_prefill_leg() -> None:
    """Anything else would leave decode waiting for minutes."""
    body = completion(stop=["a"], stop_token_ids=[4], ignore_eos=False)
    leg = read(MOONCAKE.prefill_body(COMPLETIONS, body, pair()))
    assert leg.keys() == {"model", "prompt", "max_tokens", "stream", "ignore_eos", "kv_transfer_params"}
    assert leg["ignore_eos"] is True
    assert read(MOONCAKE.decode_body(COMPLETIONS, body, pair(), Handoff()))["stop"] == ["a"]
