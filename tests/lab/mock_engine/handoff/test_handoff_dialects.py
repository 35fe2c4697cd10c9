"""The leg and the response fields of each dialect."""

from __future__ import annotations

import base64
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import pytest

from loadtest.mock_engine.handoff_dialects import (
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
from loadtest.mock_engine.mock_config import HandoffConfig
from loadtest.mock_engine.mock_requests import EngineError, GenerationRequest
from loadtest.mock_engine.pinned_kv import PinnedKv
from loadtest.mock_engine.vocabulary import GeneratedText, Piece
from router.hashing import token_array
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


def dialect_for(dialect: Any, role: Role = Role.BOTH) -> MockDialect:
    return dialect_of(HandoffConfig(dialect=dialect, role=role))


def request(output_tokens: int = 2, **handoff: Any) -> GenerationRequest:
    answer = GeneratedText((7, 8)[:output_tokens], (Piece("content", " year"),) * output_tokens, "length")
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
    """Incomplete parameters, or those of another dialect, are no leg."""
    assert dialect_for(dialect).leg(request(kv_transfer_params=params), "r") == leg


def test_an_sglang_pod_serves_only_requests_with_a_room() -> None:
    """Its role selects the leg for the same body."""
    prefill, decode = dialect_for("bootstrap", Role.PREFILL), dialect_for("bootstrap", Role.DECODE)
    assert prefill.leg(request(**ROOM), "r") == PrefillLeg("77", cut="length", awaits_delivery=True)
    assert decode.leg(request(**ROOM), "r") == DecodeLeg("http://10.0.0.3:8998", "77")
    for role in (prefill, decode):
        with pytest.raises(EngineError, match="without bootstrap room id") as refused:
            role.leg(request(), "r")
        assert refused.value.status is HTTPStatus.BAD_REQUEST


@pytest.mark.net  # held KV needs a running loop
@pytest.mark.anyio
async def test_nixl_returns_the_address_of_its_blocks(kept: PinnedKv) -> None:
    """The response of a prefill leg has everything a decode leg needs."""
    params = dialect_for("nixl").fields(request(), kept, HERE).top["kv_transfer_params"]
    assert params["remote_block_ids"] == [(4, 5, 6)] and params["remote_num_tokens"] == 40
    assert params["remote_prefill_cached_tokens"] == 16 and params["remote_blocks_expiry_time"] is None
    assert dialect_for("nixl").leg(request(kv_transfer_params=params), "r") == DecodeLeg(
        "http://10.0.0.3:5600", "chatcmpl-7"
    )
    assert dialect_for("nixl").fields_without_kv.top == {"kv_transfer_params": None}


@pytest.mark.net
@pytest.mark.anyio
async def test_tensorrt_llm_returns_an_opaque_state_in_its_choice(kept: PinnedKv) -> None:
    """The generation leg gets that object back with another type."""
    context = request(1, disaggregated_params={"request_type": "context_only", "disagg_request_id": 5})
    fields = dialect_for("trtllm").fields(context, kept, HERE)
    params = fields.choice["disaggregated_params"]
    assert (params["first_gen_tokens"], params["disagg_request_id"]) == ((7,), 5)
    assert fields.top == {"prompt_token_ids": list(range(40))}
    generation = request(disaggregated_params=params | {"request_type": "generation_only"})
    assert dialect_for("trtllm").leg(generation, "r") == DecodeLeg(HERE.url, "chatcmpl-7", "6f0c")


def test_a_context_leg_ends_with_its_first_token() -> None:
    """Unfinished, unless one token was requested."""
    params: Any = {"request_type": "context_only"}
    assert dialect_for("trtllm").leg(request(2, disaggregated_params=params), "r") == PrefillLeg(
        "r", cut="not_finished"
    )
    assert dialect_for("trtllm").leg(request(1, disaggregated_params=params), "r") == PrefillLeg("r", cut="length")
    assert (
        dialect_for("trtllm").leg(request(disaggregated_params={"request_type": "context_and_generation"}), "r") is None
    )


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
    ],
)
def test_invalid_handoff_fields_are_a_bad_request(dialect: str, handoff: dict[str, Any]) -> None:
    """An invalid state."""
    with pytest.raises(EngineError) as refused:
        dialect_for(dialect).leg(request(**handoff), "r")
    assert refused.value.status is HTTPStatus.BAD_REQUEST


@pytest.mark.parametrize(
    ("dialect", "shown"),
    [("nixl", 16), ("mooncake", 40), ("bootstrap", 8), ("trtllm", 32), ("shared_store", 32), ("p2p", 32)],
)
def test_engines_differ_in_what_counts_as_cached(dialect: str, shown: int) -> None:
    """32 of 40 tokens were loaded, of which 8 had been cached there; 16 were cached here."""
    fields = dialect_for(dialect, Role.DECODE).reported_cached_tokens(40, 16, LoadedKv(32, prefill_cached_tokens=8))
    assert fields == shown


def test_mooncake_hands_over_only_outputs_ended_by_the_limit() -> None:
    """A stop token in the prefill leg makes the decode leg fail."""
    offered: Callable[[str], bool] = dialect_for("mooncake").holds_kv
    assert [offered("length"), offered("stop"), dialect_for("nixl").holds_kv("stop")] == [True, False, True]
