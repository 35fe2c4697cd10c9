"""vLLM's connectors, as in docs/handoff.md#vllm."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from router.engines.handoff.dialect import Handoff, Order
from router.engines.handoff.vllm_connectors import Mooncake, Nixl, P2p, SharedStore, one_token_body, takes_prompt_tokens
from tests.engines.handoff.pairs import CHAT, COMPLETIONS, answer, chat, completion, pair, read
from tests.kit.scenes import make_pod


def test_a_one_token_body_asks_for_one_token_and_no_stream() -> None:
    """With both names of the limit for a chat, and without fields that contradict one token."""
    leg = read(one_token_body(CHAT, chat(min_tokens=4, n=1, tools=[{"a": 1}], cache_salt="s", tool_choice="required")))
    assert leg == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 1,
        "max_tokens": 1,
        "stream": False,
        "tools": [{"a": 1}],
        "cache_salt": "s",
        "tool_choice": "required",
    }


def test_a_completion_has_only_one_limit() -> None:
    """The other one is left alone."""
    assert read(one_token_body(COMPLETIONS, completion())) == {
        "model": "m",
        "prompt": "hi",
        "max_tokens": 1,
        "stream": False,
    }
    assert read(one_token_body(COMPLETIONS, completion(max_completion_tokens=5)))["max_completion_tokens"] == 5


@pytest.mark.parametrize(
    ("version", "takes"),
    [("0.27.0", True), ("v0.27.1rc1", True), ("0.33.0.dev2+g1a", True), ("1.0", True), ("0.26.9", False), ("", False)],
)
def test_prompt_tokens_are_given_only_to_releases_that_read_them(version: str, takes: bool) -> None:
    """A pod without a version gets none."""
    assert takes_prompt_tokens(make_pod(url="http://p:1", version=version)) is takes


NIXL = Nixl()
REQUEST = (
    '{"do_remote_decode":true,"do_remote_prefill":false,'
    '"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
PARAMS = (
    '{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[4,5,6]],"remote_engine_id":"6f0c",'
    '"remote_request_id":"chatcmpl-req-77-9a1b2c3d","remote_host":"10.0.0.3","remote_port":5600,"tp_size":1,'
    '"dcp_size":1,"pp_size":1,"remote_num_tokens":48,"remote_blocks_expiry_time":1234.0e0,"transfer_mode":"pull",'
    '"of_a_later_release":[1.0, 12345678901234567890123]}'
)
ANSWER = (
    '{"id":"x","choices":[{"index":0,"finish_reason":"length"}],"prompt_token_ids":[7,8],'
    f'"usage":{{"prompt_tokens_details":{{"cached_tokens":16}}}},"kv_transfer_params":{PARAMS}}}'
).encode()


def nixl_handoff() -> Handoff:
    found = NIXL.read_handoff(ANSWER)
    assert found is not None
    return found


def test_prefill_is_asked_to_keep_its_blocks() -> None:
    """The prompt's tokens are requested too."""
    assert (
        NIXL.prefill_body(COMPLETIONS, completion(), pair())
        == (
            '{"model":"m","prompt":"hi","max_tokens":1,"stream":false,"kv_transfer_params":'
            + REQUEST
            + ',"return_token_ids":true}'
        ).encode()
    )


def test_the_parameters_are_passed_to_decode_unchanged() -> None:
    """Every byte, including fields of later releases; the rest of the body does not change."""
    body = NIXL.decode_body(COMPLETIONS, b'{"model":"m","prompt":"hi","seed":1.0}', pair(), nixl_handoff())
    assert body == b'{"model":"m","prompt":"hi","seed":1.0,"kv_transfer_params":' + PARAMS.encode() + b"}"


def test_a_chat_carries_the_prompts_tokens_where_the_release_reads_them() -> None:
    """Inside the parameters; elsewhere they would be refused or ignored."""
    new = read(NIXL.decode_body(CHAT, chat(), pair(version="0.27.0"), nixl_handoff()))
    assert new["kv_transfer_params"]["prompt_token_ids"] == [7, 8]
    assert new["stream"] is True
    for version in ("0.26.2", ""):
        old = read(NIXL.decode_body(CHAT, chat(), pair(version=version), nixl_handoff()))
        assert "prompt_token_ids" not in old["kv_transfer_params"]
    plain = read(NIXL.decode_body(COMPLETIONS, completion(), pair(), nixl_handoff()))
    assert "prompt_token_ids" not in plain["kv_transfer_params"]


def test_cached_tokens_are_the_prefill_pods() -> None:
    assert (nixl_handoff().cached_tokens, nixl_handoff().prompt_token_ids) == (16, msgspec.Raw(b"[7,8]"))


@pytest.mark.parametrize(
    "reply", [answer(), answer(kv_transfer_params=None), answer(kv_transfer_params={}), answer(kv_transfer_params=[1])]
)
def test_an_answer_without_parameters_hands_nothing_over(reply: bytes) -> None:
    """The decode pod then computes the prompt itself."""
    assert NIXL.read_handoff(reply) is None


def test_decode_must_follow_well_within_the_lease() -> None:
    """After 30 s the blocks may hold another prompt, without any error."""
    assert NIXL.hold_s <= 15.0


MOONCAKE = Mooncake()
QUERY = (
    b'{"0":{"engine_id":"abc","worker_addr":{"0":{"0":"10.0.0.3:41021"}}},'
    b'"1":{"engine_id":"def","worker_addr":{"0":{"0":"10.0.0.3:41022"}}}}'
)
ONE = b'{"0":{"engine_id":"abc","worker_addr":{"0":{"0":"tcp://127.0.0.1:41369"}}}}'


