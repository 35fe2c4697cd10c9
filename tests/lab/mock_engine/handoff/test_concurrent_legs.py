"""KV handoff between two engines, in dialects that join legs by an id, by a state, or by a store."""

from __future__ import annotations

import asyncio
import gc

import httpx
import pytest

from loadtest.mock_engine.faults import Fault, FaultKind
from loadtest.mock_engine.handoff_dialects import DecodeLeg
from loadtest.mock_engine.mock_config import HandoffDialect
from tests.lab.mock_engine.handoff.pair import (
    CHAT,
    OFFER,
    OpenPair,
    cached,
    metric,
    prompt,
    right_answer,
    said,
    under_way,
    undivided,
)
from tests.lab.mock_engine.handoff.test_handoff_dialects import request

pytestmark = [pytest.mark.net, pytest.mark.anyio]
JOINED: list[HandoffDialect] = ["mooncake", "bootstrap", "p2p"]
"""Dialects whose legs are joined by the router's id."""


@pytest.mark.parametrize("dialect", JOINED)
@pytest.mark.parametrize("decode_first", [True, False])
async def test_two_legs_meet_in_either_order(open_pair: OpenPair, dialect: HandoffDialect, decode_first: bool) -> None:
    """The first leg waits; both responses are correct, and no KV stays held."""
    async with open_pair(dialect) as pair:
        offer, take = await pair.joined_legs()
        order = [(pair.to_decode, take), (pair.to_prefill, offer)]
        first, second = order if decode_first else order[::-1]
        waiting = under_way(first[0].post(CHAT, json=first[1]))
        if decode_first:
            while await metric(pair.to_decode, "num_requests_waiting") == 0:
                pass
        answers = {second[0]: await second[0].post(CHAT, json=second[1]), first[0]: await waiting}
        right = await undivided(pair)
        assert (said(answers[pair.to_decode]), said(answers[pair.to_prefill])) == (right, right.split()[0])
        assert answers[pair.to_prefill].json().get("kv_transfer_params") is None
        assert await metric(pair.to_decode, "external_prefix_cache_hits_total") == 62
        await pair.until(lambda: pair.idle)


@pytest.mark.parametrize("dialect", JOINED)
async def test_disconnecting_both_legs_frees_everything(open_pair: OpenPair, dialect: HandoffDialect) -> None:
    """The decode leg while it waits, the prefill leg during its prefill."""
    async with open_pair(dialect, time_scale=1000.0) as pair:
        offer, take = await pair.joined_legs()
        legs = [under_way(pair.to_prefill.post(CHAT, json=offer)), under_way(pair.to_decode.post(CHAT, json=take))]
        while await metric(pair.to_decode, "num_requests_waiting") == 0 or not pair.prefill.load.running:
            pass
        for leg in legs:
            leg.cancel()
        await pair.until(lambda: pair.idle)


async def test_a_decode_leg_that_is_cancelled_while_it_connects_closes_its_connection(open_pair: OpenPair) -> None:
    """In any turn of the loop. A cancelled httpx request drops a connection that opens in the same turn."""
    async with open_pair("mooncake") as pair:
        address = f"http://{pair.prefill.config.host}:{pair.prefill.port}"
        for turns in range(1, 30):
            pull = under_way(pair.decode._handoffs.load(request(), DecodeLeg(address, f"x-{turns}")))
            for _ in range(turns):
                await asyncio.sleep(0)
            pull.cancel()
            await asyncio.wait([pull])
            assert pull.cancelled()
        await pair.until(lambda: not pair.prefill._http_state.connections)
        gc.collect()


@pytest.mark.parametrize(("dialect", "status"), [("mooncake", 500), ("bootstrap", 500), ("p2p", 200)])
async def test_a_decode_leg_times_out_without_its_prefill_leg(
    open_pair: OpenPair, dialect: HandoffDialect, status: int
) -> None:
    """It fails; only the offloading tier recomputes."""
    async with open_pair(dialect, {"wait_s": 0.01}) as pair:
        _, take = await pair.joined_legs()
        assert (await pair.to_decode.post(CHAT, json=take)).status_code == status
        assert pair.idle


@pytest.mark.parametrize(("dialect", "status"), [("mooncake", 500), ("bootstrap", 500), ("p2p", 200)])
async def test_a_decode_leg_fails_when_its_prefill_engine_dies(
    open_pair: OpenPair, dialect: HandoffDialect, status: int
) -> None:
    """At once, long before its timeout."""
    async with open_pair(dialect) as pair:
        offer, take = await pair.joined_legs()
        decoding = under_way(pair.to_decode.post(CHAT, json=take))
        while await metric(pair.to_decode, "num_requests_waiting") == 0:
            pass
        pair.prefill.inject(Fault(kind=FaultKind.DIE_BEFORE_ANSWER))
        with pytest.raises(httpx.RemoteProtocolError):
            await pair.to_prefill.post(CHAT, json=offer)
        assert (await decoding).status_code == status
        assert pair.idle


async def test_mooncake_has_a_new_engine_id_after_a_restart(open_pair: OpenPair) -> None:
    """A decode leg with the old engine id fails at once; `/query` returns the new one."""
    async with open_pair("mooncake") as pair:
        _, stale = await pair.joined_legs()
        pair.prefill.inject(Fault(kind=FaultKind.RESTART))
        assert (await pair.to_decode.post(CHAT, json=stale)).status_code == 500
        _, fresh = await pair.joined_legs()
        assert fresh != stale


