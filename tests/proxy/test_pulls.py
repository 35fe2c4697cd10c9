"""Requests whose pod pulls KV from a peer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.decision import Direct, Pull
from router.types import Link, Links
from tests.proxy.pods import CHAT, Asked, town
from tests.proxy.test_split_executor import ANSWERING, refusing_handoffs, resetting

pytestmark = [pytest.mark.net, pytest.mark.anyio]

PULL = Pull("holder", 32)


async def test_the_request_names_the_holder_of_the_prefix() -> None:
    """In the pod's dialect. The holder receives no request, but counts as sending until the first token."""
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
    """The next candidate receives the client's own body; no pod has failed."""
    async with town(a=refusing_handoffs(status), holder=ANSWERING) as pods:
        client = await pods.serve(pods.context(Direct(pods.pod("a"), PULL), Direct(pods.pod("a"))))
        assert client.json["choices"][0]["message"]["content"] == "recomputed"
        assert pods.failures("a") == pods.failures("holder") == 0
        await pods.left_alone()
        await pods.until(lambda: pods.made["a"].connected == 1)


async def test_a_server_error_to_a_pull_counts_for_the_pod() -> None:
    """As for any request."""
    async with town(a=resetting, holder=ANSWERING) as pods:
        client = await pods.serve(pods.context(Direct(pods.pod("a"), PULL), Direct(pods.pod("holder"))))
        assert client.header(b"x-warmroute-pod") == b"holder"
        assert (pods.failures("a"), len(pods.made["a"].asked)) == (1, 1)


async def test_the_last_candidates_refusal_is_relayed() -> None:
    """No candidate is left."""
    async with town(a=refusing_handoffs(500), holder=ANSWERING) as pods:
        assert (await pods.serve(pods.context(Direct(pods.pod("a"), PULL)))).status == 500


async def test_without_its_holder_a_pod_receives_the_clients_own_body() -> None:
    """The holder was removed after the decision, or its facts are unknown."""
    async with town(a=ANSWERING, holder=ANSWERING) as pods:
        await pods.serve(pods.context(Direct(pods.pod("a"), Pull("gone", 32))))
        pods.facts = None
        await pods.serve(pods.context(Direct(pods.pod("a"), PULL)))
        assert [asked.body for asked in pods.made["a"].asked] == [CHAT, CHAT]


async def test_a_pull_calibrates_its_link() -> None:
    """By its time without computing the rest of the prompt, and the transferred KV."""
    async with town(a=ANSWERING, holder=ANSWERING) as pods:
        pods.calibrator.links = Links(elsewhere=Link(500.0, 1e6, "slow"))
        plan = Direct(replace(pods.pod("a"), kv_bytes_per_token=1000), Pull("holder", 32, 32))
        for _ in range(3):
            await pods.serve(pods.context(plan, stream=True))
        known = pods.calibrator.calibration.link("slow", Link(500.0, 1e6, "slow"))
        assert known.t0_ms < 500.0
