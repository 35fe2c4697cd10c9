"""KV handoff between two engines over HTTP, prefill first, and its failures."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from loadtest.mock_engine.faults import Fault, FaultKind
from loadtest.mock_engine.handoff_service import stored_blocks
from router.types import Link
from tests.lab.mock_engine.handoff.pair import (
    CHAT,
    OFFER,
    OpenPair,
    Pair,
    cached,
    metric,
    prompt,
    right_answer,
    said,
    under_way,
)

pytestmark = [pytest.mark.net, pytest.mark.anyio]
ENDLESS = Link(t0_ms=1e9, bytes_per_ms=1.0)


async def test_only_leading_blocks_without_a_gap_are_stored() -> None:
    """A block after a missing one is not usable."""
    assert [stored_blocks({1, 2, 4}, hashes) for hashes in ([1, 2, 3, 4], [2], [3], [])] == [2, 1, 0, 0]


async def test_with_nixl_the_decode_engine_needs_no_prefill(open_pair: OpenPair) -> None:
    """The response is correct, usage does not show the transfer, metrics do, and no KV stays held."""
    async with open_pair("nixl") as pair:
        params = await pair.nixl_params()
        assert pair.prefill.pinned_requests == (params["remote_request_id"],)
        assert pair.prefill.load.kv_usage == len(params["remote_block_ids"][0]) / 256
        answer = await pair.decoded(params)
        assert said(answer) == await right_answer(pair) and cached(answer) == 0
        assert await metric(pair.to_decode, "external_prefix_cache_hits_total") == 62
        assert pair.idle
        assert cached(await pair.to_decode.post(CHAT, json=prompt())) == 48


async def test_nixl_transfers_only_what_the_decode_engine_lacks(open_pair: OpenPair) -> None:
    """Its own blocks count as a local hit."""
    async with open_pair("nixl") as pair:
        await pair.to_decode.post(CHAT, json=prompt())
        assert cached(await pair.decoded(await pair.nixl_params())) == 48
        assert await metric(pair.to_decode, "external_prefix_cache_hits_total") == 14


async def test_a_slow_link_multiplies_the_time_of_transfers(open_pair: OpenPair) -> None:
    """The times of the engine that sends are multiplied; the other engine's stay as they are."""
    async with open_pair("nixl", time_scale=1.0) as pair:
        before_s = pair.prefill._handoffs._transfer_s(1000)
        assert (await pair.to_prefill.post("/_fault", json={"kind": "slow_link", "factor": 10})).status_code == 200
        assert pair.prefill._handoffs._transfer_s(1000) == pytest.approx(10 * before_s)
        assert pair.decode._handoffs._transfer_s(1000) == pytest.approx(before_s)
        assert (await pair.to_prefill.post("/_fault", json={"kind": "throttle", "factor": 0})).status_code == 400


async def stale_by_restart(pair: Pair) -> dict[str, Any]:
    """Parameters of an earlier epoch of the prefill engine."""
    params = await pair.nixl_params()
    pair.prefill.inject(Fault(kind=FaultKind.RESTART))
    return params


async def stale_by_use(pair: Pair) -> dict[str, Any]:
    """Parameters that a decode leg has used already; the loaded KV is cleared again."""
    params = await pair.nixl_params()
    assert said(await pair.decoded(params)) == await right_answer(pair)
    assert (await pair.to_decode.post("/reset_prefix_cache")).status_code == 200
    return params


async def of_another_prompt(pair: Pair) -> dict[str, Any]:
    """Valid parameters of another prompt."""
    return await pair.nixl_params("b")


@pytest.mark.parametrize("spoilt", [stale_by_restart, stale_by_use, of_another_prompt])
async def test_a_stale_nixl_handoff_fails(
    open_pair: OpenPair, spoilt: Callable[[Pair], Coroutine[Any, Any, dict[str, Any]]]
) -> None:
    """Status 500 and counted; nothing wrong stays in the cache."""
    async with open_pair("nixl") as pair:
        right = await right_answer(pair)
        params = await spoilt(pair)
        assert (await pair.decoded(params)).status_code == 500
        assert await metric(pair.to_decode, "nixl_num_failed_transfers_total") == 1
        assert said(await pair.to_decode.post(CHAT, json=prompt())) == right
        await pair.until(lambda: not pair.prefill.pinned_requests)