async def test_mooncake_holds_no_kv_after_a_stop(open_pair: OpenPair) -> None:
    """A prefill leg that stops by itself holds no KV, so its decode leg fails."""
    async with open_pair("mooncake") as pair:
        offer, _ = await pair.joined_legs()
        del offer["max_tokens"]
        answer = await pair.to_prefill.post(CHAT, json=offer)
        assert answer.json()["choices"][0]["finish_reason"] == "stop" and pair.idle


async def test_mooncake_reports_the_whole_prompt_as_cached(open_pair: OpenPair) -> None:
    """To the last token of the prompt."""
    async with open_pair("mooncake") as pair:
        offer, take = await pair.joined_legs()
        await pair.to_prefill.post(CHAT, json=offer)
        assert cached(await pair.to_decode.post(CHAT, json=take)) == 63


async def test_sglangs_prefill_leg_responds_once_its_kv_is_taken(open_pair: OpenPair) -> None:
    """Not earlier; it fails if no decode leg takes the KV."""
    async with open_pair("bootstrap", {"lease_s": 0.0}) as pair:
        offer, _ = await pair.joined_legs()
        assert (await pair.to_prefill.post(CHAT, json=offer)).status_code == 500
    async with open_pair("bootstrap") as pair:
        offer, take = await pair.joined_legs()
        streamed = under_way(pair.to_prefill.post(CHAT, json=offer | {"stream": True}))
        await pair.to_decode.post(CHAT, json=take)
        assert (await streamed).text.endswith("[DONE]\n\n")


async def test_sglangs_prefill_leg_is_aborted_with_its_client(open_pair: OpenPair) -> None:
    """Its KV is computed but not taken: the blocks are free at once."""
    async with open_pair("bootstrap") as pair:
        offer, _ = await pair.joined_legs()
        prefilling = under_way(pair.to_prefill.post(CHAT, json=offer))
        await pair.until(lambda: bool(pair.prefill.pinned_requests))
        prefilling.cancel()
        await pair.until(lambda: pair.idle)


async def test_tensorrt_llm_continues_after_its_first_token(open_pair: OpenPair) -> None:
    """The context leg returns one token for any limit; the generation leg returns all, and ignores messages."""
    async with open_pair("trtllm") as pair:
        asked = {"request_type": "context_only", "disagg_request_id": 5}
        context = (await pair.to_prefill.post(CHAT, json=prompt(disaggregated_params=asked))).json()
        choice = context["choices"][0]
        assert choice["finish_reason"] == "not_finished" and context["usage"]["completion_tokens"] == 1
        params = choice["disaggregated_params"] | {"request_type": "generation_only"}
        generation = {
            "messages": [{"role": "nobody", "content": ""}],
            "max_tokens": 8,
            "prompt_token_ids": context["prompt_token_ids"],
            "disaggregated_params": params,
        }
        assert said(await pair.to_decode.post(CHAT, json=generation)) == await right_answer(pair)
        assert pair.idle
        assert (await pair.to_decode.post(CHAT, json=generation)).status_code == 500


async def test_tensorrt_llm_forbids_the_fields_of_others(open_pair: OpenPair) -> None:
    """A vLLM body is rejected with 400."""
    async with open_pair("trtllm") as pair:
        answer = await pair.to_prefill.post(CHAT, json=prompt(kv_transfer_params=OFFER))
        assert answer.status_code == 400 and "kv_transfer_params" in answer.json()["error"]["message"]


async def test_a_shared_store_has_the_blocks_of_the_other_engine(open_pair: OpenPair) -> None:
    """Without handoff fields; another prompt gets the shared prefix as well."""
    async with open_pair("shared_store") as pair:
        await pair.to_prefill.post(CHAT, json=prompt(max_tokens=1))
        answer = await pair.to_decode.post(CHAT, json=prompt())
        assert cached(answer) == 48 and await metric(pair.to_decode, "external_prefix_cache_hits_total") == 48
        assert cached(await pair.to_decode.post(CHAT, json=prompt(cache_salt="s"))) == 0
        assert pair.idle


async def test_a_peer_lookup_loads_the_peers_blocks(open_pair: OpenPair) -> None:
    """The rest is computed; the peer keeps its blocks."""
    async with open_pair("p2p") as pair:
        await pair.to_prefill.post(CHAT, json=prompt())
        source = {"kv_request_id": "k", "remote_host": "127.0.0.1", "remote_port": pair.prefill.port}
        answer = await pair.decoded({"remote_kv_source": source})
        assert said(answer) == await right_answer(pair) and cached(answer) == 48
        assert cached(await pair.decoded({"remote_kv_source": source}, "b")) == 0
        assert cached(await pair.to_prefill.post(CHAT, json=prompt())) == 48 and pair.idle


async def test_a_peer_lookup_at_a_dead_engine_computes_everything(open_pair: OpenPair) -> None:
    """No error reaches the client."""
    async with open_pair("p2p") as pair:
        port = pair.prefill.port
        await pair.prefill.stop()
        source = {"kv_request_id": "k", "remote_host": "127.0.0.1", "remote_port": port}
        assert cached(await pair.decoded({"remote_kv_source": source})) == 0


@pytest.mark.parametrize("path", ["/_kv/take", "/_kv/lookup"])
async def test_an_invalid_body_between_engines_is_a_bad_request(open_pair: OpenPair, path: str) -> None:
    async with open_pair("nixl") as pair:
        assert (await pair.to_prefill.post(path, content=b"[]")).status_code == 400
