"""Pods that are told where their KV is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.decision import Direct, Pull
from router.types import Link, Links
from tests.proxy.pods import CHAT, Asked, town
from tests.proxy.test_split_executor import ANSWERING, refusing_handoffs, resetting

pytestmark = [pytest.mark.net, pytest.mark.anyio]

PULL = Pull("holder", 32)


async def test_a_pod_is_told_who_holds_its_prefix() -> None:
    """In its own dialect; the holder itself gets no request, but counts as sending until the first token."""
    sending: list[int] = []

    async def serving(asked: Asked) -> None:
        sending.append(pods.ledger.inflight()["holder"].pulls)
        await ANSWERING(asked)

    async with town(a=serving, holder=ANSWERING) as pods:
        client = await pods.serve(pods.context(Direct(pods.pod("a"), PULL), stream=True))
        source = pods.made["a"].asked[0].body["kv_transfer_params"]["remote_kv_source"]
        assert client.status == 200
        assert source["remote_host"] == "127.0.0.1"
        assert sending == [1]
        assert not pods.made["holder"].asked
        await pods.left_alone()


@pytest.mark.parametrize("status", [400, 500])
async def test_a_pull_that_is_refused_is_not_the_clients_error(status: int) -> None:
    """The next candidate gets the client's own body; nobody is blamed for what two pods could not do."""
    async with town(a=refusing_handoffs(status), holder=ANSWERING) as pods:
        client = await pods.serve(pods.context(Direct(pods.pod("a"), PULL), Direct(pods.pod("a"))))
        assert client.json["choices"][0]["message"]["content"] == "recomputed"
        assert pods.failures("a") == pods.failures("holder") == 0
        await pods.left_alone()
        await pods.until(lambda: pods.made["a"].connected == 1)


async def test_a_pod_that_fails_over_a_pull_is_to_blame() -> None:
    """As over any other request."""
    async with town(a=resetting, holder=ANSWERING) as pods:
        client = await pods.serve(pods.context(Direct(pods.pod("a"), PULL), Direct(pods.pod("holder"))))
        assert client.header(b"x-warmroute-pod") == b"holder"
        assert (pods.failures("a"), len(pods.made["a"].asked)) == (1, 1)


async def test_the_last_candidates_refusal_is_passed_on() -> None:
    """There is nobody to ask instead."""
    async with town(a=refusing_handoffs(500), holder=ANSWERING) as pods:
        assert (await pods.serve(pods.context(Direct(pods.pod("a"), PULL)))).status == 500


async def test_without_its_holder_a_pod_gets_the_clients_own_body() -> None:
    """It has gone since the decision, or too little is known of it."""
    async with town(a=ANSWERING, holder=ANSWERING) as pods:
        await pods.serve(pods.context(Direct(pods.pod("a"), Pull("gone", 32))))
        pods.facts = None
        await pods.serve(pods.context(Direct(pods.pod("a"), PULL)))
        assert [asked.body for asked in pods.made["a"].asked] == [CHAT, CHAT]


async def test_a_pull_teaches_what_lies_between() -> None:
    """What it took beyond the rest of the prompt, by the KV that travelled."""
    async with town(a=ANSWERING, holder=ANSWERING) as pods:
        pods.calibrator.links = Links(elsewhere=Link(500.0, 1e6, "slow"))
        plan = Direct(replace(pods.pod("a"), kv_bytes_per_token=1000), Pull("holder", 32, 32))
        for _ in range(3):
            await pods.serve(pods.context(plan, stream=True))
        known = pods.calibrator.calibration.link("slow", Link(500.0, 1e6, "slow"))
        assert known.t0_ms < 500.0