def test_a_prefill_pod_is_asked_for_its_engine() -> None:
    """At its bootstrap port."""
    assert MOONCAKE.facts_url(make_pod(url="http://10.0.0.3:8000")) == "http://10.0.0.3:8998/query"
    assert MOONCAKE.facts_url(make_pod(url="https://[fd00::3]:8000/v1")) == "http://[fd00::3]:8998/query"
    assert MOONCAKE.facts_url(make_pod(url="http://p:8000", handoff_port=9001)) == "http://p:9001/query"


def test_the_engine_is_that_of_the_pods_rank() -> None:
    """Or the only one, for a pod without a rank."""
    assert MOONCAKE.parse_facts(QUERY, make_pod(url="http://p:1", dp_rank=1)) == {"engine_id": "def"}
    assert MOONCAKE.parse_facts(ONE, make_pod(url="http://p:1")) == {"engine_id": "abc"}


@pytest.mark.parametrize(
    ("reply", "rank"), [(QUERY, None), (ONE, 1), (b"{}", None), (b"", 0), (b"[]", 0), (b'{"0":{"engine_id":3}}', 0)]
)
def test_an_ambiguous_engine_is_none(reply: bytes, rank: int | None) -> None:
    """No decode leg is sent to the wrong engine."""
    assert MOONCAKE.parse_facts(reply, make_pod(url="http://p:1", dp_rank=rank)) is None


def test_mooncakes_legs_meet_under_one_transfer_id() -> None:
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


def test_only_its_length_ends_a_one_token_body() -> None:
    """Otherwise the decode leg would wait for minutes."""
    body = completion(stop=["a"], stop_token_ids=[4], ignore_eos=False)
    leg = read(MOONCAKE.prefill_body(COMPLETIONS, body, pair()))
    assert leg.keys() == {"model", "prompt", "max_tokens", "stream", "ignore_eos", "kv_transfer_params"}
    assert leg["ignore_eos"] is True
    assert read(MOONCAKE.decode_body(COMPLETIONS, body, pair(), Handoff()))["stop"] == ["a"]


SOURCE = {"kv_request_id": "kr-000000000000004d", "remote_host": "10.0.0.3", "remote_port": 5710}


def test_the_legs_meet_under_one_request_id() -> None:
    """Exactly the two dicts of the reference."""
    prefill = read(P2p().prefill_body(CHAT, chat(), pair()))
    decode = read(P2p().decode_body(CHAT, chat(), pair(), Handoff()))
    assert prefill["kv_transfer_params"] == {"remote_decoder": {"kv_request_id": "kr-000000000000004d"}}
    assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
    assert decode == read(chat()) | {"kv_transfer_params": {"remote_prefiller": SOURCE}}


def test_a_prefill_pod_that_pulls_gets_both() -> None:
    """vLLM reads the two dicts of one request independently."""
    source = replace(pair(), source=replace(pair(), id=1))
    assert read(P2p().prefill_body(CHAT, chat(), source))["kv_transfer_params"] == {
        "remote_decoder": {"kv_request_id": "kr-000000000000004d"},
        "remote_kv_source": SOURCE | {"kv_request_id": "kr-0000000000000001"},
    }


def test_kv_that_nobody_fetches_is_given_back_with_a_prompt_of_one_token() -> None:
    """A peer reads one block of a handoff, and none of an offer."""
    handoff = {"do_remote_prefill": msgspec.Raw(b"true"), "remote_num_tokens": msgspec.Raw(b"97")}
    offer = {"do_remote_decode": msgspec.Raw(b"true"), "remote_num_tokens": msgspec.Raw(b"155")}
    short = {"model": "m", "prompt": [5], "max_tokens": 1}
    assert Nixl().return_body("m", handoff) == {**short, "kv_transfer_params": handoff}
    assert Nixl().return_body("m", offer) == {**short, "kv_transfer_params": {**offer, "remote_num_tokens": 0}}
    assert P2p().return_body("m", {}) is None


def test_a_pull_names_the_pod_that_has_the_prefix() -> None:
    """The rest of the request stays; blocks that the peer does not have are computed."""
    body = P2p().pull_body(completion(), pair())
    assert body is not None
    assert read(body) == read(completion()) | {"kv_transfer_params": {"remote_kv_source": SOURCE}}


def test_each_rank_has_its_own_side_channel() -> None:
    """An IPv6 host has no brackets, because the engine adds them."""
    body = P2p().pull_body(completion(), pair("http://[fd00::3]:8000", rank=2, port=6000))
    assert body is not None
    source = read(body)["kv_transfer_params"]["remote_kv_source"]
    assert (source["remote_host"], source["remote_port"]) == ("fd00::3", 6002)


STORE = SharedStore()


def test_nothing_goes_over_the_wire() -> None:
    """Prefill computes one token; decode gets the client's own bytes."""
    body = chat()
    assert STORE.order is Order.PREFILL_FIRST
    assert read(STORE.prefill_body(CHAT, body, pair())).keys() == (read(body).keys() | {"max_tokens"}) - {
        "stream_options"
    }
    assert STORE.decode_body(CHAT, body, pair(), Handoff()) is body


def test_cached_tokens_of_the_prefill_pod_are_reported() -> None:
    """The decode pod would count everything in the store as cached."""
    usage = {"prompt_tokens_details": {"cached_tokens": 4}}
    assert STORE.read_handoff(answer(usage=usage)) == Handoff(cached_tokens=4)
