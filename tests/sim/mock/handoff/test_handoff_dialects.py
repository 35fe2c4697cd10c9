"""What each dialect takes for a leg, and what it tells."""

from __future__ import annotations

import base64
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import pytest

from router.hashing import token_array
from router.sim.mock.handoff_dialects import (
    DecodeLeg,
    HandoffLeg,
    LoadedKv,
    MockDialect,
    PeerAddress,
    PeerLookup,
    PrefillLeg,
    StoreLookup,
    dialect_of,
)
from router.sim.mock.mock_config import HandoffConfig
from router.sim.mock.mock_requests import EngineError, GenerationRequest
from router.sim.mock.pinned_kv import PinnedKv
from router.sim.mock.vocabulary import GeneratedText
from router.types import Endpoint, Role

HERE = PeerAddress("10.0.0.3", 5600, "6f0c")
PEER = {"kv_request_id": "kr-1", "remote_host": "10.0.0.3", "remote_port": 5710}
ADDRESS = {
    "remote_host": "10.0.0.3",
    "remote_port": 5600,
    "remote_engine_id": "6f0c",
    "remote_request_id": "chatcmpl-7",
    "remote_block_ids": [[4, 5]],
}
BOOTSTRAP = {"remote_bootstrap_addr": "http://10.0.0.3:8998", "remote_engine_id": "6f0c", "transfer_id": "x-1"}
ROOM: dict[str, Any] = {"bootstrap_host": "10.0.0.3", "bootstrap_port": 8998, "bootstrap_room": 77}


def wire(dialect: Any, role: Role = Role.BOTH) -> MockDialect:
    return dialect_of(HandoffConfig(dialect=dialect, role=role))


def ask(output_tokens: int = 2, **handoff: Any) -> GenerationRequest:
    answer = GeneratedText((7, 8)[:output_tokens], ("Time", " year")[:output_tokens], "length")
    return GenerationRequest(
        id="chatcmpl-7",
        endpoint=Endpoint.CHAT,
        model="tiny",
        prompt=token_array(range(40)),
        output=answer,
        handoff=handoff,
    )


@pytest.fixture
async def kept() -> PinnedKv:
    """The KV of a prefill leg."""
    return PinnedKv("chatcmpl-7", 1, 40, (4, 5, 6), 16, lambda: None)


@pytest.mark.parametrize(
    ("dialect", "params", "leg"),
    [
        ("nixl", {"do_remote_decode": True}, PrefillLeg("r")),
        ("nixl", {"do_remote_prefill": True, **ADDRESS}, DecodeLeg("http://10.0.0.3:5600", "chatcmpl-7")),
        ("nixl", {"do_remote_prefill": True, **ADDRESS, "remote_block_ids": None}, None),
        ("nixl", {"do_remote_prefill": False, "do_remote_decode": False}, None),
        ("mooncake", {"do_remote_decode": True, "transfer_id": "x-1"}, PrefillLeg("x-1")),
        ("mooncake", {"do_remote_decode": True}, None),
        ("mooncake", {"do_remote_prefill": True, **BOOTSTRAP}, DecodeLeg("http://10.0.0.3:8998", "x-1", "6f0c")),
        ("mooncake", {"do_remote_prefill": True, "transfer_id": "x-1"}, None),
        ("p2p", {"remote_decoder": {"kv_request_id": "kr-1"}}, PrefillLeg("kr-1")),
        ("p2p", {"remote_prefiller": PEER}, DecodeLeg("http://10.0.0.3:5710", "kr-1")),
        ("p2p", {"remote_kv_source": PEER}, PeerLookup("http://10.0.0.3:5710")),
        ("p2p", {}, None),
        ("shared_store", {"do_remote_decode": True}, StoreLookup()),
        ("", {"do_remote_decode": True}, None),
    ],
)
def test_vllms_connectors_read_their_own_params(dialect: str, params: dict[str, Any], leg: HandoffLeg) -> None:
    """What is incomplete, or another dialect's, is a whole request."""
    assert wire(dialect).leg(ask(kv_transfer_params=params), "r") == leg