async def test_a_lease_ends_after_its_time(open_pair: OpenPair) -> None:
    """The blocks are freed, and the prefill engine counts it."""
    async with open_pair("nixl", {"lease_s": 0.0}) as pair:
        await pair.nixl_params()
        await pair.until(lambda: pair.idle)
        assert await metric(pair.to_prefill, "nixl_num_kv_expired_reqs_total") == 1


async def told_to_fail(pair: Pair) -> dict[str, Any]:
    """Valid parameters for a decode engine that fails to load."""
    pair.decode.inject(Fault(kind=FaultKind.LOAD_FAILS))
    return await pair.nixl_params()


async def test_a_failed_transfer_is_an_internal_error(open_pair: OpenPair) -> None:
    """With load policy `fail`; the same request without parameters is served."""
    async with open_pair("nixl") as pair:
        answer = await pair.decoded(await told_to_fail(pair))
        assert answer.status_code == 500 and answer.json()["error"]["message"] == "Internal server error"
        assert await metric(pair.to_decode, "nixl_num_failed_transfers_total") == 1
        assert (await pair.to_decode.post(CHAT, json=prompt())).status_code == 200


async def test_a_failed_transfer_ends_a_started_stream(open_pair: OpenPair) -> None:
    """Status 200, then only the error and the end marker."""
    async with open_pair("nixl") as pair:
        answer = await pair.decoded(await told_to_fail(pair), stream=True)
        error, end = answer.text.strip().split("\n\n")
        assert answer.status_code == 200 and '"code":500' in error and end == "data: [DONE]"


async def test_a_prefill_engine_can_die_before_its_response(open_pair: OpenPair) -> None:
    """The prompt is computed without a response; once healed the engine is empty."""
    async with open_pair("nixl") as pair:
        pair.prefill.inject(Fault(kind=FaultKind.DIE_BEFORE_ANSWER))
        assert (await pair.to_prefill.post(CHAT, json=prompt())).status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            await pair.nixl_params()
        with pytest.raises(httpx.ConnectError):
            await pair.to_prefill.get("/health")
        await pair.prefill.heal()
        assert cached(await pair.to_prefill.post(CHAT, json=prompt())) == 0 and pair.idle


async def test_a_leg_without_a_connector_is_an_ordinary_request(open_pair: OpenPair) -> None:
    """As vLLM ignores unused parameters."""
    async with open_pair("") as pair:
        answer = await pair.to_prefill.post(CHAT, json=prompt(kv_transfer_params=OFFER))
        assert said(answer) and "kv_transfer_params" not in answer.json() and pair.idle


# --- disconnects ---


async def test_disconnecting_a_prefill_leg_frees_its_blocks(open_pair: OpenPair) -> None:
    """The engine aborts; no KV is held."""
    async with open_pair("nixl", time_scale=1000.0) as pair:
        request = under_way(pair.nixl_params())
        await pair.until(lambda: pair.prefill.load.running > 0)
        request.cancel()
        await pair.until(lambda: pair.idle)


async def test_disconnecting_during_a_transfer_frees_the_peers_blocks(open_pair: OpenPair) -> None:
    """A request that waits for KV counts as waiting; a disconnect frees the held KV."""
    async with open_pair("nixl", {"link": ENDLESS}, time_scale=0.01) as pair:
        params = await pair.nixl_params()
        request = under_way(pair.decoded(params))
        while await metric(pair.to_decode, "num_requests_waiting") == 0:
            pass
        assert pair.prefill.pinned_requests
        request.cancel()
        await pair.until(lambda: pair.idle)
        assert await metric(pair.to_decode, "num_requests_waiting") == 0


async def test_disconnecting_a_decode_leg_frees_its_blocks(open_pair: OpenPair) -> None:
    """The transfer is complete, the response has started."""
    async with open_pair("nixl") as pair:
        params = await pair.nixl_params()
        async with pair.to_decode.stream(
            "POST", CHAT, json=prompt(kv_transfer_params=params, stream=True, max_tokens=1900)
        ) as answer:
            async for _ in answer.aiter_raw():
                break
        await pair.until(lambda: pair.idle)


async def test_a_transfer_takes_the_time_of_its_link(open_pair: OpenPair) -> None:
    """t0 + bytes / bandwidth, scaled; a decode engine with a shorter wait fails."""
    async with open_pair("nixl", {"link": ENDLESS, "wait_s": 0.05}, time_scale=0.01) as pair:
        answer = await pair.decoded(await pair.nixl_params())
        assert answer.status_code == 500
        await pair.until(lambda: pair.idle)
