"""SGLang, with sample answers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from router.engines.adapter import KvEventSource, PodFacts
from router.engines.engine_catalog import ENGINES
from router.guards import OutOfRange
from router.types import Pod, PodLoad
from tests.kit.scenes import make_pod

SGLANG = ENGINES["sglang"]
METRICS = b"""\
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="1",engine_type="unified",model_name="m",tp_rank="1"} 1.0
sglang:num_queue_reqs{dp_rank="0",engine_type="unified",model_name="m",tp_rank="0"} 2.0
sglang:num_queue_reqs{dp_rank="1",engine_type="unified",model_name="m",tp_rank="1"} 0.0
sglang:token_usage{dp_rank="0",engine_type="unified",model_name="m",tp_rank="0"} 0.5
sglang:token_usage{dp_rank="1",engine_type="unified",model_name="m",tp_rank="1"} 0.0
"""
KV = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "replay_endpoint_port_base": 5561,
    "topic": "",
    "block_size": 64,
    "dp_size": 2,
}


def describe(pod: Pod, **info: Any) -> PodFacts:
    models = json.dumps({"data": [{"id": "m", "max_model_len": 32768}]}).encode()
    facts = SGLANG.describe({"/v1/models": models, "/server_info": json.dumps(info).encode()}, pod)
    assert facts is not None
    return facts


def test_load_is_of_all_ranks_or_of_one() -> None:
    """By dp_rank; tensor-parallel ranks are not summed."""
    assert SGLANG.parse_load(METRICS, None, 1.0) == PodLoad(4, 2, 0.25, 1.0)
    assert SGLANG.parse_load(METRICS, 0, 1.0) == PodLoad(3, 2, 0.5, 1.0)


def test_the_server_in_rust_says_so() -> None:
    """It is asked at its join for what others like it lack."""
    assert (describe(make_pod(engine="sglang")).front_end, SGLANG.may_lack.get("", ())) == ("", ())
    assert describe(make_pod(engine="sglang"), frontend="rust").front_end == "rust"
    assert "/v1/messages" in SGLANG.may_lack["rust"]


def test_a_published_load_is_of_one_rank() -> None:
    """Later releases append fields. Where the capacity is unknown, so is the share in use."""
    stat = ["LoadStat", 3, 2, 500, 1000, 0, 7, 507, 64, 0, 0, "new"]
    assert SGLANG.parse_published_load(msgspec.msgpack.encode(stat), 1.0) == PodLoad(3, 2, 0.5, 1.0)
    stat[3:5] = 500, 0
    assert SGLANG.parse_published_load(msgspec.msgpack.encode(stat[:6]), 1.0) == PodLoad(3, 2, 0.0, 1.0)


@pytest.mark.parametrize("stat", [["LoadStat", -1, 0, 0, 0], ["LoadStat", 1, 1 << 62, 0, 0], ["KvStat", 1, 1, 1, 1], 7])
def test_another_load_is_refused(stat: Any) -> None:
    with pytest.raises(OutOfRange):
        SGLANG.parse_published_load(msgspec.msgpack.encode(stat), 1.0)


@pytest.mark.parametrize(
    ("rank", "ranks", "endpoint"), [(None, 1, "tcp://a:6000"), (1, 2, "tcp://a:6001"), (None, 2, "")]
)
def test_a_rank_publishes_its_load_on_a_port_of_its_own(rank: int | None, ranks: int, endpoint: str) -> None:
    kv = KV | {"load_endpoint_port_base": 6000, "load_topic": "load"}
    facts = describe(make_pod(engine="sglang", dp_rank=rank), dp_size=ranks, kv_events=kv)
    assert facts.load_endpoint == endpoint


def test_a_rank_publishes_on_the_base_port_and_its_number() -> None:
    """Events and replay, on the pod's host."""
    facts = describe(
        make_pod(engine="sglang", dp_rank=1), dp_size=2, max_total_num_tokens=1000, page_size=64, kv_events=KV
    )
    assert facts.kv_events == KvEventSource("tcp://a:5558", "tcp://a:5562")
    assert (facts.block_size_tokens, facts.capacity_tokens) == (64, 1000)


def test_a_pod_of_one_rank_is_rank_zero() -> None:
    """Without a replay port there is no replay endpoint."""
    kv = KV | {"replay_endpoint_port_base": None, "dp_size": 1}
    facts = describe(make_pod(engine="sglang"), kv_events=kv)
    assert facts.kv_events == KvEventSource("tcp://a:5557", None)


@pytest.mark.parametrize("info", [{"dp_size": 2, "kv_events": KV}, {"kv_events": None}, {"kv_events": {}}])
def test_ambiguous_or_disabled_events_are_none(info: dict[str, Any]) -> None:
    """Ambiguous ranks, or no publisher."""
    assert describe(make_pod(engine="sglang"), **info).kv_events is None


@pytest.mark.parametrize(
    ("info", "keeps"),
    [
        ({"disaggregation_mode": "decode"}, False),
        ({"disaggregation_mode": "decode", "disaggregation_decode_enable_offload_kvcache": True}, False),
        (
            {
                "disaggregation_mode": "decode",
                "disaggregation_decode_enable_offload_kvcache": True,
                "hicache_storage_backend": "mooncake",
            },
            True,
        ),
        ({"disaggregation_mode": "prefill", "hicache_storage_backend": "mooncake"}, None),
        ({}, None),
    ],
)
def test_a_decode_pod_says_whether_it_keeps_answers(info: dict[str, Any], keeps: bool | None) -> None:
    """Both arguments are needed. Other pods have none."""
    assert describe(make_pod(engine="sglang"), **info).keeps_answers is keeps


def test_without_events_the_page_is_the_block_and_ranks_are_summed() -> None:
    """SGLang's default is one token per page."""
    facts = describe(make_pod(engine="sglang"), page_size=1, max_total_num_tokens=1000, dp_size=2)
    assert (facts.block_size_tokens, facts.capacity_tokens, facts.max_model_len_tokens) == (1, 2000, 32768)


def test_invalid_sizes_are_unknown() -> None:
    """Also for SGLang's own -1."""
    facts = describe(make_pod(engine="sglang"), page_size=-1, max_total_num_tokens=-5, kv_events={"block_size": 0})
    assert (facts.block_size_tokens, facts.capacity_tokens) == (None, None)


def test_a_chat_is_tokenized_with_messages_and_tools_alone() -> None:
    """Other fields would be ignored."""
    assert SGLANG.tokenize_body("m", {"messages": []}) == {"model": "m", "messages": []}
    assert SGLANG.tokenize_body("m", {"messages": [], "chat_template_kwargs": {"x": 1}}) is None
    assert SGLANG.tokenize_body("m", {"messages": [], "tools": [], "tool_choice": "none"}) is None