def test_an_sglang_pod_serves_only_what_has_a_room() -> None:
    """Its mode decides which leg one and the same body is."""
    prefill, decode = wire("bootstrap", Role.PREFILL), wire("bootstrap", Role.DECODE)
    assert prefill.leg(ask(**ROOM), "r") == PrefillLeg("77", cut="length", awaits_delivery=True)
    assert decode.leg(ask(**ROOM), "r") == DecodeLeg("http://10.0.0.3:8998", "77")
    for role in (prefill, decode):
        with pytest.raises(EngineError, match="without bootstrap room id") as refused:
            role.leg(ask(), "r")
        assert refused.value.status is HTTPStatus.BAD_REQUEST


@pytest.mark.net  # what is kept belongs to a running loop
@pytest.mark.anyio
async def test_nixl_tells_where_its_blocks_lie(kept: PinnedKv) -> None:
    """The answer of a prefill leg is all that a decode leg needs."""
    params = wire("nixl").fields(ask(), kept, HERE).top["kv_transfer_params"]
    assert params["remote_block_ids"] == [(4, 5, 6)] and params["remote_num_tokens"] == 40
    assert params["remote_prefill_cached_tokens"] == 16 and params["remote_blocks_expiry_time"] is None
    assert wire("nixl").leg(ask(kv_transfer_params=params), "r") == DecodeLeg("http://10.0.0.3:5600", "chatcmpl-7")
    assert wire("nixl").fields_without_kv.top == {"kv_transfer_params": None}


@pytest.mark.net
@pytest.mark.anyio
async def test_tensorrt_llm_tells_an_opaque_state_in_its_choice(kept: PinnedKv) -> None:
    """The generation leg is sent that object back, with its type changed."""
    context = ask(1, disaggregated_params={"request_type": "context_only", "disagg_request_id": 5})
    told = wire("trtllm").fields(context, kept, HERE)
    params = told.choice["disaggregated_params"]
    assert (params["first_gen_tokens"], params["disagg_request_id"]) == ((7,), 5)
    assert told.top == {"prompt_token_ids": list(range(40))}
    generation = ask(disaggregated_params=params | {"request_type": "generation_only"})
    assert wire("trtllm").leg(generation, "r") == DecodeLeg(HERE.url, "chatcmpl-7", "6f0c")


def test_a_context_leg_ends_with_its_first_token() -> None:
    """Unfinished, unless one token was all that was asked for."""
    params: Any = {"request_type": "context_only"}
    assert wire("trtllm").leg(ask(2, disaggregated_params=params), "r") == PrefillLeg("r", cut="not_finished")
    assert wire("trtllm").leg(ask(1, disaggregated_params=params), "r") == PrefillLeg("r", cut="length")
    assert wire("trtllm").leg(ask(disaggregated_params={"request_type": "context_and_generation"}), "r") is None


@pytest.mark.parametrize(
    ("dialect", "handoff"),
    [
        ("trtllm", {"disaggregated_params": {"request_type": "generation_only", "encoded_opaque_state": "?"}}),
        (
            "trtllm",
            {
                "disaggregated_params": {
                    "request_type": "generation_only",
                    "encoded_opaque_state": base64.b64encode(b"[]").decode(),
                }
            },
        ),
        ("p2p", {"kv_transfer_params": {"remote_kv_source": {"kv_request_id": "kr-1"}}}),
    ],
)
def test_garbage_is_a_bad_request(dialect: str, handoff: dict[str, Any]) -> None:
    """A state that is not ours, an address without its half."""
    with pytest.raises(EngineError) as refused:
        wire(dialect).leg(ask(**handoff), "r")
    assert refused.value.status is HTTPStatus.BAD_REQUEST


@pytest.mark.parametrize(
    ("dialect", "shown"),
    [("nixl", 16), ("mooncake", 40), ("bootstrap", 8), ("trtllm", 32), ("shared_store", 32), ("p2p", 32)],
)
def test_engines_disagree_on_what_counts_as_cached(dialect: str, shown: int) -> None:
    """32 of 40 tokens came from elsewhere, where 8 had been cached; 16 were here already."""
    told = wire(dialect, Role.DECODE).reported_cached_tokens(40, 16, LoadedKv(32, prefill_cached_tokens=8))
    assert told == shown


def test_mooncake_hands_over_only_what_the_limit_ended() -> None:
    """A stop token on the prefill side strands the decode side."""
    offered: Callable[[str], bool] = wire("mooncake").holds_kv
    assert [offered("length"), offered("stop"), wire("nixl").holds_kv("stop")] == [True, False, True]
